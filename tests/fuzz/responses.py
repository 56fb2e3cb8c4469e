"""Answers of stores and caches over HTTP: to the requests that are sent and read here, and to those of obstore.

An input is a list of parts with `SEPARATOR` between them. The first byte of the first part says how answers are cut.
Each other part is what comes behind one request, from its status line on; after the last one the server has gone.
"""

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cache
from unittest.mock import patch

from kvabr.store import cloud
from kvabr.store.cloud import CloudStore
from kvabr.store.direct import _MAX_HEAD_BYTES, DirectReader
from kvabr.store.failures import _KINDS_BY_TYPE, Failure
from kvabr.store.store import exists
from kvabr.types.errors import ConnectionLostError, StoreError, TransportError
from tests.fuzz.target import SEPARATOR, Target, chunks, family

_RANGES = ((5, 25), (0, 20), (5, 25))
"""What is asked for, one after the other."""
_BODY = bytes(range(100, 120))
_HANGS_S = 60.0
_TURNS = 60
"""Turns of the event loop within which an answer is read to its end."""


class _Taken:
    """A sink that lends a few bytes at a time."""

    def __init__(self, step: int, size: int) -> None:
        self.data, self._step, self._left = bytearray(), step, size
        self._room = memoryview(b"")

    def room(self) -> memoryview:
        assert self._left > 0, "room for more than was asked for"
        self._room = memoryview(bytearray(min(self._step, self._left)))
        return self._room

    def took(self, count: int) -> None:
        assert 0 < count <= len(self._room)
        self.data += self._room[:count]
        self._left -= count


class _Reader(DirectReader):
    """A reader whose connections are pairs of sockets; a task at the other end answers."""

    def __init__(self, answers: Sequence[bytes], cut: int) -> None:
        super().__init__(CloudStore("http://store.example/below"))
        self._answers, self._cut = list(answers), cut
        self.peers: list[asyncio.Task[None]] = []
        self.over = 0
        """Requests that have ended."""

    async def _dial(self, _host: str, _port: int) -> socket.socket:
        if not self._answers:
            raise ConnectionLostError("nobody listens")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self.peers.append(asyncio.get_running_loop().create_task(self._answer(theirs)))
        return ours

    async def _answer(self, link: socket.socket) -> None:
        loop, heard = asyncio.get_running_loop(), b""
        with link, contextlib.suppress(ConnectionError):
            while self._answers:
                while b"\r\n\r\n" not in heard:
                    if not (came := await loop.sock_recv(link, 4096)):
                        return
                    heard += came
                _, _, heard = heard.partition(b"\r\n\r\n")
                over = self.over
                for piece in chunks(self._answers.pop(0), self._cut):
                    await loop.sock_sendall(link, piece)
                    await asyncio.sleep(0)
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                if self.over == over:
                    return  # it waits for more; who waits for how long is its caller's business


async def _received(answers: Sequence[bytes], cut: int) -> list[tuple[bytes, type[Exception] | None]]:
    """Return what came of each range, and how its request failed."""
    reader, found = _Reader(answers, cut), list[tuple[bytes, type[Exception] | None]]()
    try:
        for begin, end in _RANGES:
            sink, why = _Taken((7, 1 << 16)[cut & 1], end - begin), None
            try:
                async with asyncio.timeout(_HANGS_S):
                    await reader.receive("s/key", begin, end, sink, part_bytes=1 + cut % 9)
                assert len(sink.data) == end - begin
            except TransportError as error:
                why = type(error)
                _told(error)
            reader.over += 1
            found.append((bytes(sink.data), why))
            assert sum(map(len, reader._idle.values())) <= 1
    finally:
        await reader.close()
        for peer in reader.peers:
            peer.cancel()
        await asyncio.gather(*reader.peers, return_exceptions=True)
    return found


def _told(error: Exception) -> None:
    assert len(str(error)) < 600
    assert str(error).isprintable()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _direct(data: bytes) -> bool:
    how, *answers = data.split(SEPARATOR)
    answers = answers[:6]
    whole = _loop().run_until_complete(_received(answers, 0))
    cut = _loop().run_until_complete(_received(answers, how[0])) if how and how[0] else whole
    for found in (whole[0], cut[0]):
        _check(answers[0] if answers else b"", *found)
    # Bytes behind the answer are noticed if they come with it.
    assert whole[0][1] is not None or cut[0] == whole[0]
    return any(why is None for _, why in whole)


def _check(answer: bytes, came: bytes, why: type[Exception] | None) -> None:
    """Only the range that was asked for is taken, whatever the rest of the head says."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if came or why is None:
        begin, end = _RANGES[0]
        assert body.startswith(came)
        assert len(head) < _MAX_HEAD_BYTES
        assert re.match(rb"HTTP/1\.1 206\b", head)
        assert re.search(rb"\ncontent-length:[ \t]*0*%d[ \t]*(\r\n|$)" % (end - begin), head, re.IGNORECASE)
        assert re.search(
            rb"\ncontent-range:[ \t]*bytes 0*%d-0*%d/" % (begin, end - 1), head, re.IGNORECASE
        )  # fmt: skip
        assert not re.search(rb"\ntransfer-encoding:", head, re.IGNORECASE)


def _failure(data: bytes) -> bool:
    """What obstore tells of a failed request; the first byte is the kind of its error."""
    names = (*_KINDS_BY_TYPE, "GenericError", "OSError")
    error = type(names[data[0] % len(names)] if data else "OSError", (Exception,), {})
    found = Failure.of(error(data[1:].decode("utf-8", "replace")))
    assert re.fullmatch(r"[A-Za-z0-9]{0,64}", found.code)
    _told(found.error("s3://bucket: a/key", "cannot be read"))
    return found.kind != "other"


class _Server:
    """Answers connections on this machine, each with the next of some answers; behind the last it only closes."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        host, port = self._listening.getsockname()
        self.url = f"s3://fuzz?endpoint=http://{host}:{port}&anonymous=true&region=x"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            link, _ = self._listening.accept()
            with link, contextlib.suppress(OSError):
                link.settimeout(_HANGS_S)
                heard = b""
                while b"\r\n\r\n" not in heard and (came := link.recv(65536)):
                    heard += came
                link.sendall(self.answers.pop(0) if self.answers else b"")
                link.shutdown(socket.SHUT_WR)
                while link.recv(65536):
                    pass


@cache
def _server() -> tuple[_Server, CloudStore]:
    server = _Server()
    return server, CloudStore(server.url)


def _asked(ask: Callable[[CloudStore], bool]) -> Callable[[bytes], bool]:
    """Return the target of what a bucket makes of answers; a part for each connection."""

    def take(data: bytes) -> bool:
        server, bucket = _server()
        server.answers = data.split(SEPARATOR)[:4]
        with patch.object(cloud, "_BACKOFF_S", 0.0):
            try:
                return ask(bucket)
            except (TransportError, StoreError) as error:
                _told(error)
                return False

    return take


def _listed(bucket: CloudStore) -> bool:
    async def some() -> int:
        count = 0
        async for found in bucket.list("a/"):
            assert found.size >= 0
            assert isinstance(found.name, str)
            assert found.modified_s == found.modified_s  # not NaN
            count += 1
            if count > 100:
                break
        return count

    return bucket.blocked(some()) > 0


def _read(bucket: CloudStore) -> bool:
    begin, end = _RANGES[0]
    return len(bucket.blocked(bucket.get("a/x", begin, end, limit=end - begin))) <= end - begin


def _there(bucket: CloudStore) -> bool:
    return bucket.blocked(exists(bucket, "a/x"))


def _written(bucket: CloudStore) -> bool:
    return bucket.blocked(bucket.put_new("m/x", b"data"))


def _valid_answers() -> list[bytes]:
    length = b"Content-Length: 20\r\n"
    first = b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 5-24/300\r\n" + length + b"\r\n" + _BODY
    second = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-19/*\r\nConnection: keep-alive\r\n" + length + b"\r\n" + _BODY
    whole = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: identity\r\n" + length + b"\r\n" + _BODY
    busy = b"HTTP/1.1 503 Slow Down\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
    coded = first.replace(b"content-range", b"Transfer-Encoding: chunked\r\ncontent-range")
    return [
        SEPARATOR.join(parts)
        for parts in ((b"\0", first, second, first), (b"\x03", first, whole, busy), (b"\x30", coded, second))
    ]


def _page(inner: bytes, more: bytes = b"") -> bytes:
    body = b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>fuzz</Name>%b%b</ListBucketResult>'
    body %= more or b"<IsTruncated>false</IsTruncated>", inner
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _valid_listings() -> list[bytes]:
    entry = b"<Contents><Key>a/%b</Key><Size>7</Size><LastModified>2026-01-31T12:00:00.000Z</LastModified>"
    entry += b'<ETag>"x"</ETag></Contents>'
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    odd = (entry % b"1").replace(b"2026", b"+22026")
    return [
        _page(entry % b"0" + entry % b"1"),
        SEPARATOR.join((_page(entry % b"0", more), _page(entry % b"1"))),
        SEPARATOR.join((_page(entry % b"0" + odd + entry % b"2"),) * 2),  # it is asked for again
    ]


def _valid_head(content_range: bytes, size: int) -> bytes:
    return (
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: %b\r\nContent-Length: %d\r\nETag: x\r\n"
        b"Last-Modified: Sat, 31 Jan 2026 12:00:00 GMT\r\n\r\n" % (content_range, size)
    )


RESPONSES = family(
    Target(_direct, _valid_answers),
    Target(
        _failure,
        lambda: [b"\x06Server returned non-2xx status code: 503 Slow: <Code>SlowDown</Code>", b"\x00gone"],
    ),
)
LISTINGS = family(
    Target(_asked(_listed), _valid_listings),
    Target(_asked(_read), lambda: [_valid_head(b"bytes 5-24/300", 20) + _BODY]),
    Target(_asked(_there), lambda: [_valid_head(b"bytes 0-0/300", 1) + _BODY[:1]]),
    Target(_asked(_written), lambda: [b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n']),
)
