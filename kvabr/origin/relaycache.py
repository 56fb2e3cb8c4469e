"""What a relay keeps: groups in the hands of moq-rs, up to a bound; and small tracks that may change, for a moment."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvabr.catalog import Catalog
from kvabr.errors import FormatError
from kvabr.moqt.codes import RequestCode
from kvabr.naming import CATALOG_TRACK, PROFILE_TRACK, TrackNamespace, may_change
from kvabr.origin.metrics import Metrics
from kvabr.origin.upstream import bring
from kvabr.transport import moqlib
from kvabr.transport.base import Connection, NotFoundError, RequestError
from kvabr.transport.catalogwatch import CatalogWatch

_URGENT = 0
_MAX_SMALL = 4096
_LIKELY_BYTES = 4 << 20
"""What a group is taken to have, of a track of which nothing has come yet."""


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
            limit: bytes that are kept, and on their way, together; more only by what groups turn out larger than those
                of their track that came before, and by one group if the limit is smaller than that.
            metrics: its ``buffered_bytes`` is what is kept.
        """
        self.limit, self._metrics = limit, metrics
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._found: dict[tuple[TrackNamespace, str, int], Any] = {}
        self._numbers = itertools.count()
        self._largest: dict[tuple[TrackNamespace, str], int] = {}
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._reserved = 0
        self.bytes = 0
        """What is kept."""

    async def reserve(self, track: Any, priority: int) -> int:
        """Wait until there is room for one more group of a track to be on its way.

        Returns:
            What to `release` when it is no longer.
        """
        size = self._largest.get((track.namespace, track.name), _LIKELY_BYTES)
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
        return size

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
        if len(self._largest) > 10_000:
            self._largest.clear()
        self._largest[key] = max(size, self._largest.get(key, 0))
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


def is_small(track: str) -> bool:
    """Whether a track has one group, which is fetched as a whole before it is passed on."""
    return may_change(track) or track == PROFILE_TRACK


class SmallTracks:
    """Tracks of one group each: catalogs, lookups, profiles. One fetch serves all who ask while it lasts."""

    FRESH_S = 2.0
    """So long an answer is given again without asking the origin."""

    def __init__(self, upstream: Connection, changed: Callable[[TrackNamespace], None]) -> None:
        """Nothing is known.

        Args:
            upstream: the origin.
            changed: told when the catalog of an asset is not the one that it was.
        """
        self._upstream, self._changed = upstream, changed
        self._asked: dict[tuple[TrackNamespace, str], asyncio.Task[bytes]] = {}
        self._watch = CatalogWatch()

    async def get(self, namespace: TrackNamespace, track: str) -> bytes:
        """The only group of a track.

        Raises:
            TransportError: as `kvabr.transport.base.Download.read`.
        """
        key = namespace, track
        task = self._asked.get(key)
        if task is None:
            if len(self._asked) >= _MAX_SMALL:
                raise RequestError(f"{track}: too many lookups at a time", code=RequestCode.EXCESSIVE_LOAD)
            task = self._asked[key] = asyncio.get_running_loop().create_task(self._fetch(namespace, track))
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task)

    async def groups(self, namespace: TrackNamespace, track: str) -> int | None:
        """Make sure that there is such a track, small or not, and tell how many groups it has; None if not sure.

        Raises:
            NotFoundError: there is none.
            TransportError: as `get`.
        """
        if is_small(track):
            await self.get(namespace, track)
            return None
        data = await self.get(namespace, CATALOG_TRACK)
        try:
            catalog = Catalog.loads(data)
            catalog.track(track)
        except FormatError as error:
            why = f"{track}: no such track in the catalog ({error})"
            raise NotFoundError(why, code=RequestCode.DOES_NOT_EXIST) from error
        return catalog.groups

    def close(self) -> None:
        """Give up what is being asked for."""
        for task in list(self._asked.values()):
            task.cancel()
        self._asked.clear()

    def _done(self, key: tuple[TrackNamespace, str], task: asyncio.Task[bytes]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._asked.pop(key, None)
        else:
            asyncio.get_running_loop().call_later(self.FRESH_S, self._asked.pop, key, None)

    async def _fetch(self, namespace: TrackNamespace, track: str) -> bytes:
        parts: list[bytes] = []
        limit = moqlib.MAX_GROUP_BYTES
        await bring(self._upstream, namespace, track, 0, parts.append, priority=_URGENT, limit=limit)
        data = b"".join(parts)
        if may_change(track) and (replaced := self._watch.replaced(data)) is not None:
            self._changed(replaced)
        return data
