"""What every ABR policy is: it answers one question, what next, and always says why.

The smallest policy is one method::

    class Cautious(Policy):
        def decide(self, view: View) -> Decision:
            group = view.first_missing()
            if group is None:
                return Decision.finish("every group is in place or under way")
            share = view.budget_bytes(view.lower_bound) / len(view.missing)
            return Decision.fetch(group, view.best_track(group, share), f"{share:.0f} bytes a group")

The numbers that a policy may be tuned by: it declares them, its constructor takes them, `kvabr tune` searches them.

A policy that can be tuned declares a mapping and takes each of its names as a keyword of the same default::

    class Mine(Policy):
        parameters = {"caution": Parameter(0.2, 1.0, 0.7)}

        def __init__(self, *, caution: float = 0.7) -> None:
            self._caution = caution

By name such a policy is written ``mine:caution=0.5``, or ``FILE.py:Mine:caution=0.5``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from kvabr.abr.view import View
from kvabr.types.errors import PolicyError

Kind = Literal["fetch", "upgrade", "recompute", "wait", "finish"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy wants next. Use the constructors below: each takes a reason, and the reason reaches the log."""

    kind: Kind
    reason: str
    group: int | None = None
    track: str | None = None
    alternatives: Mapping[str, float] | None = None
    """What else was on offer, for the log: track to bytes, or to whatever number the policy compared."""

    @staticmethod
    def fetch(group: int, track: str, reason: str, alternatives: Mapping[str, float] | None = None) -> Decision:
        """Ask for a missing group."""
        return Decision("fetch", reason, group, track, alternatives)

    @staticmethod
    def upgrade(group: int, track: str, reason: str, alternatives: Mapping[str, float] | None = None) -> Decision:
        """Ask for a group that is in place already, at a better track or with a layer more."""
        return Decision("upgrade", reason, group, track, alternatives)

    @staticmethod
    def recompute(group: int, reason: str) -> Decision:
        """Leave a group to the engine, one that is missing or could be upgraded; refused where the play has none.

        In suffix mode it computes all behind it, too, in place or not.
        """
        return Decision("recompute", reason, group)

    @staticmethod
    def wait(reason: str) -> Decision:
        """Ask for nothing until something happens."""
        return Decision("wait", reason)

    @staticmethod
    def finish(reason: str) -> Decision:
        """Ask for nothing more: deliver as soon as every group is in place."""
        return Decision("finish", reason)


class Policy(ABC):
    """Decides what a play asks for. One object serves one play."""

    name: ClassVar[str] = ""
    """Name on the command line; a policy from a file goes by its class's name."""
    estimator: ClassVar[str] = "tracking"
    """The estimator that it wants unless the user names another."""
    abandons: ClassVar[bool] = True
    """Whether the player may cancel a transfer of this policy that will not make it when a cheaper one still can."""

    paces: ClassVar[bool] = False
    """Whether the policy itself says how much to keep in flight. It is then asked until it waits, or until as many
    requests are in flight as the player allows; else until so much is in flight as lasts for a round trip."""

    computes: ClassVar[bool] = False
    """Whether, until the deadline, the policy alone says what the engine computes. Else the player, too, leaves it what
    the network will not bring in time."""

    def start(self, view: View) -> None:  # noqa: B027  # a hook that few need
        """Begin a play."""

    takes_kept: ClassVar[bool] = False
    """Whether it goes on from groups that were put in place before it was asked, on whatever track they were."""

    @abstractmethod
    def decide(self, view: View) -> Decision:
        """Say what to ask for next.

        Called whenever the player could send one more request: at the start, and after whatever changed. It must
        return at once and without side effects outside itself.
        """


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
