"""The one byte-bounded cache: least recently used entries go first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
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
        self._until_s: dict[K, float] = {}
        """Until when entries are kept, by their keys."""
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

    def keep(self, keys: Iterable[K], until_s: float) -> None:
        """Let others make room first until a time, by `time.monotonic`; those that are not here do not count."""
        now = time.monotonic()
        self._until_s = {key: end for key, end in self._until_s.items() if end > now and key in self}
        self._until_s.update((key, max(until_s, self._until_s.get(key, 0.0))) for key in keys if key in self)

    def popitem(self) -> tuple[K, V]:
        """Evict the least recently used entry that is not kept, or the least recently used one, and return it."""
        now = time.monotonic() if self._until_s else 0.0
        for _ in range(len(self._until_s)):
            key, value = super().popitem()
            if self._until_s.get(key, 0.0) <= now:
                break
            self[key] = value  # as if it had just been used
        else:
            key, value = super().popitem()
        self._until_s.pop(key, None)
        self.evicted += 1
        if self._on_evict is not None:
            self._on_evict(key, value)
        return key, value
