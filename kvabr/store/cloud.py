"""A store in a bucket, or a read-only store through an HTTP cache, implemented with obstore.

Requests raise subclasses of `TransportError` (`kvabr.store.failures`) after at most two retries. Reads wait up to 30
seconds for the first byte and between two pieces.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from kvabr.store.failures import UNREADABLE, Failure, strange
from kvabr.store.names import PROBES
from kvabr.store.obstore_clients import load_obstore, make_client
from kvabr.store.store import PART_BYTES, Store, StoredObject
from kvabr.store.url import WEB, StoreUrl
from kvabr.types.backoff import scattered
from kvabr.types.errors import (
    NotFoundError,
    Reason,
    RequestError,
    StoreError,
    TransportError,
    UsageError,
)

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ClientConfig

    from kvabr.store.obstore_clients import ObstoreClient

T = TypeVar("T")

_AT_ONCE = 1000
WAIT_S = 30
"""Seconds that a read waits for the first byte, and for each further piece."""
_CONNECT_S = 5
_WRITE_BYTES_PER_S = 1 << 20
"""A write may take the time of its bytes at this rate, plus `WAIT_S`."""
_TRIES, _BACKOFF_S = 3, 0.1
_RENEW_S = 1.0
"""Minimum seconds between two reads of the credentials."""
IMMUTABLE = "public, max-age=31536000, immutable"
_CACHE_CONTROL = {"a": "public, max-age=5", "i": "public, max-age=5", "probe": "no-store"}
"""`Cache-Control` header by the first part of an object's name; `IMMUTABLE` for other names."""
_PROBED: set[str] = set()
_LOCK = threading.Lock()


class CloudStore(Store):
    """A bucket or a prefix in a bucket; with plain HTTP, it is read-only."""

    def __init__(self, url: str) -> None:
        """Parse a URL, see `kvabr.store.url`; raise `UsageError` if it is malformed or obstore is not installed."""
        self.parsed = StoreUrl.parse(url)
        load_obstore()
        self.url, self.prefix = str(self.parsed), self.parsed.root
        self._stores: dict[int, ObstoreClient] = {}
        """Clients by time limit of a request in seconds; 0 for reads."""
        self._sound = False
        """True once the store has reported a missing object correctly."""
        self.made, self._made_s = 0, -math.inf
        """Number of times that clients were created again after refused credentials, and the time of the last."""
        self._lock = threading.Lock()

    def renew(self, made: int, failure: Failure) -> bool:
        """Read the credentials again if they were refused; return True if the request should be retried.

        ``made`` is the value of `made` when the request began.
        """
        if not failure.refused:
            return False
        with self._lock:
            if made == self.made:
                if time.monotonic() < self._made_s + _RENEW_S:
                    return False
                self.made, self._made_s = made + 1, time.monotonic()
                self._stores.clear()
            return True

    def close(self) -> None:
        with self._lock:
            self._stores.clear()

    # ------------------------------------------------------- reading

    async def get(
        self, name: str, first: int = 0, last: int | None = None, *, limit: int, wait_s: float | None = None
    ) -> memoryview:
        async def once() -> memoryview:
            path, options = self._path(name), _range(first, last)
            clock = asyncio.get_running_loop().time
            async with asyncio.timeout(wait_s) as timer:
                result = await _call("get", self._store(), path, options=options)
                self._check(name, result, first, last, limit)
                timer.reschedule(wait_s and clock() + wait_s)
                if wait_s is None or result.range[1] - result.range[0] <= PART_BYTES:
                    return self._whole(name, result, memoryview(await result.bytes_async()))
                parts = []
                async for part in result.stream(min_chunk_size=PART_BYTES):
                    parts.append(part)
                    timer.reschedule(wait_s and clock() + wait_s)
                return self._whole(name, result, memoryview(b"".join(parts)))

        return await self._tried(name, "cannot be read", once)

    async def stream(
        self, name: str, first: int, last: int, *, part_bytes: int = PART_BYTES
    ) -> AsyncGenerator[memoryview, None]:
        path, options = self._path(name), _range(first, last)
        result = await self._tried(
            name, "cannot be read", lambda: _call("get", self._store(), path, options=options), tries=1
        )
        self._check(name, result, first, last, last - first)
        due = result.range[1] - result.range[0]
        try:
            async for part in result.stream(min_chunk_size=part_bytes):
                due -= len(part)
                if due < 0:
                    break
                yield memoryview(part)
        except Exception as error:  # noqa: BLE001  # raised again
            self._raise(name, "cannot be read", error)
        if due:
            raise RequestError(f"{self.where(name)}: {abs(due)} bytes {'are missing' if due > 0 else 'too many'}")

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        after: str | None = None
        pages = None

        async def more() -> Sequence[ObjectMeta]:
            nonlocal pages
            try:
                if pages is None:  # begin, or continue after the last key
                    pages = aiter(
                        load_obstore().list(self._store(), self._path(prefix), offset=after, chunk_size=_AT_ONCE)
                    )
                return await anext(pages, None) or ()
            except Exception:
                pages = None
                raise

        while page := await self._tried(prefix, "cannot be listed", more):
            after = page[-1]["path"]
            for meta in page:
                name = meta["path"].removeprefix("/").removeprefix(self.prefix)
                yield StoredObject(name, meta["size"], meta["last_modified"].timestamp())
        if after is None:
            await self._check_answers()

    # ------------------------------------------------------- writing

    async def put_new(self, name: str, data: bytes | memoryview) -> bool:
        return await self._tried(name, "cannot be written", lambda: self._put(name, data))

    async def delete(self, names: Collection[str]) -> None:
        every = list(names)
        for first in range(0, len(every), _AT_ONCE):
            paths = [self._path(name) for name in every[first : first + _AT_ONCE]]
            with suppress(NotFoundError):  # an object that does not exist
                await self._tried(
                    every[first],
                    "cannot be deleted",
                    lambda: _call("delete", self._writer(0), paths),  # noqa: B023
                )

    async def check_writable(self) -> None:
        """Test create-if-absent, once per process and URL: if several publishers write an object, one must win."""
        if self.url in _PROBED:
            return
        if self.parsed.scheme in WEB:
            raise UsageError(f"{self.url}: an HTTP cache is read-only; give the URL of its bucket")
        await self._check_answers()
        name = f"{PROBES}{secrets.token_hex(8)}"
        await self.put_new(name, b"first")  # returns False if the first try was written but its answer lost
        if await self.put_new(name, b"second") or bytes(await self.get(name, limit=64)) != b"first":
            raise StoreError(
                f"{self.url}: the store does not honour conditional writes (If-None-Match: *), so publishers would "
                "overwrite each other; upgrade the store, or use another"
            )
        with suppress(TransportError):  # a few bytes remain, which a lifecycle rule removes
            await self.delete([name])
        with _LOCK:
            _PROBED.add(self.url)

    # ------------------------------------------------------- one try

    async def _put(self, key: str, data: bytes | memoryview) -> bool:
        control = _CACHE_CONTROL.get(key.partition("/")[0], IMMUTABLE)
        attributes = {"Cache-Control": control, "Content-Type": "application/octet-stream"}
        how: dict[str, Any] = {"mode": "create", "use_multipart": False, "attributes": attributes}
        try:
            await _call("put", self._writer(len(data)), self._path(key), data, **how)
        except Exception as error:
            if Failure.of(error).kind == "conflict":
                return False
            raise
        return True

    # ------------------------------------------------------- checks and failures

    async def _check_answers(self) -> None:
        """Raise `StoreError` if the server returns content for an object that cannot exist.

        A log-in page or another web server does so, and obstore parses such a page as an empty listing.
        """
        if self._sound:
            return
        try:
            why = strange(await self.get(f"{PROBES}{secrets.token_hex(8)}", limit=PART_BYTES))
        except RequestError as error:
            if error.reason != Reason.WRONG:
                self._sound = isinstance(error, NotFoundError)
                return
            why = None
        except TransportError:
            return
        reason = f": {why}" if why else ""
        raise StoreError(
            f"{self.url}: this is not an object store: the server returned an object that does not exist{reason}; "
            "correct the URL or the endpoint"
        )

    def _check(self, key: str, result: GetResult, start: int, end: int | None, limit: int) -> None:
        first, last = result.range
        try:
            size = result.meta["size"]
        except UNREADABLE:
            size = last  # an invalid date does not matter here
        wanted = size if end is None else min(end, size)
        if (first, last) != (min(start, size), max(wanted, min(start, size))):
            message = f"{self.where(key)}: the answer has bytes {first} to {last}, not {start} to {wanted}"
            raise RequestError(message, reason=Reason.WRONG)
        self.check_size(key, last - first, limit)

    def _whole(self, key: str, result: GetResult, data: memoryview) -> memoryview:
        first, last = result.range
        if len(data) != last - first:
            message = f"{self.where(key)}: truncated, {len(data)} of {last - first} bytes were received"
            raise RequestError(message, reason=Reason.WRONG)
        return data.toreadonly()

    async def _tried(self, key: str, what: str, once: Callable[[], Awaitable[T]], *, tries: int = _TRIES) -> T:
        made, renewed = self.made, False
        while True:
            try:
                return await once()
            except Exception as error:  # noqa: BLE001  # raised again unless it may pass
                failure = Failure.of(error)
                if failure.exhausted:
                    self.close()  # its idle connections may use up the descriptors
                if not renewed and self.renew(made, failure):
                    renewed = True
                    continue
                tries -= 1
                if not tries or not failure.passes:
                    self._raise(key, what, error)
            await asyncio.sleep(scattered(_BACKOFF_S * 2.0 ** (_TRIES - tries)))

    def _raise(self, key: str, what: str, error: Exception) -> NoReturn:
        try:
            if isinstance(error, UNREADABLE):
                message = f"{self.where(key)}: {what}: the store sent an impossible date or number"
                raise RequestError(message) from error
            if isinstance(error, OSError) or type(error).__module__.startswith("obstore"):
                raise Failure.of(error).error(self.where(key), what) from error
            raise error  # an error of kvabr, or a bug
        finally:
            del error  # breaks a cycle with this frame, which would keep a store's connections alive

    def _path(self, key: str) -> str:
        return self.prefix + key

    # ------------------------------------------------------- obstore's stores

    def _writer(self, size: int) -> ObstoreClient:
        if self.parsed.scheme in WEB:
            raise UsageError(f"{self.url}: an HTTP cache is read-only; give the URL of its bucket")
        wanted_s = WAIT_S
        while wanted_s < WAIT_S + size / _WRITE_BYTES_PER_S:
            wanted_s *= 2
        return self._store(wanted_s)

    def _store(self, most_s: int = 0) -> ObstoreClient:
        # A whole read may take long, but not the time between two pieces. obstore's limit for that would also end
        # uploads, so uploads have a limit for the whole request.
        with self._lock:
            if most_s not in self._stores:
                limits: ClientConfig = {"connect_timeout": f"{_CONNECT_S}s"}
                if most_s:
                    limits["timeout"] = f"{most_s}s"
                else:
                    limits["read_timeout"], limits["timeout"] = f"{WAIT_S}s", "1d"
                self._stores[most_s] = make_client(self.parsed, limits)
            return self._stores[most_s]


def _call(what: str, *args: Any, **options: Any) -> Awaitable[Any]:
    """Call a function of obstore. Not a coroutine, as errors would keep its frame, which refers to connections."""
    answer: Awaitable[Any] = getattr(load_obstore(), f"{what}_async")(*args, **options)
    return answer


def _range(start: int, end: int | None) -> GetOptions | None:
    if end is not None:
        return {"range": (start, end)}
    return {"range": {"offset": start}} if start else None
