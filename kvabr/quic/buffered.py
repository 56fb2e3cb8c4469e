"""A download whose bytes are pushed in as they come, and wait to be read: what the real transports have in common."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod

from kvabr.moqt.codes import RequestCode, ResetCode
from kvabr.quic.bottleneck import LimitWatch
from kvabr.quic.interface import Connection, Download, DownloadStats
from kvabr.types.errors import NotFoundError, RequestError, TransportError
from kvabr.types.events import Limit

_LEAST_ROOM = 16 << 10
"""Bytes that a buffer of unknown size begins with."""


class Owner(Connection):
    """A connection that has such downloads."""

    watch: LimitWatch

    @abstractmethod
    def drop(self, download: BufferedDownload) -> None:
        """A download is wanted no more."""


class ReceiveBuffer:
    """The bytes of one group, contiguous, each written once as it comes. Views of them stay valid and never change."""

    def __init__(self, limit: int, *, exact: bool = False) -> None:
        """Allocate nothing yet: most requests wait behind others, and need no memory before their first byte.

        Args:
            limit: maximum size, bytes.
            exact: the group has ``limit`` bytes: allocate them all at the first byte. Otherwise the memory doubles when
                it is full, which copies what is in it; that is meant for small tracks of unknown size.
        """
        self.limit = limit
        self._exact = exact
        self._memory = memoryview(b"")
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, part: bytes | memoryview) -> None:
        """Copy a part behind those before it; the caller has checked the limit."""
        end = self._size + len(part)
        if end > len(self._memory):
            room = self.limit if self._exact else min(self.limit, max(end, 2 * len(self._memory), _LEAST_ROOM))
            grown = memoryview(bytearray(room))
            grown[: self._size] = self._memory[: self._size]
            self._memory = grown
        self._memory[self._size : end] = part
        self._size = end

    def view(self, start: int = 0) -> memoryview:
        """Return the bytes from ``start`` on, read-only."""
        return self._memory[start : self._size].toreadonly()

    def clear(self) -> None:
        """Release the memory; views of it stay valid."""
        self._memory, self._size = memoryview(b""), 0


class BufferedDownload(Download):
    """One group on its way."""

    def __init__(
        self, connection: Owner, track: str, group: int, priority: int, limit: int, *, exact: bool = False
    ) -> None:
        """Nothing has come.

        Args:
            connection: where it was asked for.
            track: its name, for messages.
            group: which, for messages.
            priority: 0 (most urgent) to 255.
            limit: maximum size, bytes.
            exact: the group has ``limit`` bytes.
        """
        self.stats = DownloadStats(time.monotonic())
        self.priority, self.limit = priority, limit
        self.what = f"{track[:80]}, group {group}"
        self.over = False
        """Nothing more will come."""
        self._owner = connection
        self._buffer = ReceiveBuffer(limit, exact=exact)
        self._read = 0
        self._error: TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def data(self) -> memoryview:
        """See `Download.data`."""
        return self._buffer.view()

    async def read(self) -> memoryview:
        """See `Download.read`."""
        while self._read == len(self._buffer):
            if self._error is not None:
                raise self._error
            if self.over:
                break
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        part = self._buffer.view(self._read)
        if part:
            self._read += len(part)
            self.stats.limit = self._held_up_by()
        return part

    def cancel(self) -> None:
        """See `Download.cancel`."""
        if not self.over:
            self.fail(RequestError(f"{self.what}: cancelled", code=ResetCode.CANCELLED))
            self._owner.drop(self)

    def push(self, *parts: bytes | memoryview) -> bool:
        """Take bytes that have come, and return whether more may."""
        stats, count = self.stats, sum(map(len, parts))
        stats.received += count
        if stats.received > self.limit:
            self.too_long()
            return False
        if count and not self.over:
            if stats.first_byte_s is None:
                stats.first_byte_s = time.monotonic()
            for part in parts:
                self._buffer.append(part)
            self._wake()
        return True

    def too_long(self) -> None:
        """There is more of it than there may be: nothing of it is of any use."""
        self._buffer.clear()
        self._read = 0
        why = f"{self.what}: longer than the {self.limit} bytes expected"
        self.give_up(RequestError(why, code=RequestCode.MALFORMED_TRACK))

    def give_up(self, error: TransportError) -> None:
        """What comes is wrong: have no more of it."""
        if not self.over:
            self.fail(error)
            self._owner.drop(self)

    def complete(self) -> None:
        """All of it has come; a group of no bytes is none."""
        if not self.stats.received:
            self.fail(NotFoundError(f"{self.what}: nothing there", code=RequestCode.DOES_NOT_EXIST))
        elif not self.over:
            self.over = True
            self.stats.done_s = time.monotonic()
            self._wake()

    def fail(self, error: TransportError) -> None:
        """Nothing more will come; what has come can still be read."""
        if not self.over:
            self.over = True
            self._error = error
            self._wake()

    def _held_up_by(self) -> Limit:
        return self._owner.watch.limit

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
