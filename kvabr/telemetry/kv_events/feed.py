"""Orders the events of one publisher, requests lost batches, and if necessary drops its blocks. No I/O, no clock.

1. Batches are numbered consecutively. A missing batch is requested; later batches wait for it.
2. Batches published before the first received batch are requested, but may be unavailable.
3. If a gap cannot be filled, removals may have been lost, so all blocks are dropped.
4. A number that does not increase means that the publisher restarted or is faulty; it is treated as a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvabr.telemetry.kv_events.wire import KVBlocksCleared, KVEvent

MAX_WAITING = 4096
MAX_WAITING_BYTES = 64 << 20


class EventFeed:
    """The batches of one publisher."""

    def __init__(
        self, on_events: Callable[[str, Sequence[KVEvent]], object], forget: Callable[[str], object], *, replays: bool
    ) -> None:
        """Create a feed.

        ``on_events`` receives the topic and events of each batch, in order; ``forget`` with the reason why all blocks
        are invalid. ``replays`` is True if lost batches can be requested.
        """
        self._on_events, self._forget, self._replays = on_events, forget, replays
        self._next: int | None = None
        self._last = -1
        """Number of the last batch received live."""
        self._waiting: deque[tuple[int, str, Sequence[KVEvent], int]] = deque()
        self._waiting_bytes = 0
        self.wanted: int | None = 0 if replays else None
        """First number to request in a replay; None if no replay is needed."""

    def receive(self, number: int, topic: str, events: Sequence[KVEvent], nbytes: int = 0) -> None:
        """Process a published batch of ``nbytes`` bytes."""
        if number <= self._last:
            self._restart(f"batch {number} was received after batch {self._last}")
        self._last = number
        missing = self._next != number and not (self._next is None and number == 0)
        if self.wanted is None and not (missing and self._replays):
            if missing and self._next is not None:
                self._lose(number)
            self._apply(number, topic, events)
            return
        if self.wanted is None:
            self.wanted = self._next or 0
        self._waiting.append((number, topic, events, nbytes))
        self._waiting_bytes += nbytes
        if len(self._waiting) > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            self.replay_ended()

    def replayed(self, number: int, topic: str, events: Sequence[KVEvent]) -> None:
        """Process a batch of a replay."""
        if self.wanted is None:
            return
        if self._next is not None and number < self._next and events and isinstance(events[0], KVBlocksCleared):
            self._on_events(topic, events)  # publishers of several models send one such event per model
        self._follow(number, topic, events)

    def replay_ended(self) -> None:
        """Apply the waiting batches, after the replay has ended or failed."""
        self.wanted = None
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for number, topic, events, _ in waiting:
            self._follow(number, topic, events)

    def _follow(self, number: int, topic: str, events: Sequence[KVEvent]) -> None:
        if self._next is not None and number < self._next:
            return
        if self._next is not None and number > self._next:
            self._lose(number)
        self._apply(number, topic, events)

    def _apply(self, number: int, topic: str, events: Sequence[KVEvent]) -> None:
        self._next = number + 1
        self._on_events(topic, events)

    def _lose(self, number: int) -> None:
        self._forget(f"batches {self._next} to {number - 1} were lost")

    def _restart(self, why: str) -> None:
        if self._next is not None:
            self._forget(why)
        self._next = self.wanted = None
        self._waiting.clear()
        self._waiting_bytes = 0
