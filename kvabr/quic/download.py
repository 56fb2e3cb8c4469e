"""One FETCH of a QUIC connection: its objects become the bytes of a group, in one buffer."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from typing import TYPE_CHECKING

from kvabr.moqt.codes import RequestCode, ResetCode, name_of, reason_of
from kvabr.moqt.messages import RequestErrorMessage as Refusal
from kvabr.moqt.objects import Item, ObjectHeader, RangeEnd
from kvabr.quic.interface import Download, DownloadStats, GroupRequest
from kvabr.store.memory import GROUPS
from kvabr.types.errors import NotFoundError, Reason, RequestError, TransportError
from kvabr.types.events import Limit
from kvabr.types.naming import CATALOG_TRACK, PROPERTY_GROUP_BYTES

if TYPE_CHECKING:
    from kvabr.quic.connection import QuicConnection

_NOT_THERE = (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE)
_SAME = {
    ResetCode.CANCELLED: RequestCode.INTERNAL_ERROR,
    ResetCode.DELIVERY_TIMEOUT: RequestCode.TIMEOUT,
    ResetCode.SESSION_CLOSED: RequestCode.GOING_AWAY,
    ResetCode.GOING_AWAY: RequestCode.GOING_AWAY,
    ResetCode.TOO_FAR_BEHIND: RequestCode.TIMEOUT,
    ResetCode.UNKNOWN_OBJECT_STATUS: RequestCode.INTERNAL_ERROR,
    ResetCode.EXPIRED_AUTH_TOKEN: RequestCode.EXPIRED_AUTH_TOKEN,
}
"""What resets of streams mean in the codes of requests, where the same number means something else."""
_MIN_ROOM = 16 << 10
"""Bytes that a buffer of unknown size begins with."""


class ReceiveBuffer:
    """The bytes of one group, contiguous, each written once as it comes. Views of them stay valid and never change."""

    def __init__(self, limit: int, *, exact: bool = False) -> None:
        """Allocate nothing before the first byte, then all ``limit`` bytes if they are the ``exact`` size.

        Otherwise the memory doubles when it is full, which copies what is in it: for small tracks of unknown size.
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
            self._grow(end)
        self._memory[self._size : end] = part
        self._size = end

    def _grow(self, end: int) -> None:
        room = self.limit if self._exact else min(self.limit, max(end, 2 * len(self._memory), _MIN_ROOM))
        grown = GROUPS.take(room)
        grown[: self._size] = self._memory[: self._size]
        self._memory = grown

    def room(self, most: int) -> memoryview:
        """Return memory behind what has come, for at most ``most`` further bytes; `took` says how many came."""
        end = self._size + 1
        if end > len(self._memory):
            self._grow(end)
        return self._memory[self._size : self._size + most]

    def took(self, count: int) -> None:
        """Note that ``count`` bytes were written to what `room` returned."""
        self._size += count

    def view(self, start: int = 0) -> memoryview:
        """Return the bytes from ``start`` on, read-only."""
        return self._memory[start : self._size].toreadonly()

    def clear(self) -> None:
        """Release the memory; views of it stay valid."""
        self._memory, self._size = memoryview(b""), 0


class BufferedDownload(Download):
    """A download into one buffer; subclasses fill it and call `_wake`."""

    def __init__(self, request: GroupRequest, priority: int) -> None:
        self.stats = DownloadStats(time.monotonic())
        self.request, self.priority = request, priority
        self.over = False
        """Whether nothing more will come."""
        self._buffer = ReceiveBuffer(request.limit, exact=request.exact)
        self._read = 0
        self._error: Exception | None = None
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
            self.stats.limit = self._limited_by()
        return part

    @abstractmethod
    def _limited_by(self) -> Limit:
        """Return what limited what has come since the last read."""

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class QuicDownload(BufferedDownload):
    """One FETCH."""

    def __init__(self, owner: QuicConnection, request: GroupRequest, fields: tuple[bytes, ...], priority: int) -> None:
        """Begin without bytes; `fields` are those of the namespace as the peer is asked for it."""
        super().__init__(request, priority)
        self.fields = fields
        self.request_id: int | None = None
        """Set once it has been asked for."""
        self._owner = owner

    @property
    def held(self) -> bool:
        """Whether the peer may be waiting for the group to be published: its silence says nothing about the path."""
        return self.request.wait_s > 0 and not self.stats.received

    def _limited_by(self) -> Limit:
        return self._owner.watch.limit

    def prioritise(self, priority: int) -> None:
        """See `Download.prioritise`. Draft 16 cannot do it safely, so there it only counts before the request goes."""
        if priority != self.priority and not self.over:
            self._owner.prioritise(self, priority)

    def cancel(self) -> None:
        """See `Download.cancel`."""
        self._give_up(RequestError(f"{self.request}: cancelled", reason=Reason.INTERNAL))

    # ---------------------------------------------------------- from the connection

    def take(self, items: list[Item]) -> int:
        """Take objects that have come, and return their bytes of payload."""
        count = 0
        for item in items:
            if isinstance(item, memoryview):
                self._push(item)
                count += len(item)
            elif isinstance(item, RangeEnd):
                self._wrong("the peer does not have all of it", Reason.INTERNAL)
            elif not 0 <= item.group - self.request.group < self.request.groups:
                self._wrong(f"objects of group {item.group} came", Reason.WRONG)
            elif max(item.size, _declared_bytes(item)) > self.request.limit:
                self._too_long()
        if count:
            self._wake()
        return count

    def finish(self, reset: int | None) -> None:
        """End with the stream, or with the code that reset it."""
        if reset is not None:
            reason = name_of(reset, ResetCode)
            code = next((code for known, code in _SAME.items() if known == reset), reset)
            self.fail(RequestError(f"{self.request}: broken off by the peer ({reason})", reason=reason_of(code)))
        elif not self.stats.received:
            self.fail(NotFoundError(f"{self.request}: nothing there", reason=Reason.MISSING))
        elif not self.over:
            self.over = True
            self.stats.done_s = time.monotonic()
            self._wake()

    def refuse(self, message: Refusal) -> None:
        """Fail because the peer has refused the request."""
        code = message.code
        said = f": {message.reason}" if message.reason else ""
        if code in _NOT_THERE:
            missing = f"{self.request}: not found{said}"
            if self.request.track == CATALOG_TRACK:
                namespace = self.request.namespace
                name = f"{namespace.model}/{namespace.prompt}"
                missing = f"no such asset {name}, or none that your token opens"
            error: RequestError = NotFoundError(missing, reason=reason_of(code))
        else:
            retry_s = (message.retry_interval - 1) / 1000 if message.retry_interval else None
            name = name_of(code, RequestCode)
            error = RequestError(
                f"{self.request}: refused, {name}{said}", reason=reason_of(code), retry_after_s=retry_s
            )
        self.fail(error)

    def fail(self, error: TransportError) -> None:
        """End with an error; what has come can still be read."""
        if not self.over:
            self.over = True
            self._error = error
            self._wake()

    def _push(self, part: memoryview) -> None:
        if self.over:
            return
        self.stats.received += len(part)
        if self.stats.received > self.request.limit:
            self._too_long()
            return
        if self.stats.first_byte_s is None and part:
            self.stats.first_byte_s = time.monotonic()
        self._buffer.append(part)

    def _too_long(self) -> None:
        """Fail; nothing of a group that is too long is of any use."""
        self._buffer.clear()
        self._read = 0
        self._wrong(f"longer than the {self.request.limit} bytes expected", Reason.WRONG)

    def _wrong(self, why: str, reason: Reason) -> None:
        self._give_up(RequestError(f"{self.request}: {why}", reason=reason))

    def _give_up(self, error: TransportError) -> None:
        if not self.over:
            self.fail(error)
            self._owner.drop(self)


def _declared_bytes(header: ObjectHeader) -> int:
    """Return the bytes of the whole group, where its publisher says so; otherwise 0."""
    for kind, value in header.properties:
        if kind == PROPERTY_GROUP_BYTES and isinstance(value, int):
            return value
    return 0
