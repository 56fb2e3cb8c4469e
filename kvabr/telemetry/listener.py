"""What every listener is: it hears of the events of plays, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

CALLED = "called"
"""The first line of every play, before its lookup; it has no fields beside ``t`` and ``event``."""
ENDED = "ended"
"""The last line of every play, however it ended: ``error`` is the name of what was raised, or None, and ``reason``
what it said."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One event of one play."""

    play: str
    """Which play: a random name, the ``sid`` of CMCD."""
    wall_s: float
    """When it happened, seconds since 1970."""
    line: Mapping[str, Any]
    """The event as the play's log has it: ``event``, ``t`` (seconds since the play began) and what belongs to it."""


class Listener(ABC):
    """Hears of plays, from one thread, one event after the other."""

    name: ClassVar[str] = "listener"
    """For messages and counters."""

    @abstractmethod
    def hear(self, heard: Heard) -> None:
        """Take one event.

        It may block and it may raise: no play waits for it. The first line that is heard of a play may be any, since
        lines that come faster than they are heard are dropped; `ENDED` is dropped last.
        """

    def close(self) -> None:  # noqa: B027  # a hook that few need
        """Nothing more will be heard."""
