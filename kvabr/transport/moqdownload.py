"""One download by moq-rs: what has come of a group and was not read yet."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

from kvabr.errors import TransportError
from kvabr.moqt.codes import RequestCode, ResetCode
from kvabr.naming import TrackNamespace
from kvabr.transport.base import Download, DownloadStats, RequestError
from kvabr.transport.watch import LimitWatch


class Owner(ABC):
    """What a download needs of its connection."""

    watch: LimitWatch

    @abstractmethod
    def prioritise(self, download: MoqDownload, priority: int) -> None:
        """Change the place of a download that waits."""

    @abstractmethod
    def drop(self, download: MoqDownload) -> None:
        """A download is wanted no more."""


class MoqDownload(Download):
    """One group on its way."""

    def __init__(
        self, connection: Owner, namespace: TrackNamespace, track: str, group: int, priority: int, limit: int
    ) -> None:
        self.stats = DownloadStats(time.monotonic())
        self.namespace, self.track, self.group = namespace, track, group
        self.priority, self.limit = priority, limit
        self.what = f"{track[:80]}, group {group}"
        self.task: asyncio.Task[None] | None = None
        """Once it has been asked for."""
        self.over = False
        """Nothing more will come."""
        self._connection = connection
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
        self.stats.limit = self._connection.watch.limit
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def prioritise(self, priority: int) -> None:
        """See `Download.prioritise`; it only counts before the request goes out."""
        if self.task is None and not self.over:
            self._connection.prioritise(self, priority)

    def cancel(self) -> None:
        """See `Download.cancel`."""
        if not self.over:
            self.fail(RequestError(f"{self.what}: cancelled", code=ResetCode.CANCELLED))
            self._connection.drop(self)
        self._parts.clear()

    def take(self, payload: bytes) -> bool:
        """An object has come; returns whether more may."""
        stats = self.stats
        stats.received += len(payload)
        if stats.received > self.limit:
            self._parts.clear()
            why = f"{self.what}: longer than the {self.limit} bytes expected"
            self.fail(RequestError(why, code=RequestCode.MALFORMED_TRACK))
            return False
        if payload:
            if stats.first_byte_s is None:
                stats.first_byte_s = time.monotonic()
            self._parts.append(payload)
            self._wake()
        return True

    def finish(self) -> None:
        """All of it has come."""
        if not self.over:
            self.over = True
            self.stats.done_s = time.monotonic()
            self._wake()

    def fail(self, error: TransportError) -> None:
        """Nothing more will come; what has come can still be read."""
        if not self.over:
            self.over = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
