"""The downloads from one peer, shared by all plays of a client.

A group is taken from the client's store or the peer, and stored once checked. A download ends when its last reader
leaves, fails if its peer is lost, and accepts no readers once damaged; `kvabr.transfer.lane` handles lost connections.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvabr.abr.estimator import Estimator, Prior
from kvabr.client.shared_bandwidth import PeerHistory, link_of
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import PeerConnection
from kvabr.transfer.peer import Peer
from kvabr.transfer.transfer import Carrier, GroupRequest, GroupTransfer
from kvabr.transfer.work import SMALL_BYTES, cancel_all, decoders
from kvabr.types.errors import ConnectionLostError, Reason, RequestError

TURN_S = 0.25
"""Seconds without more urgent bytes until a stalled download no longer counts as waiting."""
_HASHING = tuple(threading.Lock() for _ in range(64))
"""Shared: a lock for each digest would cost more than waiting."""
_CLOSED = "the client was closed"


class Download(GroupTransfer):
    """One group in transfer to some plays, from the store or the peer."""

    def __init__(self, request: GroupRequest, owner: Downloads) -> None:
        super().__init__(request)
        self.heard_s = 0.0
        self.unwanted = False
        self.came_from = "network"
        self._owner = owner
        self._hashing = _HASHING[hash(request) % len(_HASHING)]
        self._hashed: dict[str, bool] = {}

    @property
    def damaged(self) -> bool:
        """True if checked, and not the requested group."""
        return self._hashed.get(self.request.digest or "") is False

    def keep(self, data: memoryview, where: str) -> None:
        """Take the checked group from the store."""
        if not self.over:
            self.came_from, self._hashed = where, {self.request.digest or "": True}
            self._more(data, "kept")
            self.finish()

    def has_digest(self, digest: str) -> bool:
        """Compute each digest once; see `GroupTransfer.has_digest`."""
        with self._hashing:
            # Plays that requested an unpublished group may have received different digests.
            if digest not in self._hashed:
                self._hashed[digest] = super().has_digest(digest)
                if self._hashed[digest] and self.request.digest is None:
                    self._owner.identified(self, digest)
            return self._hashed[digest]

    def reprioritise(self) -> bool:
        changed = super().reprioritise()
        if changed and self.carrier is not None:
            self._owner.metrics.priority_changes_total.inc()
        return changed

    def arrived(self, part: memoryview) -> None:
        self._owner.arrived(self, len(part))

    def settle(self) -> None:
        self._owner.settled(self)

    def unread(self) -> None:
        if self._owner.waits_its_turn(self):
            # A player repeats stalled requests. A waiting download keeps its place if its reader rejoins now.
            asyncio.get_running_loop().call_soon(self._end_unread)
        else:
            self._end_unread()

    def _end_unread(self) -> None:
        if not self.readers and not self.over:
            self.unwanted = True
            super().unread()


class Downloads(Carrier):
    """All downloads from one peer, for one event loop."""

    def __init__(self, peer: PeerConnection, store: GroupCache, metrics: ClientMetrics, *, own: bool = False) -> None:
        """``own``: close the peer with this, and count it while connected."""
        self.peer, self.store, self.metrics = peer, store, metrics
        self.link = link_of(peer.names[0] if peer.names else peer)
        self._own = own
        if own and isinstance(peer, Peer):
            peer.first_dialled = self._dialled
        self._under_way: dict[GroupRequest, Download] = {}
        self._heard_s: dict[int, float] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    def get(self, request: GroupRequest, priority: int) -> Download:
        """Return a group's download; start it if necessary."""
        self._loop = asyncio.get_running_loop()
        download = self._under_way.get(request)
        if download is not None and not download.damaged:
            self._count(download, "joined")
            return download
        download = Download(request, self)
        download.priority = priority
        kept = request.digest is not None and request.digest in self.store
        data = self.store.held(request.digest) if kept and request.digest is not None else None
        if data is not None and len(data) == request.limit:
            download.keep(data, "memory")
        else:
            self._under_way[request] = download
            download.begin(self if kept else self.peer)
        return download

    def carry(self, transfer: GroupTransfer) -> None:
        assert isinstance(transfer, Download)  # noqa: S101  # it carries only downloads
        self._track(self._look(transfer, transfer.request.digest or ""))

    @property
    def names(self) -> Sequence[str]:
        """The connection's names in a `PeerHistory`."""
        return self.peer.names

    @property
    def announced(self) -> Prior:
        """The announced rate, and the connection's round trip."""
        return Prior(self.peer.announced_rate, self.peer.stats().rtt_s or 0.0)

    @contextmanager
    def estimating(self, estimator: Estimator, history: PeerHistory) -> Iterator[Estimator]:
        """Yield a play's estimator, primed from the history; record its measurements at the end."""
        names = self.names
        with self.link.joined(estimator, history.before(names, self.announced)) as share:
            try:
                yield share
            finally:
                # A play without bytes must not refresh old records; a play redialled over another transport is not
                # recorded.
                if share.heard and len(self.names) == 1 and self.names[0] in names:
                    history.heard(self.names[0], share.link_rate(), share.ttfb())

    def waits_its_turn(self, download: GroupTransfer) -> bool:
        """Return whether a download is idle because others, at least as urgent, receive bytes."""
        heard_s = download.heard_s if isinstance(download, Download) else 0.0
        since_s = max(heard_s, asyncio.get_running_loop().time() - TURN_S)
        return any(priority <= download.priority and at_s > since_s for priority, at_s in self._heard_s.items())

    async def close(self) -> None:
        """End all downloads, failing their readers. Idempotent."""
        if self._own and self.peer.reached and not self._closed:
            self.metrics.peers.dec()
        self._closed = True
        for download in list(self._under_way.values()):
            download.unwanted = True
            download.reject(ConnectionLostError(_CLOSED))
        await cancel_all(self._tasks)
        if self._own:
            await self.peer.close()

    # ------------------------------------------------------ from the downloads

    def arrived(self, download: Download, count: int) -> None:
        """Count received bytes."""
        if len(download.data) == count:
            self._count(download, download.came_from)
        if download.came_from == "network":
            download.heard_s = self._heard_s[download.priority] = asyncio.get_running_loop().time()
            if download.limit != "kept":
                self.link.received(count)
            self.metrics.downloaded_bytes_total.inc(count)

    def settled(self, download: Download) -> None:
        """Handle a download's end; check it if its digest is known."""
        if download.complete and download.came_from == "network" and download.request.digest is not None:
            self._track(self._check(download, download.request.digest))
            return
        self._forget(download)
        if download.came_from == "network" and download.source is not self:  # store reads are not counted
            result = "done" if download.complete else "cancelled" if download.unwanted else "failed"
            self.metrics.downloads_total.labels(result).inc()

    def identified(self, download: Download, digest: str) -> None:
        """Store a complete group requested without this digest; runs in a thread."""
        self._loop.call_soon_threadsafe(self._put, digest, download.data)

    # -------------------------------------------------------------- internals

    def _dialled(self, error: BaseException | None) -> None:
        if self._closed:
            return
        if error is None:
            self.metrics.peers.inc()
            return
        self.metrics.dials_failed_total.inc()
        if isinstance(error, RequestError) and error.reason == Reason.WRONG:
            self.metrics.wrong_answers_total.inc()

    def _count(self, download: Download, source: str) -> None:
        if download.request.digest is not None:
            self.metrics.groups_total.labels(source).inc()
            self.metrics.bytes_total.labels(source).inc(download.request.limit)

    async def _check(self, download: Download, digest: str) -> None:
        good = False
        try:
            # A reader that decodes the group meanwhile waits for the same computation.
            if download.request.limit <= SMALL_BYTES:
                good = download.has_digest(digest)
            else:
                good = await asyncio.get_running_loop().run_in_executor(decoders(), download.has_digest, digest)
            if good:
                await self.store.put(digest, download.data)
        finally:
            self._forget(download)
        self.metrics.downloads_total.labels("done" if good else "damaged").inc()

    def _put(self, digest: str, data: memoryview) -> None:
        if not self._closed and digest not in self.store:
            self._track(self.store.put(digest, data))

    async def _look(self, download: Download, digest: str) -> None:
        # Memory has only checked groups; the store checks those on disk.
        try:
            kept = await self.store.find(digest)
        except Exception as error:  # noqa: BLE001  # any error goes to the readers
            download.fail(error)
            return
        if kept is not None and len(kept[0]) == download.request.limit:
            download.keep(*kept)
        elif not download.over:
            download.begin(self.peer)

    def _forget(self, download: Download) -> None:
        if self._under_way.get(download.request) is download:
            del self._under_way[download.request]

    def _track(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
