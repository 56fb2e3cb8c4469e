"""The connection of one play, over what all plays of a client share.

A request is answered from the local store if the group is there, joins another play's download of the same group, or
goes to the peer, at a priority that puts the plays in order of their deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kvabr.client.shared_downloads import SharedDownload, SharedDownloads
from kvabr.quic.interface import Connection, ConnectionStats, Download, DownloadStats, GroupRequest
from kvabr.types.errors import RequestError
from kvabr.types.events import Limit
from kvabr.types.naming import TrackNamespace

_BY_WEIGHT: tuple[Limit, ...] = ("kept", "cpu", "publisher")
"""If several of these held up one read, the first is reported."""


class PlayDownload(Download):
    """One group for one play, wherever it comes from."""

    def __init__(self, owner: PlayConnection, shared: SharedDownloads, request: GroupRequest, priority: int) -> None:
        self.stats = DownloadStats(requested_s=asyncio.get_running_loop().time())
        self._owner, self._shared, self._request, self._priority = owner, shared, request, priority
        self._download: SharedDownload | None = None
        self._kept: memoryview | None = None
        """The whole group, if it was here before the first read. It was checked when it came."""
        self._before = 0
        """Bytes of the shared download that had come before this joined: they say nothing about the link."""
        self._read = 0
        self._held: tuple[Limit, ...] = ()  # like all of this, as few objects as can be: there are many downloads
        self._counted = False
        self._waiter: asyncio.Future[None] | None = None
        self._cancelled, self._over = owner.left, False
        if self._cancelled:
            return
        under_way = shared.find(request)
        if request.digest is not None and (request.digest in shared.store or (under_way and under_way.complete)):
            return  # `read` gets it
        self._join()

    @property
    def wire_priority(self) -> int:
        """See `DownloadReader`. A play waits for what has no digest, like a catalog: that goes first."""
        awaited = self._request.digest is None and not self._request.wait_s
        return self._priority if awaited else self._owner.place(self._priority)

    @property
    def time_left_s(self) -> float:
        """See `DownloadReader`."""
        return max(0.0, self._owner.due_s - asyncio.get_running_loop().time())

    @property
    def data(self) -> memoryview:
        """See `Download.data`."""
        if self._kept is not None:
            return self._kept
        return memoryview(b"") if self._download is None else self._download.data

    def has_digest(self, digest: str) -> bool:
        """See `Download.has_digest`."""
        if self._kept is not None:
            return True
        download = self._download
        if download is None or not download.has_digest(digest):
            return False
        if self._request.digest is None:
            self._shared.identified(download, digest)
        return True

    async def read(self) -> memoryview:
        """See `Download.read`."""
        while not self._over:
            if self._cancelled:
                raise RequestError("cancelled by this side")
            if self._kept is not None:
                self._held += ("kept",)
                part = self._take(self._kept)
                self._end()
                return part
            download = self._download
            if download is None:
                await self._look()
            elif len(download.data) > self._read:
                if self._read < self._before:
                    self._held += ("kept",)
                return self._take(download.data)
            elif download.error is not None:
                raise download.error
            elif download.complete:
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
    def held(self) -> bool:
        """Whether the peer may be waiting for the group to be published."""
        return self._request.wait_s > 0 and not self.stats.received

    @property
    def waits_its_turn(self) -> bool:
        """Whether nothing comes because something does that is at least as urgent."""
        return self._download is not None and self._shared.waits_its_turn(self._download)

    def reprioritise(self) -> None:
        """Apply the play's new level."""
        if self._download is not None:
            self._shared.reprioritise(self._download)

    def cancel(self) -> None:
        """See `Download.cancel`."""
        self._cancelled = True
        self._end()
        self.wake()

    def wake(self) -> None:
        """See `DownloadReader`."""
        if self._download is not None:
            self.stats.received = len(self._download.data)
            if (limit := self._download.limit) != "network" and limit not in self._held:
                self._held += (limit,)
            if self.stats.received:
                if self.stats.first_byte_s is None:
                    self.stats.first_byte_s = asyncio.get_running_loop().time()
                self._count("host" if self._download.from_host else "network")
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -------------------------------------------------------------- internals

    def _join(self) -> None:
        self._download, joined = self._shared.join(self._request, self)
        self._before = len(self._download.data)
        if joined:
            self._count("joined")
        self.wake()

    async def _look(self) -> None:
        """Get the group from where it was when it was asked for, or else from the peer."""
        digest, store = self._request.digest, self._shared.store
        under_way = self._shared.find(self._request)
        if under_way is not None and under_way.checked is not None and await asyncio.shield(under_way.checked):
            self._keep(under_way.data, "joined")
            return
        # What is in memory was checked when it was put there; what is on disk is checked by the store.
        data = None if digest is None else await store.memory.get(digest, verify=False)
        kept = (data, "memory") if data is not None else None if digest is None else await store.find(digest)
        if self._cancelled:
            return
        if kept is not None and len(kept[0]) == self._request.limit:
            self._keep(*kept)
        else:
            self._join()

    def _keep(self, data: memoryview, source: str) -> None:
        self._kept = data
        self.stats.first_byte_s = asyncio.get_running_loop().time()
        self.stats.received = len(data)
        self._count(source)

    def _count(self, source: str) -> None:
        """Count it, once."""
        if self._request.digest is not None and not self._counted:
            self._counted = True
            self._shared.metrics.groups_total.labels(source).inc()
            self._shared.metrics.bytes_total.labels(source).inc(self._request.limit)

    def _take(self, data: memoryview) -> memoryview:
        part = data[self._read :]
        self._read += len(part)
        self.stats.limit = next((by for by in _BY_WEIGHT if by in self._held), "network")
        self._held = ()
        return part

    def _end(self) -> None:
        if not self._over:
            self.stats.done_s = asyncio.get_running_loop().time()
        self._over = True
        self._owner.forget(self)
        if self._download is not None:
            self._shared.leave(self._download, self)


class PlayConnection(Connection):
    """The connection of one play to one peer."""

    def __init__(self, shared: SharedDownloads, place: Callable[[PlayConnection, int], int]) -> None:
        """Begin without requests.

        ``place`` returns the priority of a request among those of all plays, from the play's connection and the
        priority among its own requests.
        """
        self._shared, self._place = shared, place
        self.backend, self.protocol = shared.connection.backend, shared.connection.protocol
        self.finder = shared.connection.finder
        self._digests: dict[tuple[TrackNamespace, str], Sequence[str]] = {}
        self._downloads: set[PlayDownload] = set()
        self.left = False
        """Whether the play is over."""
        self.due_s = 0.0
        """When it is due, on the event loop's clock."""
        self.late = False
        """Whether its deadline has passed."""
        self.kept = False
        """Whether upgrades go on after the play has returned."""

    @property
    def shared(self) -> Connection:
        """The connection that all plays to this peer share."""
        return self._shared.connection

    def request(self, request: GroupRequest, priority: int) -> Download:
        """See `Connection.request`."""
        digests = self._digests.get((request.namespace, request.track), ())
        if 0 <= request.group < len(digests) and not request.wait_s:
            request = replace(request, exact=True, digest=digests[request.group] or None)
        download = PlayDownload(self, self._shared, request, priority)
        if not self.left:
            self._downloads.add(download)
        return download

    def identify(self, namespace: TrackNamespace, track: str, digests: Sequence[str]) -> None:
        """See `Connection.identify`."""
        self._digests[namespace, track] = digests

    def cached_groups(self, namespace: TrackNamespace, track: str) -> Collection[int]:
        """See `Connection.cached_groups`."""
        digests = self._digests.get((namespace, track), ())
        here = self._shared.store.present(digests)
        return [group for group, digest in enumerate(digests) if digest in here] if here else ()

    @property
    def waits_its_turn(self) -> bool:  # type: ignore[override]
        """See `Connection.waits_its_turn`."""
        awaited = [download for download in self._downloads if not download.held]
        return bool(awaited) and all(download.waits_its_turn for download in awaited)

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`."""
        return self.shared.stats()

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the play is over, or the shared connection has ended."""
        return self.left or self.shared.closed

    def place(self, priority: int) -> int:
        """Return the priority among all plays' requests of one with this priority among the play's own."""
        return self._place(self, priority)

    def reprioritise(self) -> None:
        """Apply the play's new level to all its requests."""
        for download in list(self._downloads):
            download.reprioritise()

    def forget(self, download: PlayDownload) -> None:
        """Remove a download that has ended."""
        self._downloads.discard(download)

    async def close(self) -> None:
        """Cancel what is left of the play; the shared connection stays."""
        self.left = True
        for download in list(self._downloads):
            download.cancel()
