"""The listener protocol, and bounded per-play state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from kvabr.types.events import PlayEnded, PlayEvent

S = TypeVar("S")

MAX_PLAYS = 1024


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event of one play."""

    play: str
    """Random, the ``sid`` of CMCD."""
    wall_s: float
    """Seconds since 1970."""
    event: PlayEvent
    """`PlayCalled` is the first of every play, `PlayEnded` the last."""


class Listener(ABC):
    """Receives the events of plays, one at a time, in its own thread."""

    name: ClassVar[str] = "listener"

    @abstractmethod
    def receive(self, record: EventRecord) -> None:
        """Handle one event; may block or raise.

        When the listener's queue is full, events are dropped, `PlayEnded` last, so any event may be a play's first.
        """

    def close(self) -> None:  # noqa: B027  # a hook that few need
        """Release resources; no event follows."""


class PlayStates(Generic[S]):
    """States of the last 1,024 active plays. The number is bounded, since ends of plays may be dropped."""

    def __init__(self, make: Callable[[str], S]) -> None:
        self._make = make
        self._states: dict[str, S] = {}

    def __len__(self) -> int:
        return len(self._states)

    def of(self, record: EventRecord) -> S:
        """Return the state of an event's play; `PlayEnded` removes it."""
        found = self._states.pop(record.play, None)
        if found is None:
            found = self._make(record.play)
        if not isinstance(record.event, PlayEnded):
            self._states[record.play] = found
            if len(self._states) > MAX_PLAYS:
                del self._states[next(iter(self._states))]
        return found
