"""One group on its way out of an object store: its buffer, what fills it, and the end of patience."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from kvabr.client.lanes import Piece, RangeTransfer
from kvabr.quic.download import BufferedDownload
from kvabr.quic.interface import GroupRequest
from kvabr.types.errors import Reason, RequestError
from kvabr.types.events import Limit

if TYPE_CHECKING:
    from kvabr.client.store_connection import StoreConnection

_BY_WEIGHT: tuple[Limit, ...] = ("cpu", "publisher")
"""If several of these held up one read, the first is reported."""
_DROPPED_BYTES = 64 << 10
"""Bytes that nobody wants and that are received at a time."""


class StoreDownload(BufferedDownload):
    """One group of one track, or another small thing, from a store."""

    def __init__(self, owner: StoreConnection, request: GroupRequest, priority: int) -> None:
        super().__init__(request, priority)
        self.piece: Piece | None = None
        """What of an object it waits for; None before that is known, and once it is over."""
        self.task: asyncio.Task[None] | None = None
        """Finds out where it is, or gets it as a whole."""
        self._owner = owner
        self._limits: set[Limit] = set()

    def _limited_by(self) -> Limit:
        limit: Limit = next((by for by in _BY_WEIGHT if by in self._limits), "network")
        self._limits.clear()
        return limit

    def prioritise(self, priority: int) -> None:
        """See `Download.prioritise`; it changes when the request goes, not what is under way."""
        self.priority = priority
        if self.piece is not None:
            self._owner.prioritise(self.piece, priority)

    def cancel(self) -> None:
        """See `Download.cancel`."""
        self.fail(RequestError(f"{self.request}: cancelled", reason=Reason.INTERNAL))

    # ---------------------------------------------------------- from the connection

    def push(self, part: memoryview, limit: Limit) -> None:
        """Take bytes that have come, and what limited them."""
        if self.over:
            return
        if len(self._buffer) + len(part) > self.request.limit:
            self._buffer.clear()
            self._read = 0
            self.fail(self.too_long())
            return
        self._buffer.append(part)
        self._came(len(part), limit)

    def room(self, most: int) -> memoryview:
        """Return memory for at most ``most`` bytes that come next; they must not exceed the limit."""
        return self._buffer.room(most)

    def took(self, count: int, limit: Limit) -> None:
        """Note that ``count`` bytes came into what `room` returned, and what limited them."""
        if not self.over:
            self._buffer.took(count)
            self._came(count, limit)

    def _came(self, count: int, limit: Limit) -> None:
        if self.stats.first_byte_s is None:
            self.stats.first_byte_s = time.monotonic()
        self.stats.received += count
        self._limits.add(limit)
        self._wake()

    def too_long(self) -> RequestError:
        """Return the error that it is longer than its limit."""
        longer = f"{self.request}: longer than the {self.request.limit} bytes expected"
        return RequestError(longer, reason=Reason.WRONG)

    def finish(self) -> None:
        """End: all of it has come."""
        if not self.over:
            self.over, self.piece = True, None
            self.stats.done_s = time.monotonic()
            self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error; what has come can still be read."""
        if not self.over:
            self.over, self._error = True, error
            self._owner.drop(self)
            self._wake()


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
        download = self._owner.wanting(piece)
        if download is not None:
            self._room = download.room(piece.end - at)
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
            download = owner.wanting(piece)
            if download is not None:
                download.took(len(own), limit)
                owner.advanced(piece, download)

    def push(self, part: memoryview) -> None:
        """Take what lies elsewhere."""
        while part:
            room = self.room()
            count = min(len(room), len(part))
            room[:count] = part[:count]
            self.took(count)
            part = part[count:]
