"""Groups that pass through a relay, from its disk or its origin to all of their readers.

A group is fetched once, at the priority of its most urgent reader, until the last reader leaves. Readers get its bytes
as they arrive, except for the last part, which waits for the digest check: a wrong group never looks complete.

Assets with a common prefix have common groups, which are fetched under the name of one asset. If the origin refuses
that one, or sends other bytes, readers of the other assets get the group under another name, so that an asset that is
removed or has a wrong catalog does no harm to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvabr.codec.container import ObjectSpan
from kvabr.server.publication import ArrivingGroup, PublishedGroup
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import Connection
from kvabr.transfer.transfer import GroupReader, GroupRequest, GroupTransfer, TransferListener
from kvabr.transfer.work import decoders
from kvabr.types.errors import ConnectionLostError, Reason, RequestError, TransportError, UnauthorizedError
from kvabr.types.naming import TrackNamespace

PATIENCE_S = 10.0
"""Seconds without progress until a group fails because the origin is away."""
DISCONNECTED_S = 1.0
"""The same while the connection to the origin is lost: players can then react within their deadlines."""
SILENCE_S = 2.0
"""Seconds without a byte on the whole connection until a group is requested again."""
IDLE_READ_S = 10.0
"""Seconds without a read until a complete group gives up its memory if others wait for it."""
MAX_EXPECTED = 256
"""Groups of all assets to expect at a time."""
_EXPECTED_SHARE = 1 / 4
"""Their share of the bound on transfers."""
_PAUSE_S = 0.1
_BUSY_S = 1.0
_TOP_PRIORITY, _LOWEST_PRIORITY = 0, 255

_Key = tuple[str, int]
"""Digest and bytes of a group."""
_Place = tuple[TrackNamespace, str, int]
"""Where a group is published."""


class RelayTransfer(GroupTransfer):
    """A group that is arriving; it is complete once its digest was checked."""

    readers: list[TransferReader]  # type: ignore[assignment]

    def __init__(self, groups: RelayGroups, request: GroupRequest, digest: str) -> None:
        """``request`` has the name under which it is fetched."""
        super().__init__(request)
        self.digest = digest
        self.upstream: GroupReader | None = None
        self.task: asyncio.Task[None] | None = None
        self.read_s = 0.0
        self._groups = groups

    @property
    def size(self) -> int:

        return self.request.limit

    @property
    def key(self) -> _Key:
        """Identifies transfers that readers can share."""
        return self.digest, self.size

    def other_name(self, but: Collection[TrackNamespace]) -> GroupRequest | None:
        """Return the request of a reader of an asset that is not one of ``but``."""
        return next((reader.request for reader in self.readers if reader.request.namespace not in but), None)

    def begin_again(self, request: GroupRequest, error: TransportError) -> None:
        """Fetch it under another name; fail readers that have read bytes, which may be wrong."""
        self.request, self.data = request, memoryview(b"")
        for reader in [reader for reader in self.readers if reader.has_read]:
            reader.fail(error)

    def reprioritise(self) -> bool:
        changed = super().reprioritise()
        if changed and self.upstream is not None:
            self.upstream.prioritise(self.priority)
            self._groups.metrics.priority_changes_total.inc()
        return changed

    def unread(self) -> None:
        self._groups.forget(self)

    def leave(self, reader: TransferListener) -> None:
        """Remove a reader; if it was the last one of a complete transfer, release the memory."""
        if reader in self.readers:
            super().leave(reader)
            if not self.readers and self.over:
                self._groups.forget(self)


@dataclass(eq=False)
class TransferReader(ArrivingGroup, TransferListener):
    """One player's view of a group that is arriving."""

    transfer: RelayTransfer
    request: GroupRequest
    """The reader's own; the transfer may use that of another asset."""
    objects: tuple[ObjectSpan, ...]
    priority: int
    more: Callable[[], None]

    def __post_init__(self) -> None:
        self.digest, self.size = self.transfer.digest, self.transfer.size
        self.has_read = False
        self._error: TransportError | None = None
        self.memory = 0 if self.transfer.readers else self.size  # counts for the first player

    @property
    def wire_priority(self) -> int:
        return self.priority

    @property
    def available(self) -> int:
        error = self._error or self.transfer.error
        if error is not None:
            raise error
        return len(self.transfer.data)

    def on_more(self) -> None:
        self.more()

    def read(self, begin: int, end: int) -> memoryview:
        self.has_read = True
        self.transfer.read_s = asyncio.get_running_loop().time()
        return self.transfer.data[begin:end]

    def fail(self, error: TransportError) -> None:
        """Fail this reader only."""
        self._error = error
        self.more()

    def prioritise(self, priority: int) -> None:
        self.priority = priority
        self.transfer.reprioritise()

    def close(self) -> None:
        """Leave the transfer, which ends with its last reader."""
        self.transfer.leave(self)


class RelayGroups:
    """All groups that are arriving at a relay, and the store of complete ones."""

    def __init__(
        self,
        upstream: Connection,
        store: GroupCache,
        metrics: ClientMetrics,
        limit: int,
        on_failed: Callable[[GroupRequest, TransportError], None] = lambda _request, _error: None,
    ) -> None:
        """Limit the bytes of groups that are arriving or being read; a larger group may be alone.

        ``store`` has the complete groups; ``on_failed`` is called for groups that the origin refuses, or sends wrong.
        """
        self._upstream, self._store, self.metrics, self._limit = upstream, store, metrics, limit
        self._on_failed = on_failed
        self._transfers: dict[_Key, RelayTransfer] = {}
        """Transfers that readers can join. The key includes the size because catalogs may have a wrong one."""
        self._admitted: set[RelayTransfer] = set()
        """Transfers that count towards the bound: arriving, or complete and still read."""
        self._waiting: dict[RelayTransfer, asyncio.Future[None]] = {}
        self._expected: dict[_Place, GroupReader] = {}
        """Groups that the origin has not published yet, and will send by subscription."""
        self._looking: asyncio.TimerHandle | None = None
        self.bytes = 0
        """Bytes of groups that are arriving or being read."""

    def __len__(self) -> int:
        return len(self._admitted) + len(self._waiting)

    def has(self, digest: str, size: int) -> bool:
        """Return whether a group is in memory, or arriving."""
        return (digest, size) in self._transfers or self._store.held(digest) is not None

    def open(
        self,
        request: GroupRequest,
        digest: str,
        objects: tuple[ObjectSpan, ...],
        priority: int,
        on_more: Callable[[], None],
    ) -> ArrivingGroup:
        """Return a group that is in memory, or join its transfer, or start one.

        ``request`` must have the group's exact size, ``digest`` is the group's; otherwise as `Publication.open`.
        """
        held = self._store.held(digest)
        if held is not None:
            return PublishedGroup(held, objects, digest)
        transfer = self._transfers.get((digest, request.limit))
        if transfer is None:
            transfer = RelayTransfer(self, request, digest)
            self._transfers[transfer.key] = transfer
            transfer.task = asyncio.get_running_loop().create_task(self._bring(transfer))
        reader = TransferReader(transfer, request, objects, priority, on_more)
        transfer.join(reader)
        return reader

    def expect(self, request: GroupRequest) -> None:
        """Subscribe to a group with unknown size and digest, if there is memory for it."""
        place = _place(request)
        if (before := self._expected.get(place)) is not None:
            if not _is_unusable(before):
                return
            self._cancel_expected(place)
        taken = sum(one.transfer.request.limit for one in self._expected.values() if one.transfer is not None)
        if len(self._expected) < MAX_EXPECTED and request.limit <= int(_EXPECTED_SHARE * self._limit) - taken:
            self._expected[place] = self._upstream.request(request, _TOP_PRIORITY)

    def receive_expected(self, request: GroupRequest, digest: str, objects: tuple[ObjectSpan, ...]) -> None:
        """Receive an expected group that is published by now; arguments as of `open`.

        It is stored even without a reader, as it is arriving already.
        """
        place = _place(request)
        if place not in self._expected:
            return
        if self.has(digest, request.limit):
            self._cancel_expected(place)
            return
        reader = self.open(request, digest, objects, _LOWEST_PRIORITY, lambda: self._close_when_done(reader))

    def stop_expecting(self, namespace: TrackNamespace, track: str | None = None) -> None:
        """Cancel the expected groups of an asset, or of one of its tracks, unless they are being received."""
        for place in [place for place in self._expected if place[0] == namespace and track in (None, place[1])]:
            if not any(_place(transfer.request) == place for transfer in self._transfers.values()):
                self._cancel_expected(place)

    def forget(self, transfer: RelayTransfer) -> None:
        """End a transfer without readers."""
        self._forget(transfer)
        self._waiting.pop(transfer, None)  # at once, so that it does not get memory released in this turn
        if transfer.task is not None and not transfer.task.done():
            transfer.task.cancel()
        else:
            self.release(transfer)

    async def drop(self, digests: Iterable[str] | None, error: TransportError) -> None:
        """Fail transfers with an error, and delete stored groups, of some digests or all."""
        chosen = None if digests is None else set(digests)
        for transfer in list(self._transfers.values()):
            if chosen is None or transfer.digest in chosen:
                self._forget(transfer)
                transfer.fail(error)
        for digest in list(self._store) if chosen is None else chosen:
            await self._store.delete(digest)

    async def close(self) -> None:
        """End all transfers."""
        for place in list(self._expected):
            self._cancel_expected(place)
        tasks = [one.task for one in (*self._admitted, *self._waiting) if one.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._looking is not None:
            self._looking.cancel()

    async def _bring(self, transfer: RelayTransfer) -> None:
        try:
            await self._admit(transfer)
            data = await self._store.get(transfer.digest)
            data = data or await self._from_origin(transfer)
            transfer.read_s = asyncio.get_running_loop().time()
            if not transfer.over:
                transfer.data = data
                transfer.finish()
        except TransportError as error:
            if not isinstance(error, ConnectionLostError) or isinstance(error, UnauthorizedError):
                self._on_failed(transfer.request, error)
            transfer.fail(error)
        finally:
            # Later requests find it in the store, or start again.
            self._forget(transfer)
            self._cancel_expected(_place(transfer.request))
            if not transfer.complete or not transfer.readers:
                self.release(transfer)

    async def _from_origin(self, transfer: RelayTransfer) -> memoryview:
        """Download a group, again if the connection is lost: groups do not change."""
        loop = asyncio.get_running_loop()
        progress_s = loop.time()
        refused: set[TrackNamespace] = set()
        while True:
            before = len(transfer.data)
            try:
                return await self._download(transfer)
            except UnauthorizedError:
                raise
            except RequestError as error:
                refused.add(transfer.request.namespace)
                other = transfer.other_name(refused)
                if other is None or transfer.error is not None or error.retry_after_s is not None:
                    raise
                self._on_failed(transfer.request, error)
                transfer.begin_again(other, error)
            except (ConnectionLostError, TimeoutError) as error:
                if len(transfer.data) > before:
                    progress_s = loop.time()
                patience_s = PATIENCE_S if self._upstream.trouble is None else DISCONNECTED_S
                if self._upstream.closed or loop.time() > progress_s + patience_s:
                    why = f"{transfer.request.track[:80]}, group {transfer.request.group}: the relay's origin is away"
                    raise RequestError(why, reason=Reason.AWAY, retry_after_s=_BUSY_S) from error
                await asyncio.sleep(_PAUSE_S)

    async def _download(self, transfer: RelayTransfer) -> memoryview:
        """Download a group once, check it, and store it.

        Raises:
            TransportError: It failed, or its digest is wrong.
            TimeoutError: The origin has fallen silent.
        """
        size, result, received = transfer.size, "failed", 0
        download, expected = self._begin(transfer)
        transfer.upstream = download
        try:
            while received < size and (part := await self._read(download)):
                received += len(part)
                self.metrics.downloaded_bytes_total.inc(len(part))
                # A restarted download must not withdraw bytes that were available already.
                if len(transfer.data) < received < size:
                    transfer.show(download.data[:received])
            result, data = "damaged", download.data
            await self._check(transfer, download)
            await self._store.put(transfer.digest, data)
            result = "done"
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        except RequestError as error:
            if not expected or received:
                raise
            raise TimeoutError from error  # the subscription has ended, so it must be fetched
        finally:
            transfer.upstream = None
            download.cancel()
            self.metrics.downloads_total.labels(result).inc()
        return data

    @staticmethod
    async def _check(transfer: RelayTransfer, download: GroupReader) -> None:
        """Raise a `RequestError` if a group has a wrong size or digest."""
        loop, right = asyncio.get_running_loop(), len(download.data) == transfer.size
        if not right or not await loop.run_in_executor(decoders(), download.has_digest, transfer.digest):
            why = "the origin sent a group whose digest is not the one in its catalog"
            raise RequestError(why, reason=Reason.WRONG)

    def _begin(self, transfer: RelayTransfer) -> tuple[GroupReader, bool]:
        """Return the download of a group, and whether it is a subscription."""
        request = transfer.request
        if (expected := self._expected.pop(_place(request), None)) is not None:
            if not _is_unusable(expected):
                expected.prioritise(transfer.priority)
                return expected, True
            expected.cancel()
        name = request.namespace, request.track, request.group
        return self._upstream.fetch(*name, priority=transfer.priority, limit=transfer.size, exact=True), False

    async def _read(self, download: GroupReader) -> memoryview:
        """Read from a download; raise `TimeoutError` when the whole connection is silent."""
        reading = asyncio.ensure_future(download.read())
        try:
            while True:
                before = self._upstream.stats().bytes_received
                silence_s = SILENCE_S if self._upstream.trouble is None else min(SILENCE_S, DISCONNECTED_S)
                await asyncio.wait({reading}, timeout=silence_s)
                if reading.done():
                    return reading.result()
                if self._upstream.stats().bytes_received == before:
                    raise TimeoutError
        finally:
            reading.cancel()

    async def _admit(self, transfer: RelayTransfer) -> None:
        """Wait for memory; the most urgent transfer goes first."""
        if not self._waiting and self._take(transfer):
            return
        waiter = self._waiting[transfer] = asyncio.get_running_loop().create_future()
        if self._looking is None:
            self._look()
        try:
            await waiter
        finally:
            self._waiting.pop(transfer, None)

    def _take(self, transfer: RelayTransfer) -> bool:
        fits = not self._admitted or self.bytes + transfer.size <= self._limit
        if fits:
            self._admitted.add(transfer)
            self.bytes += transfer.size
        return fits

    def release(self, transfer: RelayTransfer) -> None:
        """Release the memory of a transfer to others."""
        if transfer in self._admitted:
            self._admitted.remove(transfer)
            self.bytes -= transfer.size
        while self._waiting:
            first = min(self._waiting, key=lambda one: one.priority)  # of equals the oldest
            if not self._take(first):
                return
            self._waiting.pop(first).set_result(None)

    def _look(self) -> None:
        """While groups wait for memory, take it from complete groups with idle readers."""
        loop = asyncio.get_running_loop()
        idle_s = loop.time() - IDLE_READ_S
        slow = RequestError("read too slowly", reason=Reason.BUSY, retry_after_s=_BUSY_S)
        for transfer in [one for one in self._admitted if one.complete and one.read_s < idle_s]:
            self.release(transfer)
            for reader in list(transfer.readers):
                reader.fail(slow)
        self._looking = loop.call_later(1.0, self._look) if self._waiting else None

    def _close_when_done(self, reader: ArrivingGroup) -> None:
        try:
            done = reader.available == reader.size
        except TransportError:
            done = True
        if done:
            asyncio.get_running_loop().call_soon(reader.close)

    def _cancel_expected(self, place: _Place) -> None:
        if (expected := self._expected.pop(place, None)) is not None:
            expected.cancel()

    def _forget(self, transfer: RelayTransfer) -> None:
        if self._transfers.get(transfer.key) is transfer:
            del self._transfers[transfer.key]


def _place(request: GroupRequest) -> _Place:
    return request.namespace, request.track, request.group


def _is_unusable(expected: GroupReader) -> bool:
    """Return whether an expected group has ended without a byte."""
    transfer = expected.transfer
    return transfer is None or (transfer.over and not transfer.received)
