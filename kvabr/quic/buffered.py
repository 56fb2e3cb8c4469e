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


class Owner(Connection):
    """A connection that has such downloads."""

    watch: LimitWatch

    @abstractmethod
    def drop(self, download: BufferedDownload) -> None:
        """A download is wanted no more."""


class BufferedDownload(Download):
    """One group on its way."""

    def __init__(self, connection: Owner, track: str, group: int, priority: int, limit: int) -> None:
        """Nothing has come.

        Args:
            connection: where it was asked for.
            track: its name, for messages.
            group: which, for messages.
            priority: 0 (most urgent) to 255.
            limit: bytes that it may have at most.
        """
        self.stats = DownloadStats(time.monotonic())
        self.priority, self.limit = priority, limit
        self.what = f"{track[:80]}, group {group}"
        self.over = False
        """Nothing more will come."""
        self._owner = connection
        self._parts: list[bytes] = []
        self._error: TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """See `Download.read`."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.over:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        parts, self._parts = self._parts, []
        self.stats.limit = self._held_up_by()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def cancel(self) -> None:
        """See `Download.cancel`."""
        if not self.over:
            self.fail(RequestError(f"{self.what}: cancelled", code=ResetCode.CANCELLED))
            self._owner.drop(self)
        self._parts.clear()

    def push(self, *parts: bytes) -> bool:
        """Bytes have come; returns whether more may."""
        stats, count = self.stats, sum(map(len, parts))
        stats.received += count
        if stats.received > self.limit:
            self.too_long()
            return False
        if count:
            if stats.first_byte_s is None:
                stats.first_byte_s = time.monotonic()
            self._parts += parts
            self._wake()
        return True

    def too_long(self) -> None:
        """There is more of it than there may be: nothing of it is of any use."""
        self._parts.clear()
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
