"""Groups on their way through a relay: from its disk or its origin to everyone who waits for them.

A group is fetched once however many players want it, at the priority of the most urgent of them, and no longer fetched
when the last of them has left. Its bytes can be read as they arrive, except for those of the last part: these wait for
the check of the whole group's digest, so that a wrong group breaks off at its end and never looks complete.

Groups under way are bounded together. Those beyond the bound wait, the most urgent first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvabr.client.shared_downloads import GroupRequest, SharedDownload, SharedDownloads
from kvabr.codec.container import ObjectSpan
from kvabr.moqt.codes import RequestCode
from kvabr.server.publication import ArrivingGroup
from kvabr.store.group_store import TieredGroupStore
from kvabr.types.errors import ConnectionLostError, RequestError, TransportError, UnauthorizedError

PATIENCE_S = 10.0
"""Seconds without progress after which those who wait for a group are told that the origin is away."""
SILENCE_S = 2.0
"""Seconds without a byte on the whole connection after which a group is asked for again."""
IDLE_READ_S = 10.0
"""Seconds after which a complete group that nobody reads any more gives up its memory, if others wait for room."""
_PAUSE_S = 0.1
_BUSY_S = 1.0
_LEAST_URGENT = 255


class GroupTransfer:
    """One group on its way, and everyone who reads it. A `DownloadReader` of the download that brings it."""

    def __init__(self, request: GroupRequest, number: int) -> None:
        assert request.digest is not None  # noqa: S101  # a relay knows every group's digest
        self.request, self.digest, self.size, self.number = request, request.digest, request.limit, number
        self.data = memoryview(b"")
        """What has arrived."""
        self.available = 0
        """Bytes of it that may be read."""
        self.error: TransportError | None = None
        self.readers: list[TransferReader] = []
        self.download: SharedDownload | None = None
        self.progress = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.read_s = 0.0
        """When somebody last read from it."""

    @property
    def complete(self) -> bool:
        """Whether all of it may be read."""
        return self.available == self.size

    @property
    def wire_priority(self) -> int:
        """Priority of its most urgent reader."""
        return min((reader.priority for reader in self.readers), default=_LEAST_URGENT)

    def wake(self) -> None:
        """Take what the download has brought; see `kvabr.client.shared_downloads.DownloadReader`."""
        download = self.download
        if download is not None and download.error is None and not download.complete:
            # A download that began again is behind what was available already, and must not take that back.
            data = download.data
            if len(data) > self.available:
                self.data = data
                if len(data) < self.size:
                    self.available = len(data)
                    self.tell()
        self.progress.set()

    def finish(self, data: memoryview) -> None:
        """Make all of it available; it has been checked."""
        self.data, self.available = data, self.size
        self.read_s = asyncio.get_running_loop().time()
        self.tell()

    def fail(self, error: TransportError) -> None:
        """Tell the readers that no more will come."""
        if self.error is None and not self.complete:
            self.error = error
            self.tell()

    def tell(self) -> None:
        """Notify every reader."""
        for reader in list(self.readers):
            reader.on_more()


class TransferReader(ArrivingGroup):
    """One player's view of a group on its way."""

    def __init__(
        self,
        groups: RelayGroups,
        transfer: GroupTransfer,
        objects: tuple[ObjectSpan, ...],
        priority: int,
        on_more: Callable[[], None],
    ) -> None:
        self.objects, self.digest, self.size = objects, bytes.fromhex(transfer.digest), transfer.size
        self.priority, self.on_more = priority, on_more
        self._groups, self._transfer = groups, transfer

    @property
    def available(self) -> int:
        """See `ArrivingGroup.available`."""
        if self._transfer.error is not None:
            raise self._transfer.error
        return self._transfer.available

    def read(self, begin: int, end: int) -> memoryview:
        """See `ArrivingGroup.read`."""
        self._transfer.read_s = asyncio.get_running_loop().time()
        return self._transfer.data[begin:end]

    def prioritise(self, priority: int) -> None:
        """See `ArrivingGroup.prioritise`."""
        self.priority = priority
        self._groups.reprioritise(self._transfer)

    def close(self) -> None:
        """See `ArrivingGroup.close`."""
        self._groups.leave(self._transfer, self)


class RelayGroups:
    """All groups on their way through a relay, and the store of those that have come."""

    def __init__(
        self,
        downloads: SharedDownloads,
        store: TieredGroupStore,
        limit: int,
        on_failed: Callable[[GroupRequest, TransportError], None] = lambda _request, _error: None,
    ) -> None:
        """Start empty.

        Args:
            downloads: downloads from the origin; they put what they bring, checked, into ``store``.
            store: what is kept.
            limit: bound on groups that are on their way or being read, bytes; one larger group may be alone.
            on_failed: called when the origin refuses a group, or sends a wrong one.
        """
        self._downloads, self._store, self._limit, self._on_failed = downloads, store, limit, on_failed
        self._transfers: dict[str, GroupTransfer] = {}
        """By digest, those that can be joined."""
        self._admitted: set[GroupTransfer] = set()
        """Those that count towards the bound: on their way, or complete and still read."""
        self._waiting: dict[GroupTransfer, asyncio.Future[None]] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._numbers = 0
        self.bytes = 0
        """Bytes of groups that are on their way or being read."""

    def __len__(self) -> int:
        """Return how many groups are on their way, being read, or waiting for room."""
        return len(self._admitted) + len(self._waiting)

    def held(self, digest: str) -> memoryview | None:
        """Return a group that is in memory, checked when it came; None if it is not."""
        return self._store.memory.held(digest)

    def follow(
        self, request: GroupRequest, objects: tuple[ObjectSpan, ...], priority: int, on_more: Callable[[], None]
    ) -> TransferReader:
        """Join the transfer of a group, or start it.

        Args:
            request: the group, with its digest and its exact size.
            objects: how it is cut into objects.
            priority: 0 (most urgent) to 255.
            on_more: called when more of it can be read, or no more will come; never before this returns.
        """
        assert request.digest is not None  # noqa: S101  # as in `GroupTransfer`
        transfer = self._transfers.get(request.digest)
        if transfer is None:
            self._numbers += 1
            transfer = self._transfers[request.digest] = GroupTransfer(request, self._numbers)
            transfer.task = asyncio.get_running_loop().create_task(self._bring(transfer))
        reader = TransferReader(self, transfer, objects, priority, on_more)
        transfer.readers.append(reader)
        self.reprioritise(transfer)
        return reader

    def leave(self, transfer: GroupTransfer, reader: TransferReader) -> None:
        """Remove a reader; the last one to leave ends the transfer."""
        if reader not in transfer.readers:
            return
        transfer.readers.remove(reader)
        if transfer.readers:
            self.reprioritise(transfer)
            return
        self._forget(transfer)
        if transfer.task is not None and not transfer.task.done():
            transfer.task.cancel()
        else:
            self._release(transfer)

    def reprioritise(self, transfer: GroupTransfer) -> None:
        """Let a transfer be as urgent as its most urgent reader."""
        if transfer.download is not None:
            self._downloads.reprioritise(transfer.download)

    async def drop(self, digests: Iterable[str] | None, error: TransportError) -> None:
        """Break off transfers and delete kept groups.

        Args:
            digests: which groups, SHA-256 in hex; None: all.
            error: what their readers are told.
        """
        chosen = None if digests is None else set(digests)
        for digest, transfer in list(self._transfers.items()):
            if chosen is None or digest in chosen:
                transfer.fail(error)
                self._forget(transfer)
        kept = [group.digest async for group in self._store.list()] if chosen is None else list(chosen)
        for digest in kept:
            await self._store.delete(digest)

    async def close(self) -> None:
        """End all transfers."""
        tasks = [one.task for one in (*self._admitted, *self._waiting) if one.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._looking is not None:
            self._looking.cancel()

    # ------------------------------------------------------------------ one transfer

    async def _bring(self, transfer: GroupTransfer) -> None:
        try:
            await self._admit(transfer)
            transfer.finish(await self._from_disk(transfer) or await self._from_origin(transfer))
        except TransportError as error:
            if not isinstance(error, ConnectionLostError) or isinstance(error, UnauthorizedError):
                self._on_failed(transfer.request, error)
            transfer.fail(error)
        finally:
            # Later requests find it in the store, or start anew.
            self._forget(transfer)
            if not transfer.complete or not transfer.readers:
                self._release(transfer)

    async def _from_disk(self, transfer: GroupTransfer) -> memoryview | None:
        if transfer.digest not in self._store:
            return None
        return await self._store.get(transfer.digest)

    async def _from_origin(self, transfer: GroupTransfer) -> memoryview:
        """Download a group, again if the connection is lost: groups do not change."""
        loop, downloads = asyncio.get_running_loop(), self._downloads
        connection, end_s = downloads.connection, loop.time() + PATIENCE_S
        while True:
            before = transfer.available
            download = transfer.download = downloads.join(transfer.request, transfer)[0]
            try:
                await self._complete(transfer, download)
                good = download.checked is not None and await asyncio.shield(download.checked)
            except UnauthorizedError:
                raise
            except (ConnectionLostError, TimeoutError) as error:
                if transfer.available > before:
                    end_s = loop.time() + PATIENCE_S
                if connection.closed or loop.time() > end_s:
                    why = f"{transfer.request.track[:80]}, group {transfer.request.group}: the origin is away"
                    raise RequestError(why, code=RequestCode.TIMEOUT, retry_after_s=_BUSY_S) from error
                await asyncio.sleep(_PAUSE_S)
                continue
            finally:
                transfer.download = None
                downloads.leave(download, transfer)
            if not good or len(download.data) != transfer.size:
                why = "the origin sent a group whose SHA-256 is not the one in its catalog"
                raise RequestError(why, code=RequestCode.MALFORMED_TRACK)
            return download.data

    async def _complete(self, transfer: GroupTransfer, download: SharedDownload) -> None:
        """Wait until a download is over.

        Raises:
            TransportError: it failed.
            TimeoutError: the origin has fallen silent.
        """
        connection = self._downloads.connection
        while not download.complete and download.error is None:
            transfer.progress.clear()
            before = connection.stats().bytes_received
            try:
                await asyncio.wait_for(transfer.progress.wait(), SILENCE_S)
            except TimeoutError:
                if connection.stats().bytes_received == before:
                    raise
        if download.error is not None:
            raise download.error

    # ------------------------------------------------------------------ room

    async def _admit(self, transfer: GroupTransfer) -> None:
        """Wait for room; the most urgent transfer that waits goes first."""
        if self._waiting or not self._fits(transfer):
            waiter = self._waiting[transfer] = asyncio.get_running_loop().create_future()
            self._look()
            try:
                await waiter
            finally:
                self._waiting.pop(transfer, None)
        else:
            self._take(transfer)

    def _fits(self, transfer: GroupTransfer) -> bool:
        return not self._admitted or self.bytes + transfer.size <= self._limit

    def _take(self, transfer: GroupTransfer) -> None:
        self._admitted.add(transfer)
        self.bytes += transfer.size

    def _release(self, transfer: GroupTransfer) -> None:
        if transfer in self._admitted:
            self._admitted.remove(transfer)
            self.bytes -= transfer.size
        while self._waiting:
            first = min(self._waiting, key=lambda one: (one.wire_priority, one.number))
            if not self._fits(first):
                return
            self._take(first)
            self._waiting.pop(first).set_result(None)

    def _look(self) -> None:
        """While groups wait for room, take it from complete groups whose readers do not read them."""
        loop = asyncio.get_running_loop()
        if self._looking is not None:
            return
        idle_s = loop.time() - IDLE_READ_S
        for transfer in [one for one in self._admitted if one.complete and one.read_s < idle_s]:
            transfer.error = RequestError("read too slowly", code=RequestCode.EXCESSIVE_LOAD, retry_after_s=_BUSY_S)
            self._release(transfer)
            transfer.tell()
        if self._waiting:
            self._looking = loop.call_later(1.0, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._look()

    def _forget(self, transfer: GroupTransfer) -> None:
        if self._transfers.get(transfer.digest) is transfer:
            del self._transfers[transfer.digest]
