"""The one byte-bounded cache: least recently used entries go first."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

from cachetools import Cache

K = TypeVar("K")
V = TypeVar("V")


class ByteLru(Cache[K, V]):
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
        self._order: OrderedDict[K, None] = OrderedDict()
        """Keys of the entries that make room, the least recently used first."""
        self._until_s: OrderedDict[K, float] = OrderedDict()
        """Of those that are kept, until when, in the same order."""
        self._look_s = math.inf
        """When the first of these is kept no longer."""
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
        for key in keys:
            if key in self:
                self._order.pop(key, None)
                self._until_s[key] = max(until_s, self._until_s.get(key, until_s))
                self._look_s = min(self._look_s, self._until_s[key])

    def popitem(self) -> tuple[K, V]:
        """Evict the least recently used entry that is not kept, or the least recently used one, and return it."""
        if self._until_s and (now := time.monotonic()) >= self._look_s:
            for key in [key for key, until_s in self._until_s.items() if until_s <= now]:
                del self._until_s[key]
                self._order[key] = None  # as if it had just been used
            self._look_s = min(self._until_s.values(), default=math.inf)
        if not self:
            raise KeyError("the cache is empty")
        key = next(iter(self._order or self._until_s))
        value = Cache.__getitem__(self, key)
        del self[key]
        self.evicted += 1
        if self._on_evict is not None:
            self._on_evict(key, value)
        return key, value

    def clear(self) -> None:
        """Forget all entries."""
        super().clear()
        self._order.clear()
        self._until_s.clear()

    def __getitem__(self, key: K) -> V:
        value = super().__getitem__(key)
        self._place(key).move_to_end(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if key not in self._until_s:
            self._order[key] = None
        self._place(key).move_to_end(key)

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        del self._place(key)[key]

    def _place(self, key: K) -> OrderedDict[K, None] | OrderedDict[K, float]:
        return self._until_s if key in self._until_s else self._order
