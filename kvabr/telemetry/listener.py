"""The listener protocol, and a bounded memory of the plays that a listener follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from kvabr.types.events import PlayEnded, PlayEvent

S = TypeVar("S")

MAX_PLAYS = 1024


@dataclass(frozen=True, slots=True)
class Heard:
    """One event of one play."""

    play: str
    """Random identifier of the play, the ``sid`` of CMCD."""
    wall_s: float
    """Time of the event, seconds since 1970."""
    event: PlayEvent
    """`PlayCalled` is the first event of every play, `PlayEnded` the last."""


class Listener(ABC):
    """Receives the events of plays, one after the other, in a thread of its own."""

    name: ClassVar[str] = "listener"
    """For messages and counters."""

    @abstractmethod
    def hear(self, heard: Heard) -> None:
        """Handle one event.

        It may block and it may raise: no play waits for it. Events that come faster than they are taken are dropped,
        so any event may be the first of a play; `PlayEnded` is dropped last.
        """

    def close(self) -> None:  # noqa: B027  # a hook that few need
        """Release what the listener holds; no event follows."""


class PlayStates(Generic[S]):
    """A state for each of the last 1,024 plays that were heard of: the end of a play may be dropped."""

    def __init__(self, make: Callable[[str], S]) -> None:
        """Make states by ``make``, from the identifier of a play."""
        self._make = make
        self._states: dict[str, S] = {}

    def __len__(self) -> int:
        return len(self._states)

    def of(self, heard: Heard) -> S:
        """Return the state of an event's play; after `PlayEnded` it is forgotten."""
        found = self._states.pop(heard.play, None)
        if found is None:
            found = self._make(heard.play)
        if not isinstance(heard.event, PlayEnded):
            self._states[heard.play] = found
            if len(self._states) > MAX_PLAYS:
                del self._states[next(iter(self._states))]
        return found
