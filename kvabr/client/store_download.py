"""What comes out of an object store: the end of patience, and where the bytes go."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from kvabr.client.lanes import RangeTransfer

if TYPE_CHECKING:
    from kvabr.client.store_connection import StoreConnection

_DROPPED_BYTES = 64 << 10
"""Bytes that nobody wants and that are received at a time."""


class Silence:
    """Cancels the running task once nothing has come for too long."""

    def __init__(self, first_s: float, further_s: float) -> None:
        """Begin to wait: ``first_s`` seconds for the first bytes, then ``further_s`` for more."""
        self.over = False
        """Whether it has cancelled the task."""
        self.seconds = first_s
        self._further_s, self._parts = further_s, 0
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(first_s, self._look, 0)

    def heard(self) -> bool:
        """Note that something has come; return whether it is the first."""
        self._parts += 1
        return self._parts == 1

    def close(self) -> None:
        """Stop waiting."""
        self._timer.cancel()

    def _look(self, parts: int) -> None:
        if self._parts > parts:
            self.seconds = self._further_s
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._look, self._parts)
        elif self._task is not None:
            self.over = True
            self._task.cancel()


class Arriving:
    """Puts what comes of a transfer where it is wanted: a `Sink` of a `DirectReader`, or with parts of a stream."""

    def __init__(self, owner: StoreConnection, transfer: RangeTransfer, silence: Silence) -> None:
        self._owner, self._transfer, self._silence = owner, transfer, silence
        self._begun_s, self._late_until_s = time.monotonic(), -math.inf
        self._room = memoryview(b"")

    def room(self) -> memoryview:
        """See `Sink.room`; what nobody wants any more is received as well, and dropped."""
        piece, at = self._transfer.pieces[0], self._transfer.at
        wanted = self._owner.wanting(piece)
        if wanted is not None:
            self._room = wanted.room(piece.end - at)
        else:
            self._room = memoryview(bytearray(min(piece.end - at, _DROPPED_BYTES)))
        return self._room

    def took(self, count: int) -> None:
        """See `Sink.took`."""
        now, owner = time.monotonic(), self._owner
        if self._silence.heard():
            self._late_until_s = owner.first_byte(self._begun_s, now)
        limit = owner.received(count, late=now < self._late_until_s)
        for piece, own in self._transfer.take(self._room[:count]):
            wanted = owner.wanting(piece)
            if wanted is not None:
                wanted.took(len(own), limit)
                owner.advanced(piece, wanted)

    def push(self, part: memoryview) -> None:
        """Take what lies elsewhere."""
        while part:
            room = self.room()
            count = min(len(room), len(part))
            room[:count] = part[:count]
            self.took(count)
            part = part[count:]
