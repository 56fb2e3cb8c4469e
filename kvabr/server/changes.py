"""Revocations: how a server reports removed assets to its relays at once.

A relay subscribes to the track `changes_track`. Its only group is published when an asset that the relay's token opened
is removed, replaced, or no longer open: the *marks* of such assets, and the position for the next subscription. A mark
is a digest of the asset's name, useless without it. A relay forwards these reports to its own relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakKeyDictionary

from msgspec import Meta

from kvabr.server.growing import GrowingBytes
from kvabr.types.naming import CHANGES_TRACK, TrackNamespace
from kvabr.types.records import Sha256, decode, read_schema

MAX_CHANGES_BYTES = 1 << 20
_MAX_MARKS = 4096
"""Marks to remember; a relay that missed more must assume that any asset has changed."""
_SCHEMA = "kvabr.changes/1"


def mark_of(namespace: TrackNamespace) -> str:
    """Return an asset's mark: 64 hex digits that reveal its name only to those who know it."""
    return hashlib.sha256(f"kvabr.mark/1\0{namespace.model}\0{namespace.prompt}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Changes:
    """Assets removed between two positions."""

    position: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """Where the next report begins."""
    marks: Annotated[tuple[Sha256, ...], Meta(max_length=_MAX_MARKS)] = ()
    """Of assets removed, replaced, or closed to the token."""
    everything: bool = False
    """Any asset may have changed: the server does not have the position."""

    def dumps(self) -> bytes:
        """Return JSON."""
        value = {"schema": _SCHEMA, "position": self.position, "everything": self.everything, "marks": self.marks}
        return json.dumps(value).encode()

    @classmethod
    def loads(cls, data: bytes) -> Changes:
        """Parse `dumps` from an untrusted source; raise `FormatError`."""
        read_schema(data, "changes", _SCHEMA)
        return decode(data, cls, "changes")


class ChangeLog:
    """Recent removals, and the tracks that will report the next. `add` is thread-safe."""

    def __init__(self) -> None:
        self._begin = self._end = time.time_ns()
        self._marks: deque[tuple[int, str]] = deque()
        self._following: WeakKeyDictionary[GrowingBytes, tuple[int, asyncio.AbstractEventLoop]] = WeakKeyDictionary()
        """Positions and loops of tracks without a group; each lives as long as a subscription."""
        self._lock = threading.Lock()

    def add(self, marks: Iterable[str] = (), *, everything: bool = False) -> None:
        """Record and publish marks, or that any asset may have changed."""
        with self._lock:
            before = self._end
            for mark in marks:
                self._end += 1
                self._marks.append((self._end, mark))
            if everything:
                self._end += 1
                self._begin = self._end
                self._marks.clear()
            while len(self._marks) > _MAX_MARKS:
                self._begin = self._marks.popleft()[0]
            if self._end == before:
                return
            following = list(self._following.items())
            self._following.clear()
        for track, (position, loop) in following:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._publish, track, position)

    def since(self, position: int) -> Changes | None:
        """Return the removals after a position, or None."""
        with self._lock:
            if not self._begin <= position <= self._end:
                return Changes(self._end, everything=True)
            marks = dict.fromkeys(mark for at, mark in self._marks if at > position)
            return Changes(self._end, tuple(marks)) if marks else None

    def follow(self, position: int) -> GrowingBytes:
        """Return a track with a single group: the first removals after a position, when there are any."""
        track = GrowingBytes()
        with self._lock:
            self._following[track] = position, asyncio.get_running_loop()
        self._publish(track, position)
        return track

    def __len__(self) -> int:
        return len(self._following)

    def _publish(self, track: GrowingBytes, position: int) -> None:
        if track.growing and (found := self.since(position)) is not None:
            track.append(found.dumps())
            track.finish()
            with self._lock:
                self._following.pop(track, None)


def changes_track(position: int) -> str:
    """Return the name of the track of removals after a position; that of 0 has its group at once."""
    return f"{CHANGES_TRACK}{position}"


def position_in(track: str) -> int | None:
    """Return a `changes_track`'s position, or None."""
    text = track.removeprefix(CHANGES_TRACK)
    return int(text) if text != track and len(text) < 20 and text.isascii() and text.isdigit() else None
