"""What every listener is: it hears of the events of plays, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvabr.types.events import PlayEvent


@dataclass(frozen=True, slots=True)
class Heard:
    """One event of one play."""

    play: str
    """Which play: a random name, the ``sid`` of CMCD."""
    wall_s: float
    """When it happened, seconds since 1970."""
    event: PlayEvent
    """The event; `PlayCalled` is the first of every play, `PlayEnded` the last."""


class Listener(ABC):
    """Hears of plays, from one thread, one event after the other."""

    name: ClassVar[str] = "listener"
    """For messages and counters."""

    @abstractmethod
    def hear(self, heard: Heard) -> None:
        """Take one event.

        It may block and it may raise: no play waits for it. The first event that is heard of a play may be any, since
        events that come faster than they are heard are dropped; `PlayEnded` is dropped last.
        """

    def close(self) -> None:  # noqa: B027  # a hook that few need
        """Nothing more will be heard."""
