"""What a server takes back, told at once to the relays behind it.

A relay subscribes to the track `changes_track`. Its only group is published as soon as an asset that the relay's token
opened is removed, replaced, or no longer opened: *marks* of such assets, and the position to go on from. The mark of an
asset is a digest of its name, so it tells nothing to those who do not know the name.

A relay passes on what it is told, so that relays behind it learn of it in the same moment.
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
"""Bound on one answer."""
_MAX_MARKS = 4096
"""Marks that are remembered; a relay that missed more is told that anything may have changed."""
_SCHEMA = "kvabr.changes/1"


def mark_of(namespace: TrackNamespace) -> str:
    """Return the mark of an asset: 64 hex digits that only those can relate to its name who know the name."""
    return hashlib.sha256(f"kvabr.mark/1\0{namespace.model}\0{namespace.prompt}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Changes:
    """What was taken back between two positions."""

    position: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """Where the next question begins."""
    marks: Annotated[tuple[Sha256, ...], Meta(max_length=_MAX_MARKS)] = ()
    """Of assets that were removed, replaced, or are no longer opened."""
    everything: bool = False
    """Whether any asset may have changed: the server does not know what it told before."""

    def dumps(self) -> bytes:
        """Return this as JSON."""
        value = {"schema": _SCHEMA, "position": self.position, "everything": self.everything, "marks": self.marks}
        return json.dumps(value).encode()

    @classmethod
    def loads(cls, data: bytes) -> Changes:
        """Parse what `dumps` returned, from an untrusted source; raise `FormatError` if it is something else."""
        read_schema(data, "changes", _SCHEMA)
        return decode(data, cls, "changes")


class ChangeLog:
    """What was taken back lately, and the tracks of what will be. `add` may be called in any thread."""

    def __init__(self) -> None:
        """Begin at a position that no earlier log has reached."""
        self._begin = self._end = time.time_ns()
        self._marks: deque[tuple[int, str]] = deque()
        self._following: WeakKeyDictionary[_ChangesTrack, asyncio.AbstractEventLoop] = WeakKeyDictionary()
        """Tracks that have no group yet."""
        self._lock = threading.Lock()

    def add(self, marks: Iterable[str] = (), *, everything: bool = False) -> None:
        """Record marks, or that any asset may have changed, and publish that to those who follow."""
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
        for track, loop in following:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._tell, track)

    def since(self, position: int) -> Changes | None:
        """Return what was taken back after a position; None if nothing was."""
        with self._lock:
            if not self._begin <= position <= self._end:
                return Changes(self._end, everything=True)
            marks = dict.fromkeys(mark for at, mark in self._marks if at > position)
            return Changes(self._end, tuple(marks)) if marks else None

    def follow(self, position: int) -> GrowingBytes:
        """Return a track whose only group is what is taken back after a position, once something is."""
        track = _ChangesTrack(position)
        with self._lock:
            self._following[track] = asyncio.get_running_loop()
        self._tell(track)
        return track

    def __len__(self) -> int:
        """Return how many tracks wait."""
        return len(self._following)

    def _tell(self, track: _ChangesTrack) -> None:
        if track.growing and (found := self.since(track.position)) is not None:
            track.append(found.dumps())
            track.finish()
            with self._lock:
                self._following.pop(track, None)


class _ChangesTrack(GrowingBytes):
    """What is taken back after a position; it lives as long as a subscription to it."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


def changes_track(position: int) -> str:
    """Return the name of the track of what is taken back after a position; 0: it has its group at once."""
    return f"{CHANGES_TRACK}{position}"


def position_in(track: str) -> int | None:
    """Return the position in the name of a `changes_track`; None if it is none."""
    text = track.removeprefix(CHANGES_TRACK)
    return int(text) if text != track and len(text) < 20 and text.isascii() and text.isdigit() else None
