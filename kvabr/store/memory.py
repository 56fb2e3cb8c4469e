"""A store in memory, for tests and for assets that the same process publishes and plays."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Collection

from kvabr.store.store import Store, StoredObject


class MemoryStore(Store):
    """Objects in a dictionary. In a process, all stores with the same URL ``memory://NAME`` are one store."""

    immediate = True
    _shared: dict[str, MemoryStore] = {}  # noqa: RUF012  # by URL, for the process
    _lock = threading.Lock()

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._objects: dict[str, tuple[memoryview, float]] = {}

    @classmethod
    def named(cls, url: str) -> MemoryStore:
        """Return the store with this URL."""
        with cls._lock:
            return cls._shared.setdefault(url, cls(url))

    async def get(
        self, name: str, first: int = 0, last: int | None = None, *, limit: int, wait_s: float | None = None
    ) -> memoryview:
        del wait_s
        found = self._objects.get(name)
        if found is None:
            raise self.missing(name)
        data = found[0][first:last]
        self.check_size(name, len(data), limit)
        return data

    async def put_new(self, name: str, data: bytes | memoryview) -> bool:
        entry = memoryview(bytes(data)), time.time()
        return self._objects.setdefault(name, entry) is entry

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        for name, (data, written_s) in sorted(self._objects.items()):
            if name.startswith(prefix):
                yield StoredObject(name, len(data), written_s)

    async def delete(self, names: Collection[str]) -> None:
        for name in names:
            self._objects.pop(name, None)

    def where(self, name: str) -> str:
        return f"{self.url}/{name}" if self.url != "memory://" else self.url + name
