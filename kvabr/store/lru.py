"""The one byte-bounded cache: least recently used entries go first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cachetools import Cache, LRUCache

K = TypeVar("K")
V = TypeVar("V")


class ByteLru(LRUCache[K, V]):
    """A mapping whose values take at most ``maxsize`` bytes together; `currsize` is what they take now.

    Reading an entry makes it the most recently used; ``key in lru``, `peek` and iterating over keys do not. (`items`
    and `values` read.) Not safe for several threads: callers that share one hold a lock.
    """

    def __init__(
        self, max_bytes: int, size_of: Callable[[V], int], on_evict: Callable[[K, V], object] | None = None
    ) -> None:
        """Create an empty cache.

        Args:
            max_bytes: bound on the sum of all sizes; 0 keeps nothing.
            size_of: bytes of a value; must not change while the value is cached.
            on_evict: called with each entry that made room for another; not with deleted and replaced ones.
        """
        super().__init__(max_bytes, getsizeof=size_of)
        self._on_evict = on_evict
        self.evicted = 0
        """Entries that made room for others."""

    def add(self, key: K, value: V) -> bool:
        """Add an entry unless the key is present; evict others until it fits.

        Returns:
            Whether the entry was added. A value larger than the whole cache is not, and evicts nothing.
        """
        if key in self or self.getsizeof(value) > self.maxsize:
            return False
        self[key] = value
        return True

    def replace(self, key: K, value: V) -> None:
        """Add an entry in place of the one that is there, if any."""
        self.pop(key, None)
        self.add(key, value)

    def peek(self, key: K) -> V | None:
        """Return a value without using it; None if the key is absent."""
        try:
            return Cache.__getitem__(self, key)
        except KeyError:
            return None

    def popitem(self) -> tuple[K, V]:
        """Evict the least recently used entry and return it."""
        key, value = super().popitem()
        self.evicted += 1
        if self._on_evict is not None:
            self._on_evict(key, value)
        return key, value
