"""Ranges of objects over plain HTTP, received into their final memory.

obstore copies received bytes, which takes two to three times the processor time. Stores and caches in the same network,
without TLS and a proxy, are therefore read here over a few persistent connections; obstore signs the requests. Answers
with another range than requested are refused; the reader checks the content.
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlsplit

from kvabr.store.cloud import CloudStore
from kvabr.store.failures import Failure
from kvabr.store.store import PART_BYTES, Store
from kvabr.types.errors import ConnectionLostError, Reason, RequestError, TransportError, UnauthorizedError

_MAX_HEAD_BYTES = 16 << 10
_MAX_IDLE = 8
"""Most connections that stay open without a request."""
_SPARE = 1
"""Idle connections that are left for urgent requests."""
_CONNECT_S = 5.0
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
"""RFC 9110, section 5: names are tokens, and values have no control characters but tabs."""
_RANGE = re.compile(rb"bytes (\d{1,20})-(\d{1,20})/(?:\d{1,20}|\*)")
_NUMBER = re.compile(rb"\d{1,20}")


class Sink(Protocol):
    """Receives the bytes of a range."""

    def room(self) -> memoryview:
        """Return writable memory, not empty, for the next bytes."""

    def took(self, count: int) -> None:
        """Note that ``count`` bytes were written to the memory that `room` returned last."""


class DirectReader:
    """Reads one bucket, for one event loop."""

    def __init__(self, bucket: CloudStore) -> None:
        """Prepare a reader without any connection; see `of`."""
        self._bucket = bucket
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}
        """Idle connections by host and port: unused ones first, the most recently used last. The server knows the speed
        of that one, and sends more of an answer at once."""
        self.dialled = 0

    @classmethod
    def of(cls, bucket: Store) -> DirectReader | None:
        """Return a reader of a bucket; None if it needs TLS or a proxy."""
        return cls(bucket) if isinstance(bucket, CloudStore) and bucket.is_direct else None

    async def receive(
        self, key: str, begin: int, end: int, sink: Sink, *, part_bytes: int = PART_BYTES, urgent: bool = True
    ) -> None:
        """Receive bytes ``begin`` to ``end`` of an object; cancelling this ends the request.

        Args:
            key: the object.
            begin: first byte.
            end: byte after the last one.
            sink: receives the bytes in order.
            part_bytes: bytes after which the sink is called, unless they arrive faster.
            urgent: use the most recently used connection. Other requests use the oldest one, and leave one idle, so
                that urgent requests neither wait for a connection nor have a slow start.

        Raises:
            NotFoundError: there is no such object.
            UnauthorizedError: the store refuses us.
            ConnectionLostError: the store cannot be reached, or the connection broke.
            RequestError: the answer has another range, or the store is busy.
        """
        made = self._bucket.made
        try:
            await self._receive(key, begin, end, sink, part_bytes, urgent=urgent)
        except UnauthorizedError:  # before any byte
            if not self._bucket.renew(made, Failure.of_status(403)):
                raise
            await self._receive(key, begin, end, sink, part_bytes, urgent=urgent)

    async def _receive(self, key: str, begin: int, end: int, sink: Sink, part_bytes: int, *, urgent: bool) -> None:
        url = urlsplit(await self._bucket.address(key))
        host, port = url.hostname or "", url.port or 80
        target = f"{url.path}?{url.query}" if url.query else url.path
        request = (
            f"GET {target} HTTP/1.1\r\nHost: {url.netloc}\r\nRange: bytes={begin}-{end - 1}\r\n"
            "Accept-Encoding: identity\r\nUser-Agent: kvabr\r\n\r\n"
        ).encode("ascii")
        idle = self._idle.setdefault((host, port), [])
        while True:
            link = _open_one(idle, urgent=urgent)
            used = link is not None
            link = link or await self._dial(host, port)
            try:
                exchange = _Exchange(link, self._bucket.where(key), begin, end)
                stays = await exchange.run(request, sink, part_bytes)
            except _StaleError as error:
                link.close()
                if not used:
                    raise ConnectionLostError(f"{exchange.where}: the store closed the connection") from error
                continue  # the store had closed the idle connection
            except OSError as error:
                link.close()
                raise ConnectionLostError(f"{exchange.where}: the connection broke ({error.strerror})") from error
            except BaseException:
                link.close()
                raise
            if stays and len(idle) < _MAX_IDLE:
                idle.append(link)
            else:
                link.close()
            return

    async def warm(self, count: int) -> None:
        """Open connections until ``count`` are idle, to save round trips later; never raises."""
        with suppress(TransportError, ValueError):
            url = urlsplit(await self._bucket.address(""))
            host, port = url.hostname or "", url.port or 80
            idle = self._idle.setdefault((host, port), [])
            wanted = range(min(count, _MAX_IDLE) - len(idle))
            made = await asyncio.gather(*(self._dial(host, port) for _ in wanted), return_exceptions=True)
            idle[:0] = [link for link in made if isinstance(link, socket.socket)]

    async def close(self) -> None:
        """Close idle connections; cancel all `receive` calls first."""
        self.relieve()

    def relieve(self) -> None:
        """Close idle connections."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    async def _dial(self, host: str, port: int) -> socket.socket:
        loop, last = asyncio.get_running_loop(), OSError("no address")
        self.dialled += 1
        try:
            async with asyncio.timeout(_CONNECT_S):
                for family, kind, proto, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    link = socket.socket(family, kind, proto)
                    try:
                        link.setblocking(False)
                        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        await loop.sock_connect(link, address)
                    except OSError as error:
                        link.close()
                        last = error
                    except BaseException:
                        link.close()
                        raise
                    else:
                        return link
        except (OSError, TimeoutError) as error:
            last = error if isinstance(error, OSError) and error.strerror else last
        raise ConnectionLostError(f"{self._bucket.url}: cannot be reached ({last.strerror or last})")


def _open_one(idle: list[socket.socket], *, urgent: bool) -> socket.socket | None:
    """Take an idle connection; close those that the server has closed or written to."""
    while len(idle) > (0 if urgent else _SPARE):
        link = idle.pop(-1 if urgent else 0)
        try:
            link.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return link
        except OSError:
            pass
        link.close()
    return None


class _StaleError(Exception):
    """A connection ended before any byte of the answer."""


class _Exchange:
    """One request and its answer."""

    def __init__(self, link: socket.socket, where: str, begin: int, end: int) -> None:
        self.where = where
        self._link, self._begin, self._end = link, begin, end
        self._loop = asyncio.get_running_loop()

    async def run(self, request: bytes, sink: Sink, part_bytes: int) -> bool:
        """Receive the range; return whether the connection can be used again."""
        try:
            await self._loop.sock_sendall(self._link, request)
        except ConnectionError as error:
            raise _StaleError from error
        head, rest = await self._head()
        stays = self._check(head)
        left = self._end - self._begin
        if len(rest) > left:
            raise self._wrong("it has more bytes than announced")
        while rest:
            room = sink.room()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            sink.took(count)
            rest, left = rest[count:], left - count
        waits_for = 1
        while left:
            # One wake-up per packet would take most of the processor time.
            if (wanted := min(part_bytes, left)) != waits_for:
                waits_for = wanted
                self._wait_for(waits_for)
            count = await self._loop.sock_recv_into(self._link, sink.room()[:left])
            if not count:
                raise ConnectionLostError(f"{self.where}: the store ended the connection, {left} bytes are missing")
            sink.took(count)
            left -= count
        self._wait_for(1)
        return stays

    async def _head(self) -> tuple[bytes, memoryview]:
        """Return the head of the answer, and the bytes received after it."""
        buffer, size = bytearray(_MAX_HEAD_BYTES), 0
        while size < len(buffer):
            try:
                count = await self._loop.sock_recv_into(self._link, memoryview(buffer)[size:])
            except ConnectionError as error:
                raise _StaleError from error
            if not count:
                if not size:
                    raise _StaleError
                raise ConnectionLostError(f"{self.where}: the store ended the connection within the head of its answer")
            end = buffer.find(b"\r\n\r\n", max(0, size - 3), size := size + count)
            if end >= 0:
                return bytes(buffer[:end]), memoryview(buffer)[end + 4 : size]
        raise self._wrong(f"its head has more than {_MAX_HEAD_BYTES} bytes")

    def _check(self, head: bytes) -> bool:
        """Check that the answer has the requested range; return whether the connection stays open."""
        first, *lines = head.split(b"\r\n")
        status = _STATUS.fullmatch(first)
        if status is None:
            raise self._wrong("it is not HTTP/1.1")
        fields: dict[bytes, bytes] = {}
        for line in lines:
            field = _FIELD.fullmatch(line)
            if field is None or (name := field[1].lower()) in fields.keys() & _ONCE:
                raise self._wrong("its head cannot be read")
            fields[name] = field[2].strip(b" \t")
        code, size = int(status[1]), self._end - self._begin
        length = fields.get(b"content-length", b"")
        if code not in (200, 206):
            raise Failure.of_status(code).error(self.where, "cannot be read")
        if b"transfer-encoding" in fields or fields.get(b"content-encoding", b"identity").lower() != b"identity":
            raise self._wrong("it is encoded")
        count = int(length) if _NUMBER.fullmatch(length) else None
        if count != size:
            ignored = "; it ignores ranges" if code == 200 else ""
            raise self._wrong(f"it has {'no length' if count is None else count} instead of {size} bytes{ignored}")
        if code == 206:
            served = _RANGE.fullmatch(fields.get(b"content-range", b""))
            if served is None or (int(served[1]), int(served[2])) != (self._begin, self._end - 1):
                raise self._wrong(f"it has another range than bytes {self._begin} to {self._end}")
        elif self._begin:
            raise self._wrong("it ignores ranges")
        return fields.get(b"connection", b"keep-alive").lower() == b"keep-alive"

    def _wait_for(self, size: int) -> None:
        with suppress(OSError):  # not every system supports it
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _wrong(self, why: str) -> RequestError:
        return RequestError(f"{self.where}: the store's answer is wrong: {why}", reason=Reason.WRONG)


_ONCE = frozenset((b"content-length", b"content-range", b"content-encoding", b"transfer-encoding", b"connection"))
"""Fields that an answer may have only once."""
