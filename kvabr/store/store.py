"""The interface of a store: immutable objects by name. See `docs/design/store.md`.

A new kind of store is one class with `get`, `put_new`, `list` and `delete`, and a line in `kvabr.store.locations`.
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
from kvabr.types.errors import ConnectionLostError, NotFoundError, Reason, RequestError

T = TypeVar("T")

PART_BYTES = 32 << 10
"""Parts of a stream have at least as many bytes, except for the last one."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object without its bytes."""

    name: str
    size: int
    """Bytes."""
    modified_s: float
    """When it was written, by the store's clock, seconds since 1970."""


class Store(ABC):
    """Immutable objects by name. Names are relative paths with slashes.

    Requests may be made from any thread and fail with subclasses of `TransportError`. `blocked` runs one from a thread
    without an event loop.
    """

    url: str
    """Where it is: a URL or a path, without secrets."""
    folder: Path | None = None
    """The folder of a store on this machine, whose files may be opened directly."""

    @abstractmethod
    async def get(
        self, name: str, first: int = 0, last: int | None = None, *, limit: int, wait_s: float | None = None
    ) -> memoryview:
        """Return bytes ``first`` to ``last`` of an object, or fewer if it ends before.

        Args:
            name: the object.
            first: first byte.
            last: byte after the last one; None: to the end.
            limit: bytes that this range may have.
            wait_s: seconds after which a silent store is given up; None: as long as the store's own limit.

        Raises:
            NotFoundError: there is no such object.
            RequestError: the range has more than ``limit`` bytes, or the answer is not what was asked for.
            ConnectionLostError: nothing was received for ``wait_s`` seconds.
        """

    @abstractmethod
    async def put_new(self, name: str, data: bytes | memoryview) -> bool:
        """Write an object if there is none of that name; return whether it was written.

        After a broken connection, False may also mean that this very object had been written.
        """

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yield the objects whose names begin with ``prefix``, which ends in a slash or is empty (all)."""

    @abstractmethod
    async def delete(self, names: Collection[str]) -> None:
        """Delete objects; a name without an object is no error."""

    async def stream(
        self, name: str, first: int, last: int, *, part_bytes: int = PART_BYTES
    ) -> AsyncGenerator[memoryview, None]:
        """Yield bytes ``first`` to ``last`` of an object as they arrive; errors as `get`. Closing it ends the request.

        ``part_bytes``: least bytes of a part.
        """
        del part_bytes
        yield await self.get(name, first, last, limit=last - first)

    async def check_writable(self) -> None:  # noqa: B027  # stores that need nothing
        """Make the store if it does not exist; raise `StoreError` if publishers cannot use it."""

    def close(self) -> None:  # noqa: B027  # stores without connections
        """Release connections; a later request opens new ones. Call it when no request is under way."""

    def blocked(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one of this store's coroutines from a thread without an event loop."""
        return blocked(work)

    def started(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start one of this store's coroutines from a thread without an event loop."""
        return started(work)

    def where(self, name: str) -> str:
        """Return how to refer to an object in a message."""
        place, mark, options = self.url.partition("?")
        return f"{place.rstrip('/')}/{name}{mark}{options}"

    def missing(self, name: str) -> NotFoundError:
        """Return the error for an object that is not there."""
        return NotFoundError(f"{self.where(name)}: there is no such object", reason=Reason.MISSING)

    def check_size(self, name: str, size: int, limit: int) -> None:
        """Raise `RequestError` if a range that was asked for has more than ``limit`` bytes."""
        if size > limit:
            told = f"{self.where(name)}: {size} bytes, more than the {limit} that this may have"
            raise RequestError(told, reason=Reason.WRONG)

    def silent(self, name: str, seconds: float) -> ConnectionLostError:
        """Return the error for a request without an answer."""
        return ConnectionLostError(f"{self.where(name)}: the store has sent nothing for {seconds:.3g} s")


async def exists(store: Store, name: str) -> bool:
    """Return whether an object is there; it must not be empty."""
    try:
        await store.get(name, 0, 1, limit=1)
    except NotFoundError:
        return False
    return True


async def listing(store: Store, prefix: str) -> dict[str, StoredObject]:
    """Return the objects whose names begin with ``prefix``, by name."""
    return {found.name: found async for found in store.list(prefix)}


def driven(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine that never waits, in this thread; its outcome is in the future."""
    done: Future[T] = Future()
    try:
        done.set_result(drive(work))
    except Exception as error:  # noqa: BLE001  # for who asks for the result
        done.set_exception(error)
    return done


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits while `is_driven` is true, in this thread, even if that runs an event loop."""
    outer, _DRIVEN.now = is_driven(), True
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        _DRIVEN.now = outer
        work.close()
    raise RuntimeError("this coroutine waits, so it needs an event loop")


_DRIVEN = threading.local()


def is_driven() -> bool:
    """Return whether this thread must not wait in a coroutine, see `drive`."""
    return getattr(_DRIVEN, "now", False)
