"""What an object store must do for kvabr: a few requests for the objects of one tenant.

A store that obstore does not speak is one class that derives from `Objects`, its scheme
(`kvabr.store.objects.url.SCHEMES`), and a line in `kvabr.store.objects.bucket.OPENED_BY`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from kvabr.store.objects.blocking import blocking, blocking_each
from kvabr.store.objects.url import StoreUrl
from kvabr.types.errors import ConnectionLostError

PART_BYTES = 32 << 10
"""Pieces of a stream have at least as many bytes, but for the last one."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object without its bytes."""

    key: str
    """Its name, below the tenant's."""
    size: int
    """Bytes."""
    etag: str
    """Another for every version."""
    modified_s: float
    """When it was written, by the store's clock, seconds since 1970."""


class Objects(ABC):
    """The objects of one tenant behind one URL.

    Its requests may be made in any thread. They are coroutines, each with a twin that blocks, for threads without an
    event loop, whose name ends in ``_sync``. They fail with subclasses of `TransportError`.
    """

    where: StoreUrl

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        return str(self.where)

    @abstractmethod
    async def get(
        self, key: str, start: int = 0, end: int | None = None, *, limit: int, wait_s: float | None = None
    ) -> memoryview:
        """Return bytes ``start`` to ``end`` of an object, or fewer if it ends before.

        Raises `NotFoundError` if there is no such object, `RequestError` if it has more than ``limit`` bytes in that
        range, ends before it, or if not all of it came; and `ConnectionLostError`, without another try, where nothing
        comes for ``wait_s`` seconds (None: for as long as reads wait).
        """

    @abstractmethod
    def stream(
        self, key: str, start: int, end: int, *, part_bytes: int = PART_BYTES
    ) -> AsyncGenerator[memoryview, None]:
        """Yield bytes ``start`` to ``end`` of an object as they come; raises as `get`. Closing it ends the request.

        Nothing is tried again: who plays knows whether that is worth it.
        """

    @abstractmethod
    async def head(self, key: str) -> StoredObject | None:
        """Return what is known of an object; None if there is none."""

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yield all objects whose keys begin with ``prefix``, which ends in a slash, or is empty: all."""

    @abstractmethod
    async def put_new(self, key: str, data: bytes | memoryview) -> bool:
        """Write an object unless there is one of that name; return whether it was written.

        After a connection that broke, False may also mean that this very object was written before it did.
        """

    @abstractmethod
    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, over what is there."""

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, in no particular order; those that do not exist are none to delete."""

    @abstractmethod
    def of_tenant(self, name: str) -> Objects:
        """Return the objects of another tenant."""

    async def tenants(self) -> Sequence[str]:
        """Return the names of the tenants behind the URL's prefix, whatever its own tenant is."""
        return (self.where.tenant,)

    def probe_sync(self) -> None:  # noqa: B027  # stores that are known to need none
        """Raise `StoreError` if the store does not honour conditional writes."""

    def close(self) -> None:  # noqa: B027  # stores without connections
        """Let go of all connections, once nothing is asked for any more; asking again opens others."""

    def below(self, key: str) -> str:
        """Return what to call an object in messages."""
        return f"{self.url.partition('?')[0].rstrip('/')}: {self.where.root.removeprefix(self.where.prefix + '/')}{key}"

    def silent(self, key: str, seconds: float) -> ConnectionLostError:
        """Return the error of a request that has brought nothing for so long."""
        return ConnectionLostError(f"{self.below(key)}: the store has sent nothing for {seconds:.3g} s")

    get_sync = blocking(get)
    head_sync = blocking(head)
    list_sync = blocking_each(list)  # noqa: A003  # the method
    put_new_sync = blocking(put_new)
    put_sync = blocking(put)
    delete_sync = blocking(delete)
    tenants_sync = blocking(tenants)
