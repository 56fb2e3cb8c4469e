"""What every ABR policy is: it answers one question, what next, and always says why.

The smallest policy is one method::

    class Cautious(Policy):
        def decide(self, view: View) -> Decision:
            group = view.first_missing()
            if group is None:
                return Decision.finish("every group is in place or under way")
            share = view.budget_bytes(view.lower_bound) / len(view.missing)
            return Decision.fetch(group, view.best_track(group, share), f"{share:.0f} bytes a group")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvabr.abr.view import View

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
