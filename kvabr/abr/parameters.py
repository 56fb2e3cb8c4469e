"""The numbers that a policy may be tuned by: it declares them, its constructor takes them, `kvabr tune` searches them.

A policy that can be tuned declares a mapping and takes each of its names as a keyword of the same default::

    class Mine(Policy):
        parameters = {"caution": Parameter(0.2, 1.0, 0.7)}

        def __init__(self, *, caution: float = 0.7) -> None:
            self._caution = caution

By name such a policy is written ``mine:caution=0.5``, or ``FILE.py:Mine:caution=0.5``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvabr.types.errors import PolicyError

_MOST = 32
"""Parameters that a policy may declare: nobody can search more."""


class Parameter(NamedTuple):
    """One number of a policy, and where to look for a good one."""

    low: float
    high: float
    default: float
    log: bool = False
    """Whether ratios matter rather than differences, so that the search is even on a logarithmic scale."""

    def at(self, share: float) -> float:
        """The value at ``share`` (0 to 1) of the way from `low` to `high`, with four significant digits."""
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return min(self.high, max(self.low, float(f"{value:.4g}")))

    def share(self, value: float) -> float:
        """The inverse of `at`: where ``value`` lies between `low` and `high`, 0 to 1."""
        if self.log:
            place = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, place))


def declared(cls: type[Any]) -> dict[str, Parameter]:
    """The parameters that a policy's class declares, checked; empty if it declares none.

    Raises:
        PolicyError: what it declares is not a mapping from names to (low, high, default) or (low, high, default, log).
    """
    title = getattr(cls, "name", "") or cls.__name__
    table = getattr(cls, "parameters", {})
    if not isinstance(table, Mapping) or len(table) > _MOST:
        raise PolicyError(f"policy {title}: `parameters` must map up to {_MOST} names to (low, high, default[, log])")
    return {str(name): _checked(title, name, value) for name, value in table.items()}


def parse(text: str) -> dict[str, float]:
    """Values from ``name=value,name=value``.

    Raises:
        PolicyError: it is not of that form, or a value is not a finite number.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not equals or not name.strip().isidentifier() or not math.isfinite(number) or name.strip() in found:
            raise PolicyError(f"parameters {text!r}: {part!r} is not name=number; write name=0.5,other=2")
        found[name.strip()] = number
    return found


def spell(policy: str, values: Mapping[str, float]) -> str:
    """The name of a policy with parameters; the opposite of what `parse` reads."""
    return f"{policy}:{','.join(f'{name}={value:.10g}' for name, value in values.items())}" if values else policy


def _checked(title: str, name: Any, value: Any) -> Parameter:
    is_name = isinstance(name, str) and name.isidentifier()
    if not is_name or not isinstance(value, tuple) or len(value) not in {3, 4}:
        raise PolicyError(f"policy {title}: parameter {name!r} is {value!r}; give (low, high, default[, log])")
    parameter = Parameter(*value)
    numbers = (parameter.low, parameter.default, parameter.high)
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) or not _ordered(*numbers):
        raise PolicyError(f"policy {title}: parameter {name} must have low <= default <= high and low < high")
    if parameter.log and parameter.low <= 0:
        raise PolicyError(f"policy {title}: parameter {name} is logarithmic, so its low must be above 0")
    return parameter


def _ordered(low: float, default: float, high: float) -> bool:
    return low <= default <= high and low < high
