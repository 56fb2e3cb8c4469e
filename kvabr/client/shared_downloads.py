"""Downloads under way on one connection, each shared by all plays that want the same: one transfer, many readers.

A flight goes as fast as the most urgent of its readers wants, and ends when the last of them has left. A group whose
digest is known is checked when it is complete, and kept.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Protocol

from kvabr.client.executors import decoders
from kvabr.client.metrics import NodeMetrics
from kvabr.quic.interface import Connection, Download
from kvabr.store.group_store import TieredGroupStore
from kvabr.types.errors import ConnectionLostError
from kvabr.types.events import Limit
from kvabr.types.naming import TrackNamespace

_LEAST_URGENT = 255
_TURN_S = 0.25
"""Seconds without a byte of anything more urgent, after which a flight that stands still is no longer waiting."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a flight brings; equal for all who may share it."""

    namespace: TrackNamespace
    track: str
    group: int
    limit: int
    """Bytes that it may have; of a group whose digest is known, those that it has."""
    digest: str | None = None
    """Of the group, if a catalog gave it."""
    exact: bool = False
    """Whether ``limit`` is its size."""


class Reader(Protocol):
    """Who reads a flight."""

    @property
    def wire_priority(self) -> int:
        """How urgent it is, among the requests of all plays."""

    def wake(self) -> None:
        """Something has come, or nothing more will."""


class Flight:
    """One download, and what has come of it."""

    def __init__(self, wanted: Wanted, inner: Download, priority: int) -> None:
        self.wanted, self.inner, self.priority = wanted, inner, priority
        self._hashing = threading.Lock()
        self._hashed: bool | None = None
        self.limit: Limit = "network"
        """Who held up what came last."""
        self.heard_s = 0.0
        self.complete = False
        self.error: Exception | None = None
        self.readers: list[Reader] = []
        self.task: asyncio.Task[None] | None = None
        self.checked: asyncio.Future[memoryview | None] | None = None
        """Once all of a group whose digest is known is here: the group, or None if it is another."""

    @property
    def data(self) -> memoryview:
        """Everything that has come; see `Download.data`."""
        return self.inner.data

    def has_digest(self, digest: str) -> bool:
        """Return whether the complete group has its digest, which is computed once. Call it in a thread."""
        with self._hashing:
            if self._hashed is None:
                self._hashed = self.inner.has_digest(digest)
            return self._hashed


@dataclass
class Flights:
    """The flights of one connection; for one event loop."""

    connection: Connection
    store: TieredGroupStore
    metrics: NodeMetrics
    _flights: dict[Wanted, Flight] = field(default_factory=dict)
    _heard_s: dict[int, float] = field(default_factory=dict)
    """By priority, when something of it came last."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def find(self, wanted: Wanted) -> Flight | None:
        """The flight that brings this, if there is one."""
        return self._flights.get(wanted)

    def join(self, wanted: Wanted, reader: Reader) -> tuple[Flight, bool]:
        """Read a flight from its beginning; tells whether it was under way already."""
        flight = self._flights.get(wanted)
        joined = flight is not None
        if flight is None:
            inner = self.connection.fetch(
                wanted.namespace,
                wanted.track,
                wanted.group,
                priority=reader.wire_priority,
                limit=wanted.limit,
                exact=wanted.exact,
            )
            flight = self._flights[wanted] = Flight(wanted, inner, reader.wire_priority)
            task = flight.task = asyncio.get_running_loop().create_task(self._bring(flight))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        flight.readers.append(reader)
        self.reprioritise(flight)
        return flight, joined

    def leave(self, flight: Flight, reader: Reader) -> None:
        """A reader wants no more; nobody left ends the flight."""
        if reader not in flight.readers:
            return
        flight.readers.remove(reader)
        if flight.readers:
            self.reprioritise(flight)
        elif self._flights.get(flight.wanted) is flight and not flight.complete:
            if self.waits_its_turn(flight):
                # A player asks again for what stands still. What only waits for its turn loses nothing by that: whoever
                # asked may join again, in this very moment.
                asyncio.get_running_loop().call_soon(self._end_unread, flight)
            else:
                self._end(flight)

    def reprioritise(self, flight: Flight) -> None:
        """Let a flight be as urgent as its most urgent reader."""
        priority = min((reader.wire_priority for reader in flight.readers), default=_LEAST_URGENT)
        if priority != flight.priority and not flight.complete:
            flight.priority = priority
            flight.inner.prioritise(priority)
            self.metrics.priority_changes_total.inc()

    async def close(self) -> None:
        """End all flights; who still reads one is told."""
        for flight in list(self._flights.values()):
            if not flight.complete:
                flight.error = ConnectionLostError("the node was closed")
                self._tell(flight)
            self._end(flight)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -------------------------------------------------------------- internals

    async def _bring(self, flight: Flight) -> None:
        loop, inner, wanted = asyncio.get_running_loop(), flight.inner, flight.wanted
        try:
            while part := await inner.read():
                flight.limit = inner.stats.limit
                flight.heard_s = self._heard_s[flight.priority] = loop.time()
                self.metrics.downloaded_bytes_total.inc(len(part))
                if wanted.digest is not None and len(flight.data) >= wanted.limit:
                    break  # its end need not be waited for
                self._tell(flight)
        except asyncio.CancelledError:
            self.metrics.downloads_total.labels("cancelled").inc()
            raise
        except Exception as error:  # noqa: BLE001  # a transport's, whatever it is: it is the readers'
            flight.error = error
            self._forget(flight)
            self._tell(flight)
            self.metrics.downloads_total.labels("failed").inc()
            return
        finally:
            inner.cancel()
        flight.complete = True
        if wanted.digest is None:
            self._forget(flight)
            self._tell(flight)
            self.metrics.downloads_total.labels("done").inc()
            return
        flight.checked = loop.create_future()
        self._tell(flight)
        await self._check(flight, wanted.digest, flight.checked)

    async def _check(self, flight: Flight, digest: str, checked: asyncio.Future[memoryview | None]) -> None:
        data = flight.data
        good = False
        try:
            good = await asyncio.get_running_loop().run_in_executor(decoders(), flight.has_digest, digest)
            if good:
                await self.store.put(digest, data)
        finally:
            self._forget(flight)
            checked.set_result(data if good else None)
        self.metrics.downloads_total.labels("done" if good else "damaged").inc()

    @staticmethod
    def _tell(flight: Flight) -> None:
        for reader in flight.readers:
            reader.wake()

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.wanted) is flight:
            del self._flights[flight.wanted]

    def _end_unread(self, flight: Flight) -> None:
        if not flight.readers and not flight.complete and flight.error is None:
            self._end(flight)

    def _end(self, flight: Flight) -> None:
        self._forget(flight)
        flight.inner.cancel()
        if flight.task is not None:
            flight.task.cancel()

    def waits_its_turn(self, flight: Flight) -> bool:
        """Whether nothing comes of a flight because something more urgent does come."""
        since_s = max(flight.heard_s, asyncio.get_running_loop().time() - _TURN_S)
        return any(priority < flight.priority and at_s > since_s for priority, at_s in self._heard_s.items())
