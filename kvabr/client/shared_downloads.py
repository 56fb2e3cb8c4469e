"""Downloads under way on one connection, each shared by all plays that want the same group.

A shared download is as urgent as its most urgent reader, and ends when the last reader has left. Once a group whose
digest is known is complete, it is checked and put into the local store. What was asked for before its digest was known
is put there once a reader has checked it. If the store is shared memory, all processes share the download
(`HostDownload`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from kvabr.client.host_download import HostDownload
from kvabr.client.metrics import ClientMetrics
from kvabr.client.resources import SMALL_BYTES, cancel_all, decoders
from kvabr.client.shared_bandwidth import link_of
from kvabr.quic.interface import Connection, Download, GroupRequest
from kvabr.store.group_store import TieredGroupStore
from kvabr.store.shared_groups import SharedGroupStore
from kvabr.types.errors import ConnectionLostError
from kvabr.types.events import Limit

_LEAST_URGENT = 255
TURN_S = 0.25
"""Seconds without a byte of anything more urgent after which a download that stands still no longer waits for it."""
_HASHING = tuple(threading.Lock() for _ in range(64))
"""Locks for computing digests. A download has one of them, as one of its own for each would cost more than waiting."""
_VOUCH_S = 0.05
"""Seconds after which other processes are told again that a download waits for its turn."""


class DownloadReader(Protocol):
    """A reader of a shared download."""

    @property
    def wire_priority(self) -> int:
        """Priority among the requests of all plays, 0 (most urgent) to 255."""

    @property
    def time_left_s(self) -> float:
        """Seconds that its play has left, 0 if it is late."""

    def wake(self) -> None:
        """Something has come, or nothing more will."""


class SharedDownload:
    """One download and its readers."""

    def __init__(self, request: GroupRequest, inner: Download, priority: int, readers: list[DownloadReader]) -> None:
        self.request, self.inner, self.priority = request, inner, priority
        self.limit: Limit = "network"
        """What held up the bytes that came last."""
        self.received = 0
        self.heard_s = 0.0
        self.complete = False
        self.error: Exception | None = None
        self.readers = readers
        self.task: asyncio.Task[None] | None = None
        self.checked: asyncio.Future[bool] | None = None
        """Set once a group whose digest is known is complete; done, with whether it has the digest, once checked."""
        self._hashing = _HASHING[hash(request) % len(_HASHING)]
        self._hashed: dict[str, bool] = {}

    def wake(self) -> None:
        """Tell all readers that something has come, or that nothing more will."""
        for reader in self.readers:
            reader.wake()

    @property
    def from_host(self) -> bool:
        """Whether its last bytes came from another process of this host."""
        return isinstance(self.inner, HostDownload) and self.inner.from_host

    @property
    def data(self) -> memoryview:
        """Everything that has come and that readers were told of; see `Download.data`."""
        return self.inner.data[: self.received]

    def has_digest(self, digest: str) -> bool:
        """Return whether the complete group has a digest; it is computed once. Call it in a thread."""
        with self._hashing:
            # Plays of what was not published when they asked for it may each have been told another one.
            if digest not in self._hashed:
                self._hashed[digest] = self.inner.has_digest(digest)
            return self._hashed[digest]


class SharedDownloads:
    """All downloads of one connection, for one event loop."""

    def __init__(self, connection: Connection, store: TieredGroupStore, metrics: ClientMetrics) -> None:
        """Begin without any; ``store`` keeps what was checked."""
        self.connection, self.store, self.metrics = connection, store, metrics
        self._link = link_of(connection)
        self._downloads: dict[GroupRequest, SharedDownload] = {}
        self._heard_s: dict[int, float] = {}
        """When bytes of each priority came last."""
        self._vouched_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks besides those of these downloads that are not over: of downloads that were ended, or to store some."""
        self._closed = False

    def find(self, request: GroupRequest) -> SharedDownload | None:
        """Return the download of this request if it is under way."""
        return self._downloads.get(request)

    def join(self, request: GroupRequest, reader: DownloadReader) -> tuple[SharedDownload, bool]:
        """Read a download from its beginning; return it, and whether it was under way already."""
        download = self._downloads.get(request)
        joined = download is not None
        if download is None:
            priority = reader.wire_priority
            readers: list[DownloadReader] = [reader]
            inner = self._request(request, priority, readers)
            download = self._downloads[request] = SharedDownload(request, inner, priority, readers)
            download.task = asyncio.get_running_loop().create_task(self._receive(download))
        if joined:
            download.readers.append(reader)
            self.reprioritise(download)
        return download, joined

    def leave(self, download: SharedDownload, reader: DownloadReader) -> None:
        """Remove a reader; the last one to leave ends the download."""
        if reader not in download.readers:
            return
        download.readers.remove(reader)
        if download.readers:
            self.reprioritise(download)
        elif self.find(download.request) is download and not download.complete:
            if self.waits_its_turn(download):
                # A player asks again for what stands still. A download that only waits for its turn must not lose its
                # place by that, and the same reader may join it again at this very moment.
                asyncio.get_running_loop().call_soon(self._end_unread, download)
            else:
                self._end(download)

    def reprioritise(self, download: SharedDownload) -> None:
        """Make a download as urgent as its most urgent reader."""
        priority = min((reader.wire_priority for reader in download.readers), default=_LEAST_URGENT)
        if priority != download.priority and not download.complete:
            download.priority = priority
            download.inner.prioritise(priority)
            self.metrics.priority_changes_total.inc()

    def waits_its_turn(self, download: SharedDownload) -> bool:
        """Return whether nothing comes of a download because something does that is at least as urgent."""
        since_s = max(download.heard_s, asyncio.get_running_loop().time() - TURN_S)
        return any(priority <= download.priority and at_s > since_s for priority, at_s in self._heard_s.items())

    def identified(self, download: SharedDownload, digest: str) -> None:
        """Keep a complete group that was asked for without a digest and has this one; called in a thread."""
        if download.task is not None:
            download.task.get_loop().call_soon_threadsafe(self._put, download, digest)

    async def close(self) -> None:
        """End all downloads, and tell their readers."""
        self._closed = True
        for download in list(self._downloads.values()):
            if not download.complete:
                download.error = ConnectionLostError("the client was closed")
                download.wake()
            self._end(download)
        await cancel_all(self._tasks)

    # -------------------------------------------------------------- internals

    def _request(self, request: GroupRequest, priority: int, readers: Sequence[DownloadReader]) -> Download:
        shared = self.store.disk
        if isinstance(shared, SharedGroupStore) and request.digest and request.exact:
            time_left = partial(_least_time_left, readers)
            return HostDownload(self.connection, shared, request, priority, time_left)
        return self.connection.request(request, priority)

    async def _receive(self, download: SharedDownload) -> None:
        loop, inner, request = asyncio.get_running_loop(), download.inner, download.request
        try:
            while part := await inner.read():
                download.received += len(part)
                download.limit = inner.stats.limit
                download.heard_s = self._heard_s[download.priority] = loop.time()
                if download.limit != "kept":
                    self._link.received(len(part))
                if not download.from_host:
                    self.metrics.downloaded_bytes_total.inc(len(part))
                self._vouch(download)
                if request.exact and download.received >= request.limit:
                    break  # the end of the stream need not be waited for
                download.wake()
        except asyncio.CancelledError:
            self.metrics.downloads_total.labels("cancelled").inc()
            raise
        except Exception as error:  # noqa: BLE001  # whatever the transport raised is for the readers
            download.error = error
            self._forget(download)
            download.wake()
            self.metrics.downloads_total.labels("failed").inc()
            return
        finally:
            inner.cancel()
        download.complete = True
        if request.digest is None:
            self._forget(download)
            download.wake()
            self.metrics.downloads_total.labels("done").inc()
        else:
            download.checked = loop.create_future()
            download.wake()
            await self._check(download, request.digest, download.checked)

    async def _check(self, download: SharedDownload, digest: str, checked: asyncio.Future[bool]) -> None:
        good = False
        try:
            # A reader that decodes the group at the same time waits for the same computation.
            if download.request.limit <= SMALL_BYTES:
                good = download.has_digest(digest)
            else:
                good = await asyncio.get_running_loop().run_in_executor(decoders(), download.has_digest, digest)
            shared = isinstance(download.inner, HostDownload) and await download.inner.settle(good=good)
            if good and not shared:
                await self.store.put(digest, download.data)
        finally:
            if isinstance(download.inner, HostDownload):
                download.inner.drop()
            self._forget(download)
            checked.set_result(good)
        self.metrics.downloads_total.labels("done" if good else "damaged").inc()

    def _put(self, download: SharedDownload, digest: str) -> None:
        if not self._closed and digest not in self.store:
            self._track(asyncio.get_running_loop().create_task(_stored(self.store, digest, download.data)))

    def _vouch(self, heard: SharedDownload) -> None:
        """Tell other processes of downloads that nothing comes of because something as urgent does."""
        if heard.heard_s < self._vouched_s + _VOUCH_S:
            return
        self._vouched_s = heard.heard_s
        for download in self._downloads.values():
            if download.priority >= heard.priority and isinstance(download.inner, HostDownload):
                download.inner.vouch()

    def _forget(self, download: SharedDownload) -> None:
        if self.find(download.request) is download:
            del self._downloads[download.request]

    def _end_unread(self, download: SharedDownload) -> None:
        if not download.readers and not download.complete and download.error is None:
            self._end(download)

    def _end(self, download: SharedDownload) -> None:
        self._forget(download)
        download.inner.cancel()
        if download.task is not None:
            self._track(download.task)
            download.task.cancel()

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _stored(store: TieredGroupStore, digest: str, data: memoryview) -> None:
    await store.put(digest, data)


def _least_time_left(readers: Sequence[DownloadReader]) -> float:
    return min((reader.time_left_s for reader in readers), default=0.0)
