"""Numbers batches, and keeps the last batches for subscribers that missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class SentBatch(NamedTuple):
    """A batch as it was sent."""

    number: int
    topic: bytes
    payload: bytes


class ReplayBuffer:
    """Numbers batches, and keeps the last batches within limits."""

    def __init__(self, first: int, *, max_bytes: int = 16 << 20, max_batches: int = 4096) -> None:
        """Start at ``first``, which must exceed all earlier numbers, even before a restart: readers drop lower ones."""
        self._next, self._max_bytes, self.max_batches = first, max_bytes, max_batches
        self._kept: deque[SentBatch] = deque()
        self._bytes = 0

    @property
    def first(self) -> int:
        """Number of the oldest buffered batch; if there is none, of the next batch."""
        return self._kept[0].number if self._kept else self._next

    def add(self, topic: bytes, payload: bytes) -> SentBatch:
        """Number a batch and keep it."""
        batch = SentBatch(self._next, topic, payload)
        self._next += 1
        self._kept.append(batch)
        self._bytes += len(payload)
        while self._bytes > self._max_bytes or len(self._kept) > self.max_batches:
            self._bytes -= len(self._kept.popleft().payload)
        return batch

    def since(self, number: int) -> Sequence[SentBatch]:
        """Return the buffered batches from ``number`` on."""
        return [batch for batch in self._kept if batch.number >= number]
