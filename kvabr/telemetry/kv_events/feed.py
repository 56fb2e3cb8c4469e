"""Puts what one publisher of KV events says in order: what was lost is asked for, else the publisher is forgotten.

Rules:

1. Batches have consecutive numbers. One that is missing is asked for; those behind it wait.
2. A publisher may have told something before it was first heard: that is asked for at once, but need not be had.
3. If the answer does not close a gap, something that is known may have been removed: everything is forgotten.
4. A number that is not higher than the last one is that of a publisher that has begun anew, or that is not in order. It
   is forgotten, and heard as for the first time.

There is no I/O and no clock here. `kvabr.telemetry.kv_events.subscriber` has the sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvabr.telemetry.kv_events.wire import KVBlocksCleared, KVEvent

MOST_WAITING = 4096
"""Batches that wait for a replay."""
MOST_WAITING_BYTES = 64 << 20


class EventFeed:
    """The batches of one publisher."""

    def __init__(
        self, hear: Callable[[str, Sequence[KVEvent]], object], forget: Callable[[str], object], *, replays: bool
    ) -> None:
        """Begin without having heard anything.

        Args:
            hear: takes the topic and the events of each batch, in order.
            forget: hears that nothing is known any more, and why.
            replays: whether there is somebody to ask for what was lost.
        """
        self._hear, self._forget, self._replays = hear, forget, replays
        self._next: int | None = None
        """The number that follows what was heard; None: nothing was."""
        self._last = -1
        """The last number that came as a publication."""
        self._waiting: deque[tuple[int, str, Sequence[KVEvent], int]] = deque()
        self._waiting_bytes = 0
        self.wanted: int | None = 0 if replays else None
        """The number from which on a replay is wanted; None: none is."""

    def receive(self, number: int, topic: str, events: Sequence[KVEvent], nbytes: int = 0) -> None:
        """Take a batch that was published; ``nbytes`` is its size."""
        if number <= self._last:
            self._restart(f"its batch {number} follows its batch {self._last}")
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
        if len(self._waiting) > MOST_WAITING or self._waiting_bytes > MOST_WAITING_BYTES:
            self.replay_ended()

    def replayed(self, number: int, topic: str, events: Sequence[KVEvent]) -> None:
        """Take a batch of the replay that is wanted."""
        if self.wanted is None:
            return
        if self._next is not None and number < self._next and events and isinstance(events[0], KVBlocksCleared):
            self._hear(topic, events)  # a publisher of several models clears each, all with the same number
        self._follow(number, topic, events)

    def replay_ended(self) -> None:
        """Go on with what waits: the replay is complete, or does not come."""
        self.wanted = None
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for number, topic, events, _ in waiting:
            self._follow(number, topic, events)

    def _follow(self, number: int, topic: str, events: Sequence[KVEvent]) -> None:
        """Take a batch that may be known already, or may follow a gap that nobody closes."""
        if self._next is not None and number < self._next:
            return
        if self._next is not None and number > self._next:
            self._lose(number)
        self._apply(number, topic, events)

    def _apply(self, number: int, topic: str, events: Sequence[KVEvent]) -> None:
        self._next = number + 1
        self._hear(topic, events)

    def _lose(self, number: int) -> None:
        self._forget(f"its batches {self._next} to {number - 1} were lost")

    def _restart(self, why: str) -> None:
        if self._next is not None:
            self._forget(why)
        self._next = self.wanted = None
        self._waiting.clear()
        self._waiting_bytes = 0
