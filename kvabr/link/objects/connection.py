"""A connection to a store, or to an HTTP cache in front of one: requests for groups become ranges of objects.

It schedules ranges (`kvabr.link.objects.range_scheduler`), answers lookups (`kvabr.link.objects.index`), times out
silent requests, and finds the limit of a transfer. A failed request needs no redial: the next one uses another
connection of the pool, or opens one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine

from kvabr.link.objects.index import StoreIndex
from kvabr.link.objects.range_scheduler import Piece, RangeScheduler, RangeTransfer
from kvabr.store.names import FramePlace, profile_name
from kvabr.store.store import PART_BYTES, Store
from kvabr.transfer.interface import CLOSED, ConnectionStats, GroupTransfer, LimitWatch, PeerConnection, cancel_all
from kvabr.types.catalog import MAX_PROFILE_BYTES
from kvabr.types.errors import ConnectionLostError, NotFoundError, Reason, RequestError, TransportError
from kvabr.types.events import Limit
from kvabr.types.naming import CATALOG_TRACK, MODELS_TRACK, PROFILE_TRACK, is_live

PROTOCOL = "kvabr.objects/1"
FIRST_BYTE_S, SILENCE_S = 2.0, 2.0
"""Maximum seconds of a GET to its first byte, and between bytes. Players repeat stalled requests much sooner."""
_PART_S, _MAX_PART_BYTES = 0.005, 1 << 20
"""Maximum seconds or bytes between reports of progress: reports take processor time, but estimators need the times of
bytes."""
_LATE_S, _LATE_SHARE = 0.05, 2.0
"""A first byte is late if it takes this many seconds longer than the fastest ones, and this many times as long, while
no other byte arrived: then the store was slow, not the link."""
_FORGET_S = 30.0
"""Seconds after which the fastest first byte is measured anew, since the path may have changed."""


class StoreConnection(PeerConnection):
    """Fetches from one store. Not thread-safe."""

    protocol = PROTOCOL
    heals = True

    def __init__(self, store: Store) -> None:
        """Use a store, without any request yet; an event loop must be running."""
        self.backend, self.peer = store.url.partition("://")[0] if "://" in store.url else "folder", store.url
        self.closed = False
        self.trouble: str | None = None
        self.index = self.finder = StoreIndex(store, self._answered)
        self._store = store
        self._scheduler = RangeScheduler()
        self._finding: dict[GroupTransfer, asyncio.Task[None]] = {}
        self._pieces: dict[GroupTransfer, Piece] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._transfers: dict[RangeTransfer, asyncio.Task[None]] = {}
        self._starting: asyncio.Handle | None = None
        self._bytes, self._received_s = 0, -math.inf
        self._rate = 0.0
        self._soonest = (math.inf, -math.inf)
        """Fastest recent time to first byte in seconds, and when it was measured."""
        # Only detects a busy CPU: HTTP has no PING.
        self._watch = LimitWatch(lambda: None, lambda: None)

    def carry(self, transfer: GroupTransfer) -> None:
        request, track, namespace = transfer.request, transfer.request.track, transfer.request.namespace
        if self.closed:
            transfer.fail(ConnectionLostError(CLOSED))
        elif track == CATALOG_TRACK:
            self._find(transfer, lambda: self._whole(transfer, self.index.catalog(namespace)))
        elif track == MODELS_TRACK:
            self._find(transfer, lambda: self._whole(transfer, self.index.models()))
        elif track == PROFILE_TRACK:
            name, limit = profile_name(namespace.prompt), min(request.limit, MAX_PROFILE_BYTES)
            self._find(transfer, lambda: self._whole(transfer, self.index.whole(name, limit)))
        elif is_live(track) or request.live:
            transfer.fail(NotFoundError(f"{request}: a store has only complete assets", reason=Reason.MISSING))
        elif (place := self.index.place(namespace, track, request.group)) is not None:
            self._want(transfer, place)
        else:
            self._find(transfer, lambda: self._locate(transfer))

    def reprioritise(self, transfer: GroupTransfer) -> None:
        """See `Carrier.reprioritise`; a running GET is unaffected, since HTTP/1.1 has no priorities."""
        if (piece := self._pieces.get(transfer)) is not None:
            piece.priority = transfer.priority

    def drop(self, transfer: GroupTransfer) -> None:
        task = self._finding.pop(transfer, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        piece = self._pieces.pop(transfer, None)
        if piece is not None and (carrying := self._scheduler.cancel(piece)) is not None:
            self._end(carrying)

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`; the round trip is the fastest recent time to first byte."""
        seconds = self._soonest[0]
        return ConnectionStats(rtt_s=seconds if math.isfinite(seconds) else None, bytes_received=self._bytes)

    async def answers(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self.index.models()
        except (TimeoutError, TransportError):
            return False
        return not self.closed

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        tasks = {*self._finding.values(), *self._ending, *self._transfers.values()}
        for transfer in [*self._pieces, *self._finding]:
            transfer.reject(ConnectionLostError(CLOSED))
        if self._starting is not None:
            self._starting.cancel()
        await cancel_all(tasks)
        self._store.close()

    # ---------------------------------------------------------- places of groups

    def _find(self, transfer: GroupTransfer, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run ``work`` before, or instead of, requesting a range for a transfer."""

        async def run() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  # raised for the readers
                self._note(error)
                transfer.fail(error)
            finally:
                self._finding.pop(transfer, None)

        self._finding[transfer] = asyncio.get_running_loop().create_task(run())

    async def _whole(self, transfer: GroupTransfer, answer: Coroutine[None, None, bytes | memoryview]) -> None:
        data = await answer
        transfer.push(memoryview(data), self.received(len(data)))
        transfer.finish()

    async def _locate(self, transfer: GroupTransfer) -> None:
        """Find the location of a group that no lookup has found, and request it."""
        request, namespace = transfer.request, transfer.request.namespace
        if not self.index.has(namespace):
            await self.index.catalog(namespace)
        if (place := self.index.place(namespace, request.track, request.group)) is None:
            raise NotFoundError(f"{request}: not found in {self.peer}", reason=Reason.MISSING)
        self._want(transfer, place)

    def _want(self, transfer: GroupTransfer, place: FramePlace) -> None:
        key, begin, end, _ = place
        if end - begin > transfer.request.limit:
            transfer.too_long()
            return
        self._pieces[transfer] = self._scheduler.want(key, begin, end, transfer.priority, transfer)
        self._start_soon()

    # ---------------------------------------------------------- transfers

    def _start_soon(self) -> None:
        """Start due GETs in the next iteration of the loop: requests until then may share a GET."""
        if self._starting is None and not self.closed:
            self._starting = asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._starting = None
        loop = asyncio.get_running_loop()
        for transfer in self._scheduler.due():
            self._transfers[transfer] = loop.create_task(self._carry(transfer))

    async def _carry(self, transfer: RangeTransfer) -> None:
        error: Exception | None = None
        wait_s, begun_s, late_until_s = FIRST_BYTE_S, time.monotonic(), math.nan
        part_bytes = int(min(_MAX_PART_BYTES, max(PART_BYTES, _PART_S * self._rate)))
        stream = self._store.stream(transfer.key, transfer.begin, transfer.end, part_bytes=part_bytes)
        silence = asyncio.timeout(wait_s)
        try:
            async with silence, contextlib.aclosing(stream) as parts:
                async for part in parts:
                    now = time.monotonic()
                    if math.isnan(late_until_s):
                        wait_s, late_until_s = SILENCE_S, self._first_byte(begun_s, now)
                    if not silence.expired():
                        silence.reschedule(asyncio.get_running_loop().time() + wait_s)
                    self._push(transfer, part, self.received(len(part), late=now < late_until_s))
            self._rate = (transfer.end - transfer.begin) / max(1e-9, time.monotonic() - begun_s)
        except Exception as failure:  # noqa: BLE001  # raised for the readers
            error = failure
            if silence.expired():
                error = ConnectionLostError(f"{transfer.key}: the store sent no data for {wait_s:.3g} s")
        finally:
            if self._transfers.pop(transfer, None) is not None:
                self._settle(transfer, error)

    def _push(self, transfer: RangeTransfer, part: memoryview, limit: Limit) -> None:
        for piece, own in transfer.take(part):
            if (group := piece.group) is not None:
                group.push(own, limit)
                if piece.begin == piece.end:
                    self._pieces.pop(group, None)
                    group.finish()

    def _settle(self, transfer: RangeTransfer, error: Exception | None) -> None:
        left = self._scheduler.ended(transfer)
        if error is None and left:
            error = RequestError(f"{transfer.key}: the store sent fewer bytes than requested")
        if error is not None:
            self._note(error)
            if isinstance(error, NotFoundError):
                self.index.lost(transfer.key)
        for piece in left:
            if piece.group is not None and self._pieces.pop(piece.group, None) is not None:
                piece.group.fail(error or RequestError("no data was received"))
        self._start_soon()

    def _end(self, transfer: RangeTransfer) -> None:
        """Cancel a GET; its other pieces wait again."""
        for piece in self._scheduler.ended(transfer):
            self._scheduler.again(piece)
        task = self._transfers.pop(transfer, None)
        if task is not None:
            task.cancel()
        self._start_soon()

    # ---------------------------------------------------------- measurements of the path

    def received(self, count: int, *, late: bool = False) -> Limit:
        """Count received bytes, and return what limited them; ``late``: the store delayed them."""
        self._bytes += count
        self._received_s = time.monotonic()
        self.trouble = None
        self._watch.received(count)
        return "publisher" if late else self._watch.limit

    def _answered(self, count: int, seconds: float) -> None:
        self.received(count)
        self._sooner(seconds)

    def _first_byte(self, begun_s: float, now: float) -> float:
        """Record a GET's first byte; return the time until which the store counts as the limit."""
        usual = self._soonest[0]
        quiet = now - max(begun_s, self._received_s)
        self._sooner(now - begun_s)
        late = math.isfinite(usual) and quiet > max(usual + _LATE_S, _LATE_SHARE * usual)
        return now + quiet if late else -math.inf

    def _sooner(self, seconds: float) -> None:
        least, at_s = self._soonest
        now = time.monotonic()
        if seconds <= least or now > at_s + _FORGET_S:
            self._soonest = seconds, now

    def _note(self, error: Exception) -> None:
        """Record why the store is unreachable; a refused request does not count."""
        if isinstance(error, TransportError) and not isinstance(error, RequestError):
            self.trouble = str(error)
