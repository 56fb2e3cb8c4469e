"""Who may play now: so many at once; the others wait in order of their deadlines, or are told no while that helps.

A play that begins too late is worse than none: what it fetches takes the link from others, and its engine could have
begun to compute instead. So a play waits at most a share of its deadline.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvabr.client.metrics import NodeMetrics
from kvabr.types.errors import BusyError


@dataclass(order=True)
class _Waiting:
    due_s: float
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class Gate:
    """Counts plays on one event loop."""

    def __init__(self, plays: int, waiting: int, wait_share: float, metrics: NodeMetrics) -> None:
        """Open it.

        Args:
            plays: how many may be under way.
            waiting: how many may wait.
            wait_share: share of its deadline that one may wait.
            metrics: where to count.
        """
        self._most, self._most_waiting, self._share = plays, waiting, wait_share
        self._metrics = metrics
        self._playing = self._number = 0
        self._queue: list[_Waiting] = []
        self._closed = False

    @asynccontextmanager
    async def enter(self, deadline_s: float) -> AsyncIterator[float]:
        """Wait for one's turn; gives the seconds that it took.

        Raises:
            BusyError: there is no room, there will be none soon enough, or the node is closing.
        """
        waited_s = await self._wait(deadline_s)
        self._metrics.wait_seconds.observe(waited_s)
        try:
            yield waited_s
        finally:
            self._leave()

    def close(self) -> None:
        """Let nobody in any more; those who wait are told."""
        self._closed = True
        for waiting in self._queue:
            if not waiting.turn.done():
                waiting.turn.set_exception(BusyError("the node is closing; compute this prompt instead"))

    async def _wait(self, deadline_s: float) -> float:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise self._refusal("closed", "the node is closing; compute this prompt instead")
        if self._playing < self._most and not self._queue:
            self._count(1)
            return 0.0
        self._queue = [waiting for waiting in self._queue if not waiting.turn.done()]
        heapq.heapify(self._queue)  # what is left of a heap need not be one
        if len(self._queue) >= self._most_waiting:
            raise self._refusal("full", f"{self._playing} plays are under way and {len(self._queue)} wait")
        start_s = loop.time()
        self._number += 1
        waiting = _Waiting(start_s + deadline_s, self._number, loop.create_future())
        heapq.heappush(self._queue, waiting)
        self._metrics.plays_waiting.inc()
        try:
            async with asyncio.timeout(self._share * deadline_s):
                await waiting.turn
        except TimeoutError:
            if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self._leave()  # its turn came in the very moment
            spent_s = loop.time() - start_s
            raise self._refusal("late", f"no turn came within {spent_s:.3g} of its {deadline_s:g} s") from None
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self._leave()
            raise
        except BusyError:
            self._metrics.refused_total.labels("closed").inc()
            raise
        finally:
            waiting.turn.cancel()
            self._metrics.plays_waiting.dec()
        return loop.time() - start_s

    def _refusal(self, why: str, what: str) -> BusyError:
        self._metrics.refused_total.labels(why).inc()
        return BusyError(f"{what}; a node plays {self._most} at once: compute this prompt instead, or try later")

    def _count(self, by: int) -> None:
        self._playing += by
        self._metrics.plays_in_flight.set(self._playing)

    def _leave(self) -> None:
        self._count(-1)
        while self._queue and self._playing < self._most:
            waiting = heapq.heappop(self._queue)
            if not waiting.turn.done():
                self._count(1)
                waiting.turn.set_result(None)
