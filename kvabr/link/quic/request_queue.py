"""Which requests of a connection are under way, and which wait: the most urgent first, then the earliest.

Nothing here takes longer when more requests wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from kvabr.link.quic.fetch import QuicFetch

MAX_IN_FLIGHT = 64
"""Maximum requests in flight; more wait, the most urgent first. Both libraries allow about 100 streams."""
MAX_HELD = 28
"""Maximum further requests that the peer holds until their groups are published."""


class RequestQueue:
    """The requests of one connection that are not over."""

    def __init__(self) -> None:
        self._asked: dict[int, QuicFetch] = {}
        self._held: set[int] = set()
        """Those that the peer may be holding until their groups are published."""
        self._silent: set[int] = set()
        """Those whose silence says nothing about the path."""
        self._places: dict[QuicFetch, int] = {}
        """Requests that wait, and the numbers of their entries in the heaps that count."""
        self._heaps: dict[bool, list[tuple[int, int, QuicFetch]]] = {False: [], True: []}
        """Heaps of the requests that wait, by whether the peer may hold them."""
        self._entries = 0

    def __iter__(self) -> Iterator[QuicFetch]:
        return iter((*self._asked.values(), *self.waiting))

    @property
    def waiting(self) -> list[QuicFetch]:
        """Requests that wait, in the order in which they came."""
        return list(self._places)

    @property
    def waits(self) -> bool:
        """Whether any request waits."""
        return bool(self._places)

    @property
    def awaited(self) -> int:
        """How many requests under way should bring something soon."""
        return len(self._asked) - len(self._silent)

    def under_way(self, number: int) -> QuicFetch | None:
        """Return a request by the number under which the peer was asked; None if it is over."""
        return self._asked.get(number)

    def wait(self, fetch: QuicFetch) -> None:
        """Let a request wait, or take in its new priority."""
        self._entries += 1
        self._places[fetch] = self._entries
        heappush(self._heaps[fetch.held], (fetch.priority, self._entries, fetch))

    def begin(self, number: int, fetch: QuicFetch) -> None:
        """Note under which number the peer was asked."""
        self._asked[number] = fetch
        if fetch.held:
            self._held.add(number)
        if fetch.held or fetch.request.standing:
            self._silent.add(number)

    def heard(self, number: int, fetch: QuicFetch) -> bool:
        """Note that something came; return whether that shows that the peer has not held the request any more."""
        if number not in self._held or fetch.held:
            return False
        self._held.discard(number)
        if not fetch.request.standing:
            self._silent.discard(number)
        return True

    def end(self, number: int) -> QuicFetch | None:
        """Remove a request under way, and return it; None if it is over."""
        self._held.discard(number)
        self._silent.discard(number)
        return self._asked.pop(number, None)

    def leave(self, fetch: QuicFetch) -> None:
        """Remove a request that waits."""
        self._places.pop(fetch, None)

    def clear_waiting(self) -> None:
        """Remove all requests that wait."""
        self._places.clear()
        for heap in self._heaps.values():
            heap.clear()

    def clear(self) -> None:
        """Remove all requests."""
        self.clear_waiting()
        for requests in (self._asked, self._held, self._silent):
            requests.clear()

    def has_room(self, *, held: bool) -> bool:
        """Return whether a request may be sent now. What the peer holds takes no room from what it sends."""
        asked = len(self._asked)
        if asked < min(MAX_IN_FLIGHT, MAX_HELD):
            return True
        mine, most = (len(self._held), MAX_HELD) if held else (asked - len(self._held), MAX_IN_FLIGHT)
        return mine < most and asked < MAX_IN_FLIGHT + MAX_HELD

    def next(self) -> QuicFetch | None:
        """Take the request that waits and may be sent now; None if there is none."""
        first: tuple[int, int, QuicFetch] | None = None
        for held, heap in self._heaps.items():
            while heap and self._places.get(heap[0][2]) != heap[0][1]:
                heappop(heap)
            if heap and self.has_room(held=held) and (first is None or heap[0] < first):
                first = heap[0]
        if first is None:
            return None
        heappop(self._heaps[first[2].held])
        del self._places[first[2]]
        return first[2]
