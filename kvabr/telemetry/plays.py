"""What a listener remembers of each play that is going on: bounded, for the end of a play may never be heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvabr.telemetry.listener import Heard
from kvabr.types.events import PlayEnded

S = TypeVar("S")

_MOST = 1024
"""Plays that are remembered; the oldest is forgotten for one more."""


class Plays(Generic[S]):
    """One state for each play."""

    def __init__(self, make: Callable[[str], S]) -> None:
        """Take what makes the state of a play from its name."""
        self._make = make
        self._states: dict[str, S] = {}

    def __len__(self) -> int:
        return len(self._states)

    def of(self, heard: Heard) -> S:
        """The state of the play that is heard of; the last time if this is its end."""
        if isinstance(heard.event, PlayEnded):
            found = self._states.pop(heard.play, None)
            return self._make(heard.play) if found is None else found
        if heard.play not in self._states:
            if len(self._states) >= _MOST:
                del self._states[next(iter(self._states))]
            self._states[heard.play] = self._make(heard.play)
        return self._states[heard.play]
