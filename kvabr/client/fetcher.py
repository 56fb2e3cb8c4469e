"""The fetcher: all plays of a node, over as few connections and downloads as there can be.

    async with Fetcher() as node:
        origin = node.peer("moqt://origin.example/", token=...)
        played = await node.play(origin, tokens, deadline=2.0, recompute=engine)

It lives as long as its engine. `play` is `kvabr.play`, with the same options, errors and result; only that a play may
be refused (`BusyError`) when there are too many. Cancelling a play's task cancels its downloads, unless another play
wants the same groups.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from kvabr.client.admission import Gate
from kvabr.client.edf_scheduler import Order, wire_priority
from kvabr.client.executors import decoders
from kvabr.client.metrics import NodeMetrics
from kvabr.client.peers import Peer, UnreachedConnection
from kvabr.client.play import play, play_asset
from kvabr.client.result import How, Played
from kvabr.client.session_connection import Seat
from kvabr.client.shared_downloads import Flights
from kvabr.client.upgrades import Late
from kvabr.quic.interface import Connection
from kvabr.store.group_folder import FolderGroupStore
from kvabr.store.group_store import MemoryGroupStore, TieredGroupStore
from kvabr.types.errors import BusyError, PlayError, TransportError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

_GIB = 1 << 30
_DIAL_SHARE = 0.5
"""Share of the deadline that a play waits for a connection; then it does what it does when it loses its peer."""

_LEAST_LEFT_S = 1e-3


@dataclass(frozen=True, slots=True)
class Limits:
    """What a fetcher may take."""

    memory_bytes: int = _GIB
    """Of encoded groups kept in memory; 0: none."""
    disk: Path | None = None
    """Folder for encoded groups; None: they are kept in memory only. It belongs to one process at a time."""
    disk_bytes: int = 16 * _GIB
    """Of encoded groups kept there."""
    plays: int = 32
    """Under way at once."""
    waiting: int = 128
    """Plays that may wait for their turn."""
    wait_share: float = 0.25
    """Share of its deadline that a play waits at most."""
    fair: bool = True
    """Whether the plays whose deadlines come first are served first; if not, they share the link as it comes."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "waiting"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.plays < 1:
            raise UsageError(f"plays is {self.plays}; at least one must be let in")
        if not 0 <= self.wait_share <= 1:
            raise UsageError(f"wait_share is {self.wait_share}; it is a share, 0 to 1")


class Fetcher:
    """All plays of a node; an async context manager. Belongs to one event loop."""

    def __init__(self, limits: Limits | None = None, *, metrics: NodeMetrics | None = None) -> None:
        """Take what it may have; must be called while an event loop runs.

        Args:
            limits: what it may take.
            metrics: where to count; `kvabr.telemetry.prometheus.ScrapeServer` shows it to Prometheus.

        Raises:
            UsageError: a limit makes no sense, or the folder belongs to another process.
            AssetError: the folder cannot be used.
        """
        self._limits = limits or Limits()
        self.metrics = metrics or NodeMetrics()
        bounds = self._limits
        memory = MemoryGroupStore(bounds.memory_bytes, executor=decoders())
        disk = None
        if bounds.disk is not None:
            disk = FolderGroupStore(bounds.disk, bounds.disk_bytes, executor=decoders())
        self.store = TieredGroupStore(memory, disk, on_change=lambda: self.metrics.show_store(self.store))
        self.metrics.show_store(self.store)
        self._gate = Gate(bounds.plays, bounds.waiting, bounds.wait_share, self.metrics)
        self._order: Order[Seat] = Order()
        self._peers: dict[tuple[str, str], Peer] = {}
        self._given: dict[Connection, Flights] = {}
        self._plays: set[asyncio.Task[Any]] = set()
        self._later: set[asyncio.Task[None]] = set()
        """Upgrades of caches that are in use."""
        self._closing = False

    def peer(self, url: str, **options: Any) -> Peer:
        """An origin or a relay; the same for the same arguments.

        Args:
            url: as for `kvabr.connect`.
            options: as for `kvabr.connect`: ``token``, ``ca``, ``fingerprint``, ``insecure``, ``quic`` ...

        Raises:
            UsageError: the URL or an option makes no sense.
        """
        key = (url, repr(sorted(options.items())))
        if key not in self._peers:
            self._peers[key] = Peer(url, options, self.store, self.metrics)
        return self._peers[key]

    async def play(
        self,
        origin: Peer | Connection | str,
        tokens: Sequence[int],
        *,
        deadline: float,
        spec: KVSpec | None = None,
        **how: Unpack[How],
    ) -> Played:
        """Get the KV cache of a prompt, see `kvabr.play`.

        Args:
            origin: from `peer`, or its URL alone, or a connection of the caller's, who closes it after the fetcher.
            tokens: ids of the prompt.
            deadline: seconds from this call in which the cache is wanted; waiting for a turn comes out of it.
            spec: of the model's cache; None: the engine's.
            how: as for `kvabr.play`.

        Raises:
            BusyError: there are too many plays; the caller had better compute the prompt.
            UsageError, PlayError, ModelError, PolicyError: as `kvabr.play`.
        """

        def begin(seat: Connection, left_s: float) -> Awaitable[Played]:
            return play(seat, tokens, deadline=left_s, spec=spec, **how)

        return await self._play(origin, deadline, begin)

    async def play_asset(
        self, origin: Peer | Connection | str, namespace: TrackNamespace, *, deadline: float, **options: Any
    ) -> Played:
        """Get the cache that is published under a name, see `kvabr.play_asset`.

        Raises:
            BusyError: as `play`.
            TransportError, FormatError, UsageError, PlayError, ModelError, PolicyError: as `kvabr.play_asset`.
        """

        def begin(seat: Connection, left_s: float) -> Awaitable[Played]:
            return play_asset(seat, namespace, deadline=left_s, **options)

        return await self._play(origin, deadline, begin)

    @asynccontextmanager
    async def seat(self, origin: Peer | Connection | str, *, deadline: float) -> AsyncIterator[Seat]:
        """A connection for a play that the caller drives itself: what `play` plays on.

        It counts as a play until the block is left, which cancels whatever it still fetches. `Seat.begun_with_s` says
        what is left of the deadline. A peer that cannot be reached is told by every download.

        Args:
            origin: as for `play`.
            deadline: seconds from this call in which the cache is wanted.

        Raises:
            BusyError: as `play`.
            UsageError: the deadline makes no sense.
        """
        if not 0 < deadline < math.inf:
            raise UsageError(f"the deadline is {deadline:g} s; it must be a positive number of seconds")
        peer = self.peer(origin) if isinstance(origin, str) else origin
        async with self._gate.enter(deadline) as waited_s:
            seat = await self._take(peer, deadline, waited_s)
            try:
                yield seat
            finally:
                if not seat.kept:
                    await self._give_up(seat)

    async def close(self) -> None:
        """End all plays and connections; those who wait for their turn are refused."""
        self._closing = True
        self._gate.close()
        if tasks := self._plays | self._later:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for flights in self._given.values():
            await flights.close()
        for peer in self._peers.values():
            await peer.close()
        await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -------------------------------------------------------------- internals

    async def _play(
        self,
        origin: Peer | Connection | str,
        deadline_s: float,
        begin: Callable[[Connection, float], Awaitable[Played]],
    ) -> Played:
        result = "failed"
        try:
            async with self.seat(origin, deadline=deadline_s) as seat:
                task = asyncio.create_task(self._run(seat, begin))
                self._plays.add(task)
                task.add_done_callback(self._plays.discard)
                played = await task
                before_s = deadline_s - seat.begun_with_s
                played = replace(played, ttft_s=played.ttft_s + before_s, lookup_s=played.lookup_s + before_s)
                if played.late is not None:
                    self._keep(seat, played.late)
            result = "nothing" if not played.tokens else "met" if played.met else "late"
        except BusyError:
            result = "refused"
            raise
        except asyncio.CancelledError:
            result = "aborted"
            asking = asyncio.current_task()
            if self._closing and asking is not None and not asking.cancelling():
                raise PlayError("the node was closed before the cache was there") from None
            raise
        else:
            return played
        finally:
            self.metrics.plays_total.labels(result).inc()

    @staticmethod
    async def _run(seat: Seat, begin: Callable[[Connection, float], Awaitable[Played]]) -> Played:
        """Play, in a task of its own, so that closing the fetcher ends it and not its caller."""
        return await begin(seat, seat.begun_with_s)

    def _keep(self, seat: Seat, late: Late) -> None:
        """Leave a seat to the upgrades of a cache in use, behind all that plays."""

        async def until_over() -> None:
            try:
                await late.wait()
            finally:
                late.cancel()
                await self._give_up(seat)

        seat.kept = True
        seat.timer.cancel()
        self._reorder(seat, math.inf)
        task = asyncio.create_task(until_over())
        self._later.add(task)
        task.add_done_callback(self._later_over)

    def _later_over(self, task: asyncio.Task[None]) -> None:
        self._later.discard(task)
        if not task.cancelled():
            task.exception()  # it is in the caller's hands, by `Late.wait`

    async def _take(self, origin: Peer | Connection, deadline_s: float, waited_s: float) -> Seat:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        flights = await self._reach(origin, _DIAL_SHARE * (deadline_s - waited_s))
        # A loop that stood still may have used all of it up: the play then gets what is at hand.
        left_s = max(_LEAST_LEFT_S, deadline_s - waited_s - (loop.time() - start_s))
        due_s = loop.time() + left_s
        seat = Seat(flights, self._place, left_s)
        self._moved(self._order.add(seat, due_s))
        seat.timer = loop.call_at(due_s, self._reorder, seat, due_s + deadline_s)
        return seat

    async def _give_up(self, seat: Seat) -> None:
        seat.timer.cancel()
        await seat.close()
        self._moved(self._order.remove(seat))

    async def _reach(self, origin: Peer | Connection, within_s: float) -> Flights:
        """The flights of a peer, or such as fail, if it cannot be reached."""
        if isinstance(origin, Connection):
            if origin not in self._given:
                self._given = {each: flights for each, flights in self._given.items() if not each.closed}
                self._given[origin] = Flights(origin, self.store, self.metrics)
            return self._given[origin]
        try:
            async with asyncio.timeout(within_s):
                return await origin.flights()
        except TimeoutError:
            why = f"{origin.url}: no connection within {within_s:.3g} s"
        except TransportError as error:
            why = str(error)
        return Flights(UnreachedConnection(why), self.store, self.metrics)

    def _place(self, seat: Seat, priority: int) -> int:
        return wire_priority(self._order.level(seat), priority) if self._limits.fair else priority

    def _reorder(self, seat: Seat, due_s: float) -> None:
        """A play is due at another time now: once it is late, others go before it."""
        changed = self._order.remove(seat)
        self._moved([*changed, *self._order.add(seat, due_s), seat])

    @staticmethod
    def _moved(seats: Sequence[Seat]) -> None:
        for seat in seats:
            seat.reprioritise()
