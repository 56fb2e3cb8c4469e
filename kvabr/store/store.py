"""The interface of stores, which have immutable objects by name. See `docs/design/store.md`.

A new kind of store is a class with `get`, `put_new`, `list` and `delete`, and a line in `kvabr.store.locations`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvabr.store.blocking import blocked, started
from kvabr.types.errors import NotFoundError, Reason, RequestError

T = TypeVar("T")

PART_BYTES = 32 << 10
"""Minimum bytes of a part of a stream, except the last part."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Name, size and time of an object."""

    name: str
    size: int
    modified_s: float
    """Time of writing by the store's clock, in seconds since 1970."""


class Store(ABC):
    """A store of immutable objects. Names are relative paths with slashes.

    Requests may be made from any thread, and raise subclasses of `TransportError`; `blocked` runs a request in a thread
    without an event loop.
    """

    url: str
    """URL or path, without secrets."""
    folder: Path | None = None
    """Folder of a store on this machine, else None; its files may be opened directly."""
    immediate: bool = False
    """True if `blocked` runs requests in the calling thread."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @abstractmethod
    async def get(
        self, name: str, first: int = 0, last: int | None = None, *, limit: int, wait_s: float | None = None
    ) -> memoryview:
        """Return bytes ``first`` to ``last`` of an object; fewer if the object is shorter.

        Args:
            name: the object.
            first: first byte.
            last: byte after the last requested byte; None: to the end.
            limit: maximum size of the range in bytes.
            wait_s: seconds without data after which the request is repeated, at most twice; None: the store's default.

        Raises:
            NotFoundError: there is no such object.
            RequestError: the range has more than ``limit`` bytes, or the answer has another range.
            ConnectionLostError: the store does not answer.
        """

    @abstractmethod
    async def put_new(self, name: str, data: bytes | memoryview) -> bool:
        """Write an object unless the name exists; return True if it was written.

        If the connection broke during the request, False may also mean that this object was written.
        """

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yield the objects with this prefix, which ends in a slash, or is empty for all objects."""

    @abstractmethod
    async def delete(self, names: Collection[str]) -> None:
        """Delete objects; missing objects are not an error."""

    async def stream(
        self, name: str, first: int, last: int, *, part_bytes: int = PART_BYTES
    ) -> AsyncGenerator[memoryview, None]:
        """Yield bytes ``first`` to ``last`` as they arrive, in parts of at least ``part_bytes``; errors as for `get`.

        Closing the generator ends the request.
        """
        del part_bytes
        yield await self.get(name, first, last, limit=last - first)

    async def check_writable(self) -> None:  # noqa: B027  # not every store needs it
        """Create the store if it does not exist; raise `StoreError` if publishers cannot write to it."""

    def close(self) -> None:  # noqa: B027  # not every store has connections
        """Release connections; call it between requests. A later request opens new ones."""

    def blocked(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of this store from a thread without an event loop."""
        return drive(work) if self.immediate else blocked(work)

    def started(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine of this store, like `blocked`; if the store is `immediate`, the future is already done."""
        if not self.immediate:
            return started(work)
        done: Future[T] = Future()
        try:
            done.set_result(drive(work))
        except Exception as error:  # noqa: BLE001  # raised by `result`
            done.set_exception(error)
        return done

    def where(self, name: str) -> str:
        """Return an object's location for messages."""
        place, mark, options = self.url.partition("?")
        return f"{place.rstrip('/')}/{name}{mark}{options}"

    def missing(self, name: str) -> NotFoundError:
        """Return the error for a missing object."""
        return NotFoundError(f"{self.where(name)}: no such object", reason=Reason.MISSING)

    def check_size(self, name: str, size: int, limit: int) -> None:
        """Raise `RequestError` if a range has more than ``limit`` bytes."""
        if size > limit:
            message = f"{self.where(name)}: {size} bytes, more than the {limit} allowed"
            raise RequestError(message, reason=Reason.WRONG)


async def exists(store: Store, name: str) -> bool:
    """Return True if an object exists and is not empty."""
    try:
        await store.get(name, 0, 1, limit=1)
    except NotFoundError:
        return False
    return True


async def listing(store: Store, prefix: str) -> dict[str, StoredObject]:
    """Return the objects with this prefix, by name."""
    return {found.name: found async for found in store.list(prefix)}


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in this thread, even within an event loop; while `is_driven` is True, it must not wait."""
    outer, _DRIVEN.now = is_driven(), True
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        _DRIVEN.now = outer
        work.close()
    raise RuntimeError("this coroutine must run in an event loop")


_DRIVEN = threading.local()


def is_driven() -> bool:
    """Return True if `drive` runs the current coroutine, so that it must not wait."""
    return getattr(_DRIVEN, "now", False)
