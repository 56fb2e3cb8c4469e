"""Answers of stores and caches over HTTP, as obstore reads them.

An input is a list of parts with `SEPARATOR` between them. The first byte of the first part says how answers are cut.
Each other part is what comes behind one request, from its status line on; after the last one the server has gone.
"""

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from functools import cache
from unittest.mock import patch

from kvabr.store import cloud
from kvabr.store.cloud import CloudStore
from kvabr.store.failures import _KINDS_BY_TYPE, Failure
from kvabr.store.store import exists
from kvabr.types.errors import StoreError, TransportError
from tests.fuzz.target import SEPARATOR, Target, family

_RANGE = (5, 25)
_BODY = bytes(range(100, 120))
_HANGS_S = 60.0


def _told(error: Exception) -> None:
    assert len(str(error)) < 600
    assert str(error).isprintable()


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
    begin, end = _RANGE
    return len(bucket.blocked(bucket.get("a/x", begin, end, limit=end - begin))) <= end - begin


def _there(bucket: CloudStore) -> bool:
    return bucket.blocked(exists(bucket, "a/x"))


def _written(bucket: CloudStore) -> bool:
    return bucket.blocked(bucket.put_new("m/x", b"data"))


def _page(inner: bytes, more: bytes = b"") -> bytes:
    body = b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>fuzz</Name>%b%b</ListBucketResult>'
    body %= more or b"<IsTruncated>false</IsTruncated>", inner
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _valid_listings() -> list[bytes]:
    entry = b"<Contents><Key>a/%b</Key><Size>7</Size><LastModified>2026-01-31T12:00:00.000Z</LastModified>"
    entry += b'<ETag>"x"</ETag></Contents>'
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    return [
        _page(entry % b"0" + entry % b"1"),
        SEPARATOR.join((_page(entry % b"0", more), _page(entry % b"1"))),
    ]


def _valid_head(content_range: bytes, size: int) -> bytes:
    return (
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: %b\r\nContent-Length: %d\r\nETag: x\r\n"
        b"Last-Modified: Sat, 31 Jan 2026 12:00:00 GMT\r\n\r\n" % (content_range, size)
    )


RESPONSES = family(
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
