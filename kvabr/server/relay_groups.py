"""Groups that pass through a relay, from its store or its origin to all of their readers.

A group is fetched once, at the priority of its most urgent reader, until the last reader leaves. Readers get its bytes
as they arrive, except for the last part, which waits for the digest check: a wrong group never looks complete. Assets
share complete groups, not arriving ones, so a removed or wrong asset does no harm to others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass

from kvabr.codec.container import ObjectSpan
from kvabr.server.publication import ArrivingGroup
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import Connection
from kvabr.transfer.transfer import GroupReader, GroupRequest, GroupTransfer, TransferListener
from kvabr.transfer.work import decoders
from kvabr.types.errors import ConnectionLostError, Reason, RequestError, TransportError, UnauthorizedError
from kvabr.types.naming import TrackNamespace

PATIENCE_S = 10.0
"""Seconds without a byte on the connection until a group fails because the origin is away."""
DISCONNECTED_S = 1.0
"""The same without a connection: players can then react in time."""
MAX_EXPECTED, MAX_EXPECTED_BYTES = 256, 64 << 20
"""Groups to expect or receive without a reader, and their bytes."""
_TRIES, _PAUSE_S = 5, 0.1
"""Downloads of a group on lost connections, and the pause before the next."""
_BUSY_S = 1.0
_TOP_PRIORITY = 0

_Place = tuple[TrackNamespace, str, int]


class RelayTransfer(GroupTransfer):
    """A group arriving or being read; complete once its digest was checked."""

    readers: list[TransferReader]  # type: ignore[assignment]

    def __init__(self, groups: RelayGroups, request: GroupRequest) -> None:
        """``request`` has the exact size and the digest."""
        super().__init__(request)
        self.upstream: GroupReader | None = None
        self.task: asyncio.Task[None] | None = None
        self.expected = False
        """It arrives in any case, and is stored even without a reader."""
        self._groups = groups

    def reprioritise(self) -> bool:
        changed = super().reprioritise()
        if changed and self.upstream is not None:
            self.upstream.prioritise(self.priority)
            self._groups.metrics.priority_changes_total.inc()
        return changed

    def leave(self, reader: TransferListener) -> None:
        """Remove a reader; the next one accounts for the memory, and the last one ends the transfer."""
        accounted = self.readers[:1] == [reader]
        super().leave(reader)
        if accounted and self.readers:
            self.readers[0].on_more()
        elif not self.readers and not (self.expected and not self.over):
            self._groups.forget(self)

    def unread(self) -> None:
        """Leave the end to `leave`."""


@dataclass(eq=False)
class TransferReader(ArrivingGroup, TransferListener):
    """One player's view of a group."""

    transfer: RelayTransfer
    objects: tuple[ObjectSpan, ...]
    priority: int
    more: Callable[[], None]

    def __post_init__(self) -> None:
        request = self.transfer.request
        self.digest, self.size = request.digest or "", request.limit

    @property
    def memory(self) -> int:
        """The size for the first reader, 0 for others."""
        return self.size if self.transfer.readers[:1] == [self] else 0

    @property
    def wire_priority(self) -> int:
        return self.priority

    @property
    def available(self) -> int:
        if self.transfer.error is not None:
            raise self.transfer.error
        return len(self.transfer.data)

    def on_more(self) -> None:
        self.more()

    def read(self, begin: int, end: int) -> memoryview:
        return self.transfer.data[begin:end]

    def prioritise(self, priority: int) -> None:
        self.priority = priority
        self.transfer.reprioritise()

    def close(self) -> None:
        self.transfer.leave(self)


class RelayGroups:
    """All groups arriving at a relay or being read, and the store of complete ones."""

    def __init__(
        self,
        upstream: Connection,
        store: GroupCache,
        metrics: ClientMetrics,
        on_failed: Callable[[GroupRequest, TransportError], None],
    ) -> None:
        """``on_failed`` is called for groups refused by the origin, or wrong."""
        self._upstream, self._store, self.metrics, self._on_failed = upstream, store, metrics, on_failed
        self._transfers: dict[GroupRequest, RelayTransfer] = {}
        self._expected: dict[_Place, GroupReader] = {}
        """Unpublished groups that the origin will send by subscription."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._transfers)

    def __contains__(self, request: GroupRequest) -> bool:
        """Return whether a group is arriving or being read, so that another reader needs no memory."""
        return request in self._transfers

    def open(
        self, request: GroupRequest, objects: tuple[ObjectSpan, ...], priority: int, on_more: Callable[[], None]
    ) -> TransferReader:
        """Join or start the transfer of a group.

        ``request`` must have the group's exact size and its digest; otherwise as `Publication.open`.
        """
        transfer = self._transfers.get(request) or self._begin(request, None)
        reader = TransferReader(transfer, objects, priority, on_more)
        transfer.join(reader)
        return reader

    def expect(self, request: GroupRequest) -> None:
        """Subscribe to a group with unknown size and digest, if there is memory for it."""
        place = _place(request)
        if (before := self._expected.get(place)) is not None and not _has_ended(before):
            return
        self._cancel_expected(place)
        taken = [one.transfer.request for one in self._expected.values() if one.transfer is not None]
        taken += [one.request for one in self._transfers.values() if one.expected]
        most = MAX_EXPECTED_BYTES - request.limit
        if len(taken) < MAX_EXPECTED and sum(one.limit for one in taken) <= most:
            self._expected[place] = self._upstream.request(request, _TOP_PRIORITY)

    def receive_expected(self, request: GroupRequest) -> None:
        """Receive and store an expected group that is published by now; ``request`` as of `open`."""
        expected = self._expected.pop(_place(request), None)
        if expected is None:
            return
        if request in self or self._store.held(request.digest or "") is not None:
            expected.cancel()
        else:
            self._begin(request, expected)

    def stop_expecting(self, namespace: TrackNamespace, track: str | None = None) -> None:
        """Cancel expected groups of an asset, or of one track."""
        for place in [place for place in self._expected if place[0] == namespace and track in (None, place[1])]:
            self._cancel_expected(place)

    def forget(self, transfer: RelayTransfer) -> None:
        """End a transfer without readers."""
        self._forget(transfer)
        if transfer.task is not None:
            transfer.task.cancel()

    def drop(self, digests: Collection[str] | None, error: TransportError) -> None:
        """Fail transfers, and delete stored groups, of some digests or all."""
        for transfer in list(self._transfers.values()):
            if digests is None or transfer.request.digest in digests:
                transfer.fail(error)
                self.forget(transfer)
        self._start(self._delete(list(self._store) if digests is None else digests))

    async def close(self) -> None:
        """End all transfers, and finish deleting."""
        for place in list(self._expected):
            self._cancel_expected(place)
        for transfer in list(self._transfers.values()):
            self.forget(transfer)
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -------------------------------------------------------------- internals

    def _begin(self, request: GroupRequest, expected: GroupReader | None) -> RelayTransfer:
        transfer = self._transfers[request] = RelayTransfer(self, request)
        held = self._store.held(request.digest or "")
        if held is not None and len(held) == request.limit:
            transfer.show(held)
            return transfer
        transfer.expected = expected is not None
        transfer.task = self._start(self._bring(transfer, expected))
        return transfer

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _delete(self, digests: Collection[str]) -> None:
        for digest in digests:
            await self._store.delete(digest)

    async def _bring(self, transfer: RelayTransfer, expected: GroupReader | None) -> None:
        request = transfer.request
        try:
            data = await self._store.get(request.digest or "")
            if data is None or len(data) != request.limit:
                data = await self._from_origin(transfer, expected)
            transfer.show(data)
        except TransportError as error:
            if not isinstance(error, ConnectionLostError) or isinstance(error, UnauthorizedError):
                self._on_failed(request, error)
            transfer.fail(error)
        finally:
            if expected is not None:
                expected.cancel()
            if not transfer.complete or not transfer.readers:
                self._forget(transfer)

    async def _from_origin(self, transfer: RelayTransfer, expected: GroupReader | None) -> memoryview:
        """Download a group, again if the connection is lost: groups do not change."""
        request = transfer.request
        for _ in range(_TRIES):
            download = expected or self._upstream.request(request, transfer.priority)
            try:
                return await self._download(transfer, download)
            except UnauthorizedError:
                raise
            except RequestError:
                if expected is None or download.data:
                    raise  # otherwise the subscription has ended, so it must be fetched
            except ConnectionLostError:
                await asyncio.sleep(_PAUSE_S)
            except TimeoutError:
                break
            expected = None
        why = f"{request.track[:80]}, group {request.group}: the relay's origin is away"
        raise RequestError(why, reason=Reason.AWAY, retry_after_s=_BUSY_S)

    async def _download(self, transfer: RelayTransfer, download: GroupReader) -> memoryview:
        """Receive a group, check it, and store it.

        Raises `TransportError` if it failed or is wrong, `TimeoutError` if the origin is away.
        """
        size, digest, result, received = transfer.request.limit, transfer.request.digest or "", "failed", 0
        transfer.upstream = download
        download.prioritise(transfer.priority)
        try:
            while received < size and (part := await self._read(download)):
                received += len(part)
                self.metrics.downloaded_bytes_total.inc(len(part))
                # A restarted download must not withdraw available bytes.
                if len(transfer.data) < received < size:
                    transfer.show(download.data[:received])
            result, data = "damaged", download.data
            loop, right = asyncio.get_running_loop(), len(data) == size
            if not right or not await loop.run_in_executor(decoders(), download.has_digest, digest):
                why = "the origin sent a group whose digest is not the one in its catalog"
                raise RequestError(why, reason=Reason.WRONG)
            await self._store.put(digest, data)
            result = "done"
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            transfer.upstream = None
            download.cancel()
            self.metrics.downloads_total.labels(result).inc()
        return data

    async def _read(self, download: GroupReader) -> memoryview:
        reading, quiet_s = asyncio.ensure_future(download.read()), 0.0
        try:
            while True:
                before = self._upstream.stats().bytes_received
                await asyncio.wait({reading}, timeout=DISCONNECTED_S)
                if reading.done():
                    return reading.result()
                quiet_s = quiet_s + DISCONNECTED_S if self._upstream.stats().bytes_received == before else 0.0
                if quiet_s >= (PATIENCE_S if self._upstream.trouble is None else DISCONNECTED_S):
                    raise TimeoutError
        finally:
            reading.cancel()

    def _cancel_expected(self, place: _Place) -> None:
        if (expected := self._expected.pop(place, None)) is not None:
            expected.cancel()

    def _forget(self, transfer: RelayTransfer) -> None:
        if self._transfers.get(transfer.request) is transfer:
            del self._transfers[transfer.request]


def _place(request: GroupRequest) -> _Place:
    return request.namespace, request.track, request.group


def _has_ended(expected: GroupReader) -> bool:
    transfer = expected.transfer
    return transfer is None or (transfer.over and not transfer.received)
