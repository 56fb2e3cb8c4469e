"""Groups that came before, by their SHA-256: in memory, and on disk if there is a folder for them.

A digest says all about a group: which prompt it is of, which codec, which level. Who may know a digest may have the
group: plays learn digests from catalogs, which their origin shows to those who may read them. Every read is checked
against the digest, so that neither a disk nor a bug can bring a play anything else.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from kvabr.client.executors import decoders
from kvabr.client.metrics import NodeMetrics
from kvabr.store.disk_cache import Shelf

T = TypeVar("T")

Tier = Literal["memory", "disk"]

_MOST_UNWRITTEN = 64 << 20
"""Bytes that wait for the disk; what would be more is kept in memory only."""


def is_of(digest: str, data: bytes | bytearray | memoryview) -> bool:
    """Whether data has this SHA-256."""
    return hashlib.sha256(data).hexdigest() == digest


class GroupStore:
    """Bounded, least recently used out first. Belongs to one event loop."""

    def __init__(self, most_bytes: int, metrics: NodeMetrics, shelf: Shelf | None = None) -> None:
        """Begin empty, but for what is on the shelf.

        Args:
            most_bytes: that may be in memory; 0: none.
            metrics: where to count.
            shelf: of the disk; closed with the store.
        """
        self._most, self._metrics, self._shelf = most_bytes, metrics, shelf
        self._groups: OrderedDict[str, memoryview] = OrderedDict()
        self._total = self._unwritten = 0
        self._counted = 0
        """Evictions from the shelf that the metrics know of."""
        # One thread: disks like it, and decoding must not wait for them.
        self._writer = None if shelf is None else ThreadPoolExecutor(1, thread_name_prefix="kvabr-disk")
        self._show()

    @property
    def total_bytes(self) -> int:
        """In memory."""
        return self._total

    def __contains__(self, digest: str) -> bool:
        return digest in self._groups or (self._shelf is not None and digest in self._shelf)

    async def get(self, digest: str) -> tuple[memoryview, Tier] | None:
        """A group, checked, and where it was; None if it is not there, or no longer what it was."""
        loop = asyncio.get_running_loop()
        data = self._groups.get(digest)
        if data is not None:
            self._groups.move_to_end(digest)
            if await loop.run_in_executor(decoders(), is_of, digest, data):
                return data, "memory"
            self._metrics.store_damaged_total.inc("memory")
            if self._groups.get(digest) is data:
                self._total -= len(self._groups.pop(digest))
            self._show()
        shelf = self._shelf
        if shelf is None or digest not in shelf:
            return None
        read = await self._on_disk(lambda: shelf.read(digest))
        if read is None:
            self._show()
            return None
        if not await loop.run_in_executor(decoders(), is_of, digest, read):
            self._metrics.store_damaged_total.inc("disk")
            await self._on_disk(lambda: shelf.drop(digest))
            self._show()
            return None
        data = memoryview(read)
        self._remember(digest, data)
        return data, "disk"

    def put(self, digest: str, data: memoryview) -> None:
        """Keep a group that was checked; the memory behind ``data`` must not change any more."""
        self._remember(digest, data)
        shelf, size = self._shelf, len(data)
        if shelf is None or self._writer is None or digest in shelf or self._unwritten + size > _MOST_UNWRITTEN:
            return
        self._unwritten += size
        written = asyncio.get_running_loop().run_in_executor(self._writer, shelf.write, digest, data)
        written.add_done_callback(lambda _: self._wrote(size))

    async def close(self) -> None:
        """Wait for what is being written, and forget all that is in memory."""
        self._groups.clear()
        self._total = 0
        if self._writer is not None and self._shelf is not None:
            await self._on_disk(self._shelf.close)
            self._writer.shutdown()
        self._show()

    def _remember(self, digest: str, data: memoryview) -> None:
        if digest in self._groups:
            self._groups.move_to_end(digest)
        elif len(data) <= self._most:
            while self._total + len(data) > self._most:
                self._total -= len(self._groups.popitem(last=False)[1])
                self._metrics.store_evicted_total.inc("memory")
            self._groups[digest] = data.toreadonly()
            self._total += len(data)
        self._show()

    def _wrote(self, size: int) -> None:
        self._unwritten -= size
        self._show()

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    def _show(self) -> None:
        metrics, shelf = self._metrics, self._shelf
        metrics.store_bytes.set(self._total, "memory")
        metrics.store_groups.set(len(self._groups), "memory")
        if shelf is not None:
            metrics.store_bytes.set(shelf.total_bytes, "disk")
            metrics.store_groups.set(len(shelf), "disk")
            metrics.store_evicted_total.inc("disk", by=shelf.evicted - self._counted)
            self._counted = shelf.evicted
