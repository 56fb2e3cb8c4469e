"""The tunable parameters of a plug-in, which `kvabr tune` searches; declared by a class, given as ``NAME:a=1,b=2``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvabr.types.errors import PolicyError


class Parameter(NamedTuple):
    """One tunable number of a policy, and its range."""

    low: float
    high: float
    default: float
    log: bool = False
    """True: search uniformly on a logarithmic scale, since ratios matter rather than differences."""

    def at(self, share: float) -> float:
        """Return the value at a position in the range (``share``: 0 to 1), rounded to four significant digits."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        value = low + share * (high - low)
        return min(self.high, max(self.low, float(f"{math.exp(value) if self.log else value:.4g}")))

    def share(self, value: float) -> float:
        """Return the position of ``value`` in the range, 0 to 1; the inverse of `at`."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        return min(1.0, max(0.0, (self._scaled(value) - low) / (high - low)))

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value


def declared(cls: type[Any]) -> dict[str, Parameter]:
    """Return the parameters that a policy class declares, after checking them; empty if there are none.

    Raises:
        PolicyError: the declaration does not map names to (low, high, default) or (low, high, default, log).
    """
    title = getattr(cls, "name", "") or cls.__name__
    table = getattr(cls, "parameters", {})
    if not isinstance(table, Mapping) or len(table) > 32:
        raise PolicyError(f"policy {title}: `parameters` must map up to 32 names to (low, high, default[, log])")
    return {str(name): _checked(title, name, value) for name, value in table.items()}


def parse(text: str) -> dict[str, float]:
    """Parse ``name=value,name=value``.

    Raises:
        PolicyError: the text has another form, or a value is not a finite number.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not equals or not name.strip().isidentifier() or not math.isfinite(number) or name.strip() in found:
            raise PolicyError(f"parameters {text!r}: {part!r} must be NAME=NUMBER, as in name=0.5,other=2")
        found[name.strip()] = number
    return found


def spell(policy: str, values: Mapping[str, float]) -> str:
    """Return a policy with parameters as written on the command line."""
    return f"{policy}:{','.join(f'{name}={value:.10g}' for name, value in values.items())}" if values else policy


def _checked(title: str, name: Any, value: Any) -> Parameter:
    is_name = isinstance(name, str) and name.isidentifier()
    if not is_name or not isinstance(value, tuple) or len(value) not in {3, 4}:
        raise PolicyError(f"policy {title}: parameter {name!r} must be (low, high, default[, log]), got {value!r}")
    parameter = Parameter(*value)
    numbers = (parameter.low, parameter.default, parameter.high)
    finite = all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
    if not finite or sorted(numbers) != [*numbers] or parameter.low == parameter.high:
        raise PolicyError(f"policy {title}: parameter {name} must have low <= default <= high and low < high")
    if parameter.log and parameter.low <= 0:
        raise PolicyError(f"policy {title}: parameter {name} is logarithmic, so low must be more than 0")
    return parameter
