"""A cache with a size limit in bytes, which evicts least recently used entries first."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from cachetools import Cache

K = TypeVar("K")
V = TypeVar("V")


class ByteLru(Cache[K, V]):
    """A mapping with values of at most ``maxsize`` bytes in total; `currsize` is their current total.

    Reading marks an entry as recently used, except by ``key in lru``, `peek` and iterating over keys. Not thread-safe.
    """

    def __init__(
        self,
        max_bytes: int,
        size_of: Callable[[V], int],
        on_evict: Callable[[K, V], object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a cache for ``max_bytes`` in total; 0 stores no entry.

        A value's size must not change while cached. ``on_evict`` is called for evicted entries, but not for deleted or
        replaced ones.
        """
        super().__init__(max_bytes, getsizeof=size_of)
        self._on_evict, self._clock = on_evict, clock
        self._order: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, float] = OrderedDict()
        """Kept keys, each with the time until which it is kept, in the order of the `keep` calls."""
        self._look_s = math.inf
        self.kept_bytes = 0
        self.evicted = 0

    def add(self, key: K, value: V) -> bool:
        """Add an entry unless the key is present, evicting others; return True if it was added.

        A value larger than the cache is not added, and evicts no entry.
        """
        if key in self or self.getsizeof(value) > self.maxsize:
            return False
        self[key] = value
        return True

    def replace(self, key: K, value: V) -> None:
        """Add or replace an entry."""
        self.pop(key, None)
        self.add(key, value)

    def peek(self, key: K) -> V | None:
        """Return a value without marking it as used; None if it is missing."""
        try:
            return Cache.__getitem__(self, key)
        except KeyError:
            return None

    def keep(self, keys: Sequence[K], until_s: float) -> None:
        """Evict other entries before these until the clock reaches ``until_s``; absent keys are ignored.

        Kept entries take at most half of the cache. Beyond that, the entries kept earliest are released; of one call,
        the last of ``keys`` are released first.
        """
        self._expire()
        for key in reversed(keys):
            if key in self._order:
                del self._order[key]
                self.kept_bytes += self._size(key)
            if key in self:
                self._protected[key] = max(until_s, self._protected.pop(key, until_s))
        self._look_s = min(self._look_s, until_s)
        while self.kept_bytes > self.maxsize // 2:
            self._release(next(iter(self._protected)))

    def popitem(self) -> tuple[K, V]:
        """Evict and return the least recently used entry that is not kept; if all are kept, the entry kept earliest."""
        self._expire()
        if not self:
            raise KeyError("the cache is empty")
        key = next(iter(self._order or self._protected))
        value = Cache.__getitem__(self, key)
        del self[key]
        self.evicted += 1
        if self._on_evict is not None:
            self._on_evict(key, value)
        return key, value

    def clear(self) -> None:
        """Remove all entries."""
        super().clear()
        self._order.clear()
        self._protected.clear()
        self.kept_bytes = 0

    def __getitem__(self, key: K) -> V:
        value = super().__getitem__(key)
        (self._protected if key in self._protected else self._order).move_to_end(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if key in self._protected:
            self._release(key)
        super().__setitem__(key, value)
        self._order[key] = None
        self._order.move_to_end(key)

    def __delitem__(self, key: K) -> None:
        if key in self._protected:
            self._release(key)
        super().__delitem__(key)
        del self._order[key]

    def _expire(self) -> None:
        if self._protected and (now := self._clock()) >= self._look_s:
            for key in [key for key, until_s in self._protected.items() if until_s <= now]:
                self._release(key)
            self._look_s = min(self._protected.values(), default=math.inf)

    def _release(self, key: K) -> None:
        del self._protected[key]
        self.kept_bytes -= self._size(key)
        self._order[key] = None

    def _size(self, key: K) -> int:
        return int(self.getsizeof(Cache.__getitem__(self, key)))
