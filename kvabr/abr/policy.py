"""The contract of an ABR policy: it decides the next request and gives a reason.

The smallest policy is one method::

    class Cautious(Policy):
        def decide(self, view: View) -> Decision:
            group = view.first_missing()
            if group is None:
                return Decision.finish("every group is in place or under way")
            share = view.budget_bytes(view.lower_bound) / len(view.missing)
            return Decision.fetch(group, view.best_track(group, share), f"{share:.0f} bytes a group")

A tunable policy declares its parameters (`kvabr.types.parameters`) and accepts each as a keyword argument with the same
default. `kvabr tune` searches them::

    class Mine(Policy):
        parameters = {"caution": Parameter(0.2, 1.0, 0.7)}

        def __init__(self, *, caution: float = 0.7) -> None:
            self._caution = caution

On the command line, write ``mine:caution=0.5``, or ``FILE.py:Mine:caution=0.5``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from kvabr.abr.tail import TailOffer
from kvabr.abr.view import View

Kind = Literal["fetch", "upgrade", "recompute", "wait", "finish", "deliver"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The next action of a play. Create it with the static methods below; each takes a reason, which is logged."""

    kind: Kind
    reason: str
    group: int | None = None
    track: str | None = None
    alternatives: Mapping[str, float] | None = None
    """Rejected choices, for the log: bytes by track, or any numbers that the policy compared."""
    last: int | None = None
    """Group after the last one to recompute in the same call; None: only one group."""
    local: bool = False
    """True if the group is in the local store."""

    @staticmethod
    def fetch(group: int, track: str, reason: str, alternatives: Mapping[str, float] | None = None) -> Decision:
        """Request a missing group."""
        return Decision("fetch", reason, group, track, alternatives)

    @staticmethod
    def upgrade(group: int, track: str, reason: str, alternatives: Mapping[str, float] | None = None) -> Decision:
        """Request a better track or one more layer for a group in place, or layers above a track in flight."""
        return Decision("upgrade", reason, group, track, alternatives)

    @staticmethod
    def recompute(group: int, reason: str, last: int | None = None) -> Decision:
        """Assign a group to the engine, or all up to ``last`` (exclusive) in one call; rejected without an engine.

        The group must be missing or upgradable. Requests in flight for later groups of the call are cancelled when it
        begins. In suffix mode, the engine computes all later groups, even those in place.
        """
        return Decision("recompute", reason, group, last=last)

    @staticmethod
    def wait(reason: str) -> Decision:
        """Request no group until something changes."""
        return Decision("wait", reason)

    @staticmethod
    def finish(reason: str) -> Decision:
        """Send no further requests; deliver as soon as every group is in place."""
        return Decision("finish", reason)

    @staticmethod
    def deliver(reason: str) -> Decision:
        """Cancel the upgrades in flight and deliver now; rejected while a group has not arrived."""
        return Decision("deliver", reason)


class Division(NamedTuple):
    """The division of the remaining work between network and engine, and its expected times."""

    at_s: float
    """When it was decided, in seconds since the play began; the other times are seconds from then."""
    first: int
    """First group that the engine computes."""
    last: int
    """Group after the last one that the engine computes; equal to `first` if there are none."""
    network_s: float
    """Seconds until the network has delivered its part."""
    engine_s: float
    """Seconds until the engine has computed its part; in suffix mode it begins after the network."""
    play_s: float
    """Seconds until everything would be in place if the network delivered all of it."""
    compute_s: float
    """Seconds until everything would be in place if the engine computed all of it."""
    known: bool
    """True if the link rate was known."""

    @property
    def ends_s(self) -> float:
        """Seconds until everything should be in place."""
        return max(self.network_s, self.engine_s)

    def to_json(self) -> dict[str, float]:
        """Return the fields and `ends_s` as plain JSON values."""
        return self._asdict() | {"ends_s": self.ends_s}


class Policy(ABC):
    """Decides the requests of a play. One object serves one play."""

    name: ClassVar[str] = ""
    """Name on the command line. A policy from a file uses its class name."""
    estimator: ClassVar[str] = "tracking"
    """Default estimator."""
    abandons: ClassVar[bool] = True
    """True if the player may cancel a transfer that would be late while a cheaper one would not."""

    paces: ClassVar[bool] = False
    """True if the policy limits the requests in flight itself: the player calls it until it waits, or until the maximum
    number of requests is in flight. Otherwise the player calls it until the bytes in flight last for a round trip."""

    computes: ClassVar[bool] = False
    """True if only the policy assigns work to the engine before the deadline. Otherwise the player also assigns groups
    that will be late; to policies that divide the work, only if the link delivers nothing."""

    divides: ClassVar[bool] = False
    """True if the policy weighs computing against fetching. Then a prompt that the engine computes faster than a usual
    lookup is not looked up, and the policy is also called while `View.full`, to give an idle engine work."""

    def start(self, view: View) -> None:  # noqa: B027  # an optional hook
        """Start a play."""

    takes_cached: ClassVar[bool] = False
    """True if it accepts groups that were put in place, on any track, before its first decision."""

    @abstractmethod
    def decide(self, view: View) -> Decision:
        """Return the next request.

        Called whenever the player could send another request: at the start, and after every change. It must return
        immediately and have no side effects outside itself.
        """

    def choose_tail(self, offers: Sequence[TailOffer], costs: Sequence[float]) -> int:  # noqa: ARG002  # a hook
        """Return the index of the offer to use: how much of the prefix to compute with the question.

        Called before `start`.

        Args:
            offers: from no tail to the longest.
            costs: expected cost of a play with each, including time and engine, nats per generated token. An offer that
                is only a last resort costs as much more as a missed deadline.
        """
        good = min(costs)
        return next(index for index, cost in enumerate(costs) if cost <= good)

    @property
    def division(self) -> Division | None:
        """The present division of the work, for log and record; None if the policy does not divide it."""
        return None

    def will_replace(self, view: View, group: int) -> bool:  # noqa: ARG002  # an optional hook
        """Return True if the policy will request another track for a group that waits for decoding.

        The player then decodes other groups first, so that this one need not be decoded twice.
        """
        return False


class FrontToBack(Policy):
    """Fetches every group once, in order; subclasses choose the track."""

    def decide(self, view: View) -> Decision:
        """Return what `choose` returns for the first missing group."""
        group = view.first_missing()
        if group is None:
            return Decision.finish("every group is in place or under way")
        return self.choose(view, group)

    @abstractmethod
    def choose(self, view: View, group: int) -> Decision:
        """Return how to obtain the first missing group."""
