"""The groups that a relay keeps, in the hands of moq-rs, up to a bound."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvabr.moqt.codes import RequestCode
from kvabr.quic import moq_lib as moqlib
from kvabr.server.metrics import Metrics
from kvabr.types.naming import TrackNamespace


@dataclass(slots=True, eq=False)
class _Kept:
    owner: Any
    group: int
    producer: Any
    size: int
    timer: asyncio.TimerHandle | None = None


class GroupCache:
    """The groups that moq-rs keeps for a relay. The oldest go first; moq-rs does not say which are read most.

    Groups on their way count as well: those that would be too many wait, the most urgent first.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        """Empty.

        Args:
            limit: bytes that are kept, and on their way, together; more only by one group if the limit is smaller than
                that.
            metrics: its ``buffered_bytes`` is what is kept.
        """
        self.limit, self._metrics = limit, metrics
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._found: dict[tuple[TrackNamespace, str, int], Any] = {}
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._reserved = 0
        self.bytes = 0
        """What is kept."""

    async def reserve(self, size: int, priority: int) -> None:
        """Wait until there is room for one more group to be on its way; `release` it when it is no longer.

        Args:
            size: its bytes.
            priority: the lowest goes first.
        """
        if self._waiting or (self._reserved and self._reserved + size > self.limit // 2):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._numbers), size, waiter))
            try:
                await waiter  # whoever lets it through reserves for it
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self.release(size)
                raise
        else:
            self._reserved += size
        self._shrink()

    def release(self, size: int) -> None:
        """A group is no longer on its way."""
        self._reserved -= size
        while self._waiting:
            _, _, wanted, waiter = self._waiting[0]
            if not waiter.cancelled():
                if self._reserved and self._reserved + wanted > self.limit // 2:
                    break
                self._reserved += wanted
                waiter.set_result(None)
            heapq.heappop(self._waiting)

    def find(self, track: Any, group: int) -> Any:
        """What moq-rs has of a group under whatever name it was asked for; None if nothing is kept."""
        return self._found.get((track.namespace, track.name, group))

    def add(self, track: Any, group: int, producer: Any, size: int, keep_s: float | None) -> None:
        """A group is complete: keep it, at most for so many seconds."""
        key = track.namespace, track.name
        number, kept = next(self._numbers), _Kept(track, group, producer, size)
        if keep_s is not None:
            kept.timer = asyncio.get_running_loop().call_later(keep_s, self._drop, number)
        self._kept[number] = kept
        self._found[*key, group] = producer
        self._count(size)
        self._shrink()

    def forget(self, which: Callable[[Any], bool]) -> None:
        """Drop the groups of some tracks."""
        for number, kept in list(self._kept.items()):
            if which(kept.owner):
                self._drop(number)

    def clear(self) -> None:
        """Drop everything."""
        self.forget(lambda _: True)

    def _shrink(self) -> None:
        while self._kept and self.bytes + self._reserved > self.limit:
            self._drop(next(iter(self._kept)))

    def _drop(self, number: int) -> None:
        kept = self._kept.pop(number)
        if kept.timer is not None:
            kept.timer.cancel()
        self._count(-kept.size)
        key = kept.owner.namespace, kept.owner.name, kept.group
        if self._found.get(key) is kept.producer:
            del self._found[key]
        try:
            kept.producer.abort(int(RequestCode.EXCESSIVE_LOAD))
        except moqlib.load().Error:
            return  # its track is gone already

    def _count(self, change: int) -> None:
        self.bytes += change
        self._metrics.buffered_bytes.set(self.bytes)
