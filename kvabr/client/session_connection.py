"""What a play sees of the node: a `Connection` of its own, over what all plays share.

A request is answered from the store if the group is there, joins another play's download of the same group, or goes to
the peer, at a priority that puts the plays in order of their deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from kvabr.client.shared_downloads import Flight, Flights, Wanted
from kvabr.quic.interface import Connection, ConnectionStats, Download, DownloadStats
from kvabr.types.errors import RequestError
from kvabr.types.events import Limit
from kvabr.types.naming import TrackNamespace

_BY_WEIGHT: tuple[Limit, ...] = ("kept", "cpu", "publisher")
"""If several held up what is read at once, the first of these is said."""


class SeatDownload(Download):
    """One group for one play, wherever it comes from."""

    def __init__(self, seat: Seat, flights: Flights, wanted: Wanted, priority: int) -> None:
        self.stats = DownloadStats(requested_s=asyncio.get_running_loop().time())
        self._seat, self._flights, self._wanted, self._priority = seat, flights, wanted, priority
        self._flight: Flight | None = None
        self._kept: memoryview | None = None
        """All of it, from the store or from a flight that was complete already."""
        self._before = 0
        """Bytes of the flight that had come before this joined: they say nothing about the link."""
        self._read = 0
        self._held: set[Limit] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._cancelled, self._over = seat.left, False
        if self._cancelled:
            return
        under_way = flights.find(wanted)
        if wanted.digest is not None and (wanted.digest in flights.store or (under_way and under_way.complete)):
            return  # it is at hand: `read` looks
        self._join()

    @property
    def wire_priority(self) -> int:
        """Among the requests of all plays; a play waits for what is asked for by name alone, like a catalog."""
        return self._priority if self._wanted.digest is None else self._seat.place(self._priority)

    @property
    def data(self) -> memoryview:
        """See `Download.data`."""
        if self._kept is not None:
            return self._kept
        return memoryview(b"") if self._flight is None else self._flight.data

    def has_digest(self, digest: str) -> bool:
        """See `Download.has_digest`; what comes from the store was checked when it came."""
        return self._kept is not None or (self._flight is not None and self._flight.has_digest(digest))

    async def read(self) -> memoryview:
        """See `Download.read`."""
        while not self._over:
            if self._cancelled:
                raise RequestError("cancelled by this side")
            if self._kept is not None:
                self._held.add("kept")
                part = self._take(self._kept)
                self._end()
                return part
            flight = self._flight
            if flight is None:
                await self._look()
            elif len(flight.data) > self._read:
                if self._read < self._before:
                    self._held.add("kept")
                return self._take(flight.data)
            elif flight.error is not None:
                raise flight.error
            elif flight.complete:
                break
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
        self._end()
        return memoryview(b"")

    def prioritise(self, priority: int) -> None:
        """See `Download.prioritise`."""
        self._priority = priority
        self.reprioritise()

    @property
    def waits_its_turn(self) -> bool:
        """Whether nothing comes because something more urgent does."""
        return self._flight is not None and self._flights.waits_its_turn(self._flight)

    def reprioritise(self) -> None:
        """The play's level has changed."""
        if self._flight is not None:
            self._flights.reprioritise(self._flight)

    def cancel(self) -> None:
        """See `Download.cancel`."""
        self._cancelled = True
        self._end()
        self.wake()

    def wake(self) -> None:
        """Something has come, or nothing more will."""
        if self._flight is not None:
            self.stats.received = len(self._flight.data)
            if self._flight.limit != "network":
                self._held.add(self._flight.limit)
            if self.stats.first_byte_s is None and self._flight.data:
                self.stats.first_byte_s = asyncio.get_running_loop().time()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -------------------------------------------------------------- internals

    def _join(self) -> None:
        self._flight, joined = self._flights.join(self._wanted, self)
        self._before = len(self._flight.data)
        self.wake()
        self._count("joined" if joined else "network")

    async def _look(self) -> None:
        """Get the group from where it was said to be, or from the peer after all."""
        under_way = self._flights.find(self._wanted)
        if under_way is not None and under_way.checked is not None:
            found = await asyncio.shield(under_way.checked)
            if found is not None:
                self._at_hand(found, "joined")
                return
        digest = self._wanted.digest
        kept = None if digest is None else await self._flights.store.find(digest)
        if self._cancelled:
            return
        if kept is not None and len(kept[0]) == self._wanted.limit:
            self._at_hand(*kept)
        else:
            self._join()

    def _at_hand(self, data: memoryview, source: str) -> None:
        self._kept = data
        self.stats.first_byte_s = asyncio.get_running_loop().time()
        self.stats.received = len(data)
        self._count(source)

    def _count(self, source: str) -> None:
        if self._wanted.digest is not None:
            self._flights.metrics.groups_total.labels(source).inc()
            self._flights.metrics.bytes_total.labels(source).inc(self._wanted.limit)

    def _take(self, data: memoryview) -> memoryview:
        part = data[self._read :]
        self._read += len(part)
        self.stats.limit = next((by for by in _BY_WEIGHT if by in self._held), "network")
        self._held.clear()
        return part

    def _end(self) -> None:
        if not self._over:
            self.stats.done_s = asyncio.get_running_loop().time()
        self._over = True
        self._seat.forget(self)
        if self._flight is not None:
            self._flights.leave(self._flight, self)


class Seat(Connection):
    """A play's connection."""

    def __init__(self, flights: Flights, place: Callable[[Seat, int], int], begun_with_s: float) -> None:
        """Take a seat.

        Args:
            flights: of the peer.
            place: the priority among the requests of all plays, by a seat and the priority among its own.
            begun_with_s: seconds that were left to the play's deadline when it got its seat.
        """
        self._flights, self._place = flights, place
        self.begun_with_s = begun_with_s
        self.timer: asyncio.TimerHandle
        """Goes off at the deadline."""
        self.kept = False
        """Upgrades go on upon it when the play has returned."""
        self._digests: dict[tuple[TrackNamespace, str], Sequence[str]] = {}
        self._downloads: set[SeatDownload] = set()
        self.left = False
        """The play is over."""

    @property
    def backend(self) -> str:  # type: ignore[override]
        """Of the shared connection."""
        return self._flights.connection.backend

    @property
    def protocol(self) -> str:  # type: ignore[override]
        """Of the shared connection."""
        return self._flights.connection.protocol

    @property
    def peer(self) -> str | None:
        """Of the shared connection: what is known of the link is known to all plays."""
        return self._flights.connection.peer

    def fetch(
        self,
        namespace: TrackNamespace,
        track: str,
        group: int = 0,
        *,
        priority: int = 128,
        limit: int,
        exact: bool = False,
    ) -> Download:
        """Ask for one group of one track; see `Connection.fetch`."""
        digests = self._digests.get((namespace, track), ())
        digest = digests[group] if 0 <= group < len(digests) else None
        download = SeatDownload(self, self._flights, Wanted(namespace, track, group, limit, digest, exact), priority)
        if not self.left:
            self._downloads.add(download)
        return download

    def identify(self, namespace: TrackNamespace, track: str, digests: Sequence[str]) -> None:
        """See `Connection.identify`."""
        self._digests[namespace, track] = digests

    def at_hand(self, namespace: TrackNamespace, track: str) -> Collection[int]:
        """See `Connection.at_hand`."""
        store = self._flights.store
        digests = self._digests.get((namespace, track), ())
        return [group for group, digest in enumerate(digests) if digest in store]

    @property
    def waits_its_turn(self) -> bool:
        """See `Connection.waits_its_turn`."""
        return bool(self._downloads) and all(download.waits_its_turn for download in self._downloads)

    def stats(self) -> ConnectionStats:
        """Of the shared connection."""
        return self._flights.connection.stats()

    @property
    def closed(self) -> bool:
        """Whether the play is over, or the shared connection is."""
        return self.left or self._flights.connection.closed

    @property
    def trouble(self) -> str | None:
        """Of the shared connection."""
        return self._flights.connection.trouble

    def place(self, priority: int) -> int:
        """The priority among the requests of all plays that one among the play's own comes to."""
        return self._place(self, priority)

    def reprioritise(self) -> None:
        """The play's place among the others has changed."""
        for download in self._downloads:
            download.reprioritise()

    def forget(self, download: SeatDownload) -> None:
        """A download has ended."""
        self._downloads.discard(download)

    async def close(self) -> None:
        """Cancel what is left of the play; the shared connection stays."""
        self.left = True
        for download in list(self._downloads):
            download.cancel()
