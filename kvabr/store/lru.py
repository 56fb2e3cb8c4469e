"""The one byte-bounded cache: least recently used entries go first."""

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
    """A mapping whose values take at most ``maxsize`` bytes together; `currsize` is what they take now.

    Reading an entry makes it the most recently used; ``key in lru``, `peek` and iterating over keys do not. (`items`
    and `values` read.) Not safe for several threads: callers that share one hold a lock.
    """

    def __init__(
        self,
        max_bytes: int,
        size_of: Callable[[V], int],
        on_evict: Callable[[K, V], object] | None = None,
        *,
        keep_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty cache.

        Args:
            max_bytes: bound on the sum of all sizes; 0 keeps nothing.
            size_of: bytes of a value; must not change while the value is cached.
            on_evict: called with each entry that made room for another; not with deleted and replaced ones.
            keep_bytes: bound on the entries that are kept (`keep`); None: there is none.
            clock: returns the time, seconds.
        """
        super().__init__(max_bytes, getsizeof=size_of)
        self._on_evict, self._clock = on_evict, clock
        self._order: OrderedDict[K, None] = OrderedDict()
        """Keys of the entries that make room, the least recently used first."""
        self._kept: dict[K, tuple[str, float]] = {}
        """Of the others, which are kept: for whom, and until when."""
        self._kept_of: dict[str, OrderedDict[K, None]] = {}
        """Keys of these by whom they are kept for, in the same order."""
        self._bytes_of: dict[str, int] = {}
        self._keep_bytes = math.inf if keep_bytes is None else keep_bytes
        self._look_s = math.inf
        """When the first of these is kept no longer."""
        self.kept_bytes = 0
        """Bytes of the entries that are kept."""
        self.evicted = 0
        """Entries that made room for others."""
        self.released = 0
        """Entries that were to be kept for longer, and are not because of the bound on these."""

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

    def keep(self, keys: Sequence[K], until_s: float, owner: str = "") -> None:
        """Let others make room first until a time of its clock; those that are not here do not count.

        Those that are kept take at most ``keep_bytes``. Beyond, the owner with the most bytes keeps less: what it has
        used least recently, and of ``keys`` the last ones. What two owners keep counts for the first.
        """
        self._expire()
        for key in reversed(keys):
            if key in self._kept:
                first, earlier_s = self._kept[key]
                self._kept[key] = first, max(until_s, earlier_s)
                self._kept_of[first].move_to_end(key)
            elif key in self:
                del self._order[key]
                self._kept[key] = owner, until_s
                self._kept_of.setdefault(owner, OrderedDict())[key] = None
                self._count(owner, key, 1)
            self._look_s = min(self._look_s, until_s)
        while self.kept_bytes > self._keep_bytes:
            self._release(self._first_kept())
            self.released += 1

    def popitem(self) -> tuple[K, V]:
        """Evict the least recently used entry that is not kept, else one of the owner who keeps most; return it."""
        self._expire()
        if not self:
            raise KeyError("the cache is empty")
        key = next(iter(self._order)) if self._order else self._first_kept()
        value = Cache.__getitem__(self, key)
        del self[key]
        self.evicted += 1
        if self._on_evict is not None:
            self._on_evict(key, value)
        return key, value

    def clear(self) -> None:
        """Forget all entries."""
        super().clear()
        for those in (self._order, self._kept, self._kept_of, self._bytes_of):
            those.clear()
        self.kept_bytes = 0

    def __getitem__(self, key: K) -> V:
        value = super().__getitem__(key)
        self._place(key).move_to_end(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if key in self._kept:
            self._release(key)
        super().__setitem__(key, value)
        self._order[key] = None
        self._order.move_to_end(key)

    def __delitem__(self, key: K) -> None:
        if key in self._kept:
            self._release(key)
        super().__delitem__(key)
        del self._order[key]

    def _place(self, key: K) -> OrderedDict[K, None]:
        return self._kept_of[self._kept[key][0]] if key in self._kept else self._order

    def _expire(self) -> None:
        if self._kept and (now := self._clock()) >= self._look_s:
            for key in [key for key, (_, until_s) in self._kept.items() if until_s <= now]:
                self._release(key)
            self._look_s = min((until_s for _, until_s in self._kept.values()), default=math.inf)

    def _first_kept(self) -> K:
        """Return what is kept no longer if something must not be."""
        return next(iter(self._kept_of[max(self._bytes_of, key=self._bytes_of.__getitem__)]))

    def _release(self, key: K) -> None:
        """Keep an entry no longer than others; as if it had just been used."""
        owner, _ = self._kept.pop(key)
        del self._kept_of[owner][key]
        self._count(owner, key, -1)
        if not self._kept_of[owner]:
            del self._kept_of[owner], self._bytes_of[owner]
        self._order[key] = None

    def _count(self, owner: str, key: K, sign: int) -> None:
        size = sign * int(self.getsizeof(Cache.__getitem__(self, key)))
        self.kept_bytes += size
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
