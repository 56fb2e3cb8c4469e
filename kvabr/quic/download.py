"""One FETCH of a QUIC connection: its objects become the bytes of a group."""

from __future__ import annotations

from abc import abstractmethod

from kvabr.moqt.codes import RequestCode, ResetCode, name_of
from kvabr.moqt.messages import RequestError as Refusal
from kvabr.moqt.objects import Item, RangeEnd
from kvabr.quic.buffered import BufferedDownload, Owner
from kvabr.types.errors import ConnectionLostError, NotFoundError, RequestError

Name = tuple[tuple[bytes, ...], bytes, int]
"""Namespace fields, track and group."""
_NOT_THERE = (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE)


class QuicOwner(Owner):
    """A connection that can change priorities."""

    @abstractmethod
    def prioritise(self, download: QuicDownload, priority: int) -> None:
        """Change the priority of a download."""


class QuicDownload(BufferedDownload):
    """One FETCH."""

    def __init__(self, connection: QuicOwner, name: Name, priority: int, limit: int, *, exact: bool = False) -> None:
        super().__init__(connection, name[1].decode(), name[2], priority, limit, exact=exact)
        self.name = name
        self.request_id: int | None = None
        """Once it has been asked for."""
        self._connection = connection

    def prioritise(self, priority: int) -> None:
        """See `Download.prioritise`; draft 16 cannot do it safely, so there it only counts before the request goes."""
        if priority != self.priority and not self.over:
            self._connection.prioritise(self, priority)

    def take(self, items: list[Item]) -> int:
        """Objects have come; returns how many bytes of payload."""
        parts: list[memoryview] = []
        for item in items:
            if isinstance(item, memoryview):
                parts.append(item)
            elif isinstance(item, RangeEnd):
                self._wrong("the peer does not have all of it", RequestCode.INTERNAL_ERROR)
            elif item.group != self.name[2] or item.status:
                self._wrong(f"objects of group {item.group} came", RequestCode.MALFORMED_TRACK)
            elif item.size > self.limit:
                self.too_long()
        self.push(*parts)
        return sum(map(len, parts))

    def finish(self, reset: int | None) -> None:
        """The stream has ended, or was reset."""
        if reset is not None:
            reason = name_of(reset, ResetCode)
            self.fail(RequestError(f"{self.what}: broken off by the peer ({reason})", code=reset))
        else:
            self.complete()

    def refuse(self, message: Refusal) -> None:
        """The peer has refused it."""
        code = message.code
        said = f": {message.reason}" if message.reason else ""
        if code in _NOT_THERE:
            error: RequestError = NotFoundError(f"{self.what}: not found{said}", code=code)
        else:
            retry_s = (message.retry_interval - 1) / 1000 if message.retry_interval else None
            name = name_of(code, RequestCode)
            error = RequestError(f"{self.what}: refused, {name}{said}", code=code, retry_after_s=retry_s)
        self.fail(error)

    def lose(self, reason: str) -> None:
        """Its connection is gone."""
        self.fail(ConnectionLostError(f"{self.what}: {reason}"))

    def _wrong(self, why: str, code: int) -> None:
        self.give_up(RequestError(f"{self.what}: {why}", code=code))
