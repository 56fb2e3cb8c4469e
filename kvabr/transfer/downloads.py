"""Downloads from one peer, each shared by all readers of its group: plays of a client, players of a relay.

A group comes from a store or the peer, and is stored once checked. A download has the priority of its most urgent
reader, ends with its last one, and accepts no readers once found damaged. It fails if its peer is lost, unless its
owner retries; `kvabr.transfer.peer` handles lost connections.
"""

from __future__ import annotations

import asyncio
import threading

from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import (
    CLOSED,
    GroupRequest,
    GroupTransfer,
    PeerConnection,
    TaskSet,
    TransferListener,
    cancel_all,
)
from kvabr.transfer.work import SMALL_BYTES, decoders
from kvabr.types.errors import ConnectionLostError, Reason, RequestError

HELD_S = 0.25
"""Seconds without bytes for more urgent downloads after which an idle download is no longer held up by them."""
_HASHING = tuple(threading.Lock() for _ in range(64))
"""Shared locks: a lock per digest would cost more than waiting."""


class Download(GroupTransfer):
    """One group in transfer from the store or the peer to any number of readers."""

    def __init__(self, request: GroupRequest, owner: Downloads) -> None:
        super().__init__(request)
        self.received_s = 0.0
        self.cancelled = False
        self.received_from = "network"
        self.expected = False
        """True if the group is received and stored even without a reader."""
        self.tries = 0
        """Number of retries so far."""
        self.checking = False
        """True while the digest of the complete group is checked."""
        self._owner = owner
        self._hashing = _HASHING[hash(request) % len(_HASHING)]
        self._hashed: dict[str, bool] = {}

    @property
    def verified(self) -> bool | None:
        """True if it is the requested group, False if damaged; None before the check."""
        return self._hashed.get(self.request.digest or "")

    def keep(self, data: memoryview, where: str) -> None:
        """Deliver the group from the store, where it was checked; ``where``: memory or disk."""
        if not self.over:
            self.received_from, self._hashed = where, {self.request.digest or "": True}
            self._deliver(data, "kept")
            self.finish()

    def identify(self, request: GroupRequest) -> None:
        """Set the exact size and digest of a group that was requested before its publication."""
        self.request = request
        if self.received > request.limit:
            self.too_long()
        elif self.complete:
            self.settle()
        elif self.received == request.limit:
            self.finish()

    def has_digest(self, digest: str) -> bool:
        """As `GroupTransfer.has_digest`, but compute each digest only once."""
        with self._hashing:
            # Plays that requested an unpublished group may expect different digests.
            if digest not in self._hashed:
                self._hashed[digest] = super().has_digest(digest)
                if self._hashed[digest] and self.request.digest is None:
                    self._owner.identified(self, digest)
            return self._hashed[digest]

    def leave(self, reader: TransferListener) -> None:
        super().leave(reader)
        if self.over:
            self._owner.forget(self)

    def fail(self, error: Exception) -> None:
        """End with an error, unless the owner retries."""
        if not self.over:
            left = self._owner.failed(self, error if self.carrier is None else self.carrier.explain(self, error))
            if left is not None:
                super().fail(left)

    def arrived(self, part: memoryview) -> None:
        self._owner.arrived(self, len(part))

    def settle(self) -> None:
        self._owner.settled(self)

    def unread(self) -> None:
        if self.expected:
            return
        if self._owner.held_by_priority(self):
            # Players repeat stalled requests: if its reader rejoins now, the download keeps its progress.
            asyncio.get_running_loop().call_soon(self._end_unread)
        else:
            self.end(None)

    def _end_unread(self) -> None:
        if not self.readers:
            self.end(None)

    def end(self, error: Exception | None) -> None:
        """End the download, which is no longer needed; ``error`` None: it was cancelled."""
        self.cancelled = True
        self.reject(error or RequestError(f"{self.request}: cancelled", reason=Reason.INTERNAL))


class Downloads:
    """All downloads from one peer. Not thread-safe."""

    def __init__(self, peer: PeerConnection, store: GroupCache, metrics: ClientMetrics) -> None:
        self.peer, self.store, self.metrics = peer, store, metrics
        self._under_way: dict[GroupRequest, Download] = {}
        self._received_s: dict[int, float] = {}
        self._tasks = TaskSet()
        self._closed = False

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, request: GroupRequest) -> bool:
        """Return True if the group is arriving or being read, so that another reader needs no memory."""
        return request in self._under_way

    def get(self, request: GroupRequest, priority: int) -> Download:
        """Return a group's download; start it if necessary."""
        self._loop = asyncio.get_running_loop()
        download = self._under_way.get(request)
        if download is not None and download.verified is not False:
            self._count(download, "joined")
            return download
        download = self._under_way[request] = Download(request, self)
        download.priority = priority
        data = None if request.digest is None else self.store.held(request.digest)
        if data is not None and len(data) == request.limit:
            download.keep(data, "memory")
        elif request.digest is not None and self.may_store(request.digest):
            self._tasks.start(self._look(download, request.digest))
        else:
            download.begin(self.peer)
        return download

    def held_by_priority(self, download: GroupTransfer) -> bool:
        """Return True if a download is idle because others, at least as urgent, receive bytes."""
        received_s = download.received_s if isinstance(download, Download) else 0.0
        since_s = max(received_s, asyncio.get_running_loop().time() - HELD_S)
        return any(priority <= download.priority and at_s > since_s for priority, at_s in self._received_s.items())

    async def close(self) -> None:
        """End all downloads; their readers fail. Idempotent."""
        self._closed = True
        for download in list(self._under_way.values()):
            download.end(ConnectionLostError(CLOSED))
        await cancel_all(self._tasks)

    # ---------------------------------------------------------- for subclasses

    def may_store(self, digest: str) -> bool:
        """Return True if the store may have the group, so that it is looked up there first."""
        return digest in self.store

    def failed(self, download: Download, error: Exception) -> Exception | None:
        """Return the error with which a download ends, or None if it restarts."""
        del download
        return error

    def damaged(self, download: Download) -> None:
        """Handle a complete download that is not the requested group."""

    # ------------------------------------------------------ from the downloads

    def arrived(self, download: Download, count: int) -> None:
        """Count received bytes."""
        if len(download.data) == count:
            self._count(download, download.received_from)
        if download.received_from == "network":
            download.received_s = self._received_s[download.priority] = asyncio.get_running_loop().time()
            self.metrics.downloaded_bytes_total.inc(count)

    def settled(self, download: Download) -> None:
        """Handle a download's end; check it if its digest is known."""
        known, network = download.request.digest is not None, download.received_from == "network"
        if download.complete and network and known:
            download.checking = True
            self._tasks.start(self._check(download, download.request.digest or ""))
            return
        if not (download.complete and known) and self._under_way.get(download.request) is download:
            del self._under_way[download.request]
        if network and download.source is not None:  # store reads are not counted
            result = "done" if download.complete else "cancelled" if download.cancelled else "failed"
            self.metrics.downloads_total.labels(result).inc()

    def identified(self, download: Download, digest: str) -> None:
        """Store a complete group whose digest was unknown when requested; called in a thread."""
        self._loop.call_soon_threadsafe(self._put, digest, download.data)

    def forget(self, download: Download) -> None:
        """Accept no further readers of a download without readers."""
        if not (download.readers or download.checking) and self._under_way.get(download.request) is download:
            del self._under_way[download.request]

    # -------------------------------------------------------------- internals

    def _count(self, download: Download, source: str) -> None:
        if download.request.digest is not None:
            self.metrics.groups_total.labels(source).inc()
            self.metrics.bytes_total.labels(source).inc(download.request.limit)

    async def _check(self, download: Download, digest: str) -> None:
        good = False
        try:
            # A reader that decodes the group at the same time waits for this computation.
            if download.request.limit <= SMALL_BYTES:
                good = download.has_digest(digest)
            else:
                good = await asyncio.get_running_loop().run_in_executor(decoders(), download.has_digest, digest)
            if good and not download.cancelled:
                await self.store.put(digest, download.data)
        finally:
            download.checking = False
            self.forget(download)
        self.metrics.downloads_total.labels("done" if good else "damaged").inc()
        if not good:
            self.damaged(download)
        download.notify()

    def _put(self, digest: str, data: memoryview) -> None:
        if not self._closed and digest not in self.store:
            self._tasks.start(self.store.put(digest, data))

    async def _look(self, download: Download, digest: str) -> None:
        # Groups in memory are checked already; the store checks groups on disk.
        try:
            stored = await self.store.find(digest)
        except Exception as error:  # noqa: BLE001  # any error goes to the readers
            download.fail(error)
            return
        if stored is not None and len(stored[0]) == download.request.limit:
            download.keep(*stored)
        elif not download.over:
            download.begin(self.peer)
