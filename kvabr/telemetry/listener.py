"""The interface of listeners, and bounded per-play state."""

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
    """Random identifier of the play, the ``sid`` of CMCD."""
    wall_s: float
    """Time of the event, seconds since 1970."""
    event: PlayEvent
    """The event. The first event of every play is `PlayCalled`, the last is `PlayEnded`."""


class Listener(ABC):
    """Receives the events of plays, one at a time, in its own thread."""

    name: ClassVar[str] = "listener"

    @abstractmethod
    def receive(self, record: EventRecord) -> None:
        """Handle one event. The method may block or raise.

        If the listener's queue is full, events are dropped (`PlayEnded` only if necessary), so the first event of a
        play may be of any type.
        """

    def close(self) -> None:  # noqa: B027  # a hook that few need
        """Release resources. No event follows."""


class PlayStates(Generic[S]):
    """States of the last 1,024 active plays. Their number is limited because the end of a play may be dropped."""

    def __init__(self, make: Callable[[str], S]) -> None:
        self._make = make
        self._states: dict[str, S] = {}

    def __len__(self) -> int:
        return len(self._states)

    def of(self, record: EventRecord) -> S:
        """Return the state of an event's play; remove it at `PlayEnded`."""
        found = self._states.pop(record.play, None)
        if found is None:
            found = self._make(record.play)
        if not isinstance(record.event, PlayEnded):
            self._states[record.play] = found
            if len(self._states) > MAX_PLAYS:
                del self._states[next(iter(self._states))]
        return found
