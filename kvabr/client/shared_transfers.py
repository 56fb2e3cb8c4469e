"""Transfers under way on one connection, each shared by all plays that want the same group.

Once a group whose digest is known is complete, it is checked and put into the local store. What was asked for before
its digest was known is put there once a reader has checked it. If the store is shared memory, all processes share the
transfer (`HostCarrier`).
"""

from __future__ import annotations

import asyncio
import threading

from kvabr.client.host_carrier import HostCarrier
from kvabr.client.shared_bandwidth import link_of
from kvabr.store.group_store import TieredGroupStore
from kvabr.store.shared_groups import SharedGroupStore
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import PeerConnection
from kvabr.transfer.transfer import GroupRequest, GroupTransfer, TransferListener
from kvabr.transfer.work import SMALL_BYTES, cancel_all, decoders
from kvabr.types.errors import ConnectionLostError

TURN_S = 0.25
"""Seconds without a byte of anything more urgent after which a transfer that stands still no longer waits for it."""
_HASHING = tuple(threading.Lock() for _ in range(64))
"""Locks for computing digests. A transfer has one of them, as one of its own for each would cost more than waiting."""
_VOUCH_S = 0.05
"""Seconds after which other processes are told again that a transfer waits for its turn."""


class SharedTransfer(GroupTransfer):
    """A transfer for plays."""

    def __init__(self, request: GroupRequest, owner: SharedTransfers, host: HostCarrier | None) -> None:
        super().__init__(request)
        self.host = host
        """What shares it with other processes."""
        self.heard_s = 0.0
        self.unwanted = False
        """Whether it was ended since nobody reads it."""
        self.checked: asyncio.Future[bool] | None = None
        """Set once a group whose digest is known is complete; done, with whether it has the digest, once checked."""
        self._owner = owner
        self._hashing = _HASHING[hash(request) % len(_HASHING)]
        self._hashed: dict[str, bool] = {}

    @property
    def from_host(self) -> bool:
        """Whether its last bytes came from another process of this host."""
        return self.host is not None and self.host.from_host

    def has_digest(self, digest: str) -> bool:
        """See `GroupTransfer.has_digest`; it is computed once."""
        with self._hashing:
            # Plays of what was not published when they asked for it may each have been told another one.
            if digest not in self._hashed:
                self._hashed[digest] = super().has_digest(digest)
            return self._hashed[digest]

    def reprioritise(self) -> bool:
        """See `GroupTransfer.reprioritise`."""
        changed = super().reprioritise()
        if changed and self.carrier is not None:
            self._owner.metrics.priority_changes_total.inc()
        return changed

    def arrived(self, part: memoryview) -> None:
        """See `GroupTransfer.arrived`."""
        self._owner.heard(self, len(part))

    def settle(self) -> None:
        """See `GroupTransfer.settle`."""
        self._owner.settled(self)

    def unread(self) -> None:
        """See `GroupTransfer.unread`."""
        if self._owner.waits_its_turn(self):
            # A player asks again for what stands still. A transfer that only waits for its turn must not lose its place
            # by that, and the same reader may join it again at this very moment.
            asyncio.get_running_loop().call_soon(self._end_unread)
        else:
            self._end_unread()

    def _end_unread(self) -> None:
        if not self.readers and not self.over:
            self.unwanted = True
            super().unread()


class SharedTransfers:
    """All transfers of one connection, for one event loop."""

    def __init__(self, connection: PeerConnection, store: TieredGroupStore, metrics: ClientMetrics) -> None:
        """Begin without any; ``store`` keeps what was checked."""
        self.connection, self.store, self.metrics = connection, store, metrics
        self._link = link_of(connection)
        self._transfers: dict[GroupRequest, SharedTransfer] = {}
        self._heard_s: dict[int, float] = {}
        """When bytes of each priority came last."""
        self._vouched_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        """What checks and stores groups."""
        self._closed = False

    def find(self, request: GroupRequest) -> SharedTransfer | None:
        """Return the transfer of this request if it is under way."""
        return self._transfers.get(request)

    def join(self, request: GroupRequest, reader: TransferListener) -> tuple[SharedTransfer, bool]:
        """Read a transfer from its beginning; return it, and whether it was under way already."""
        if (transfer := self._transfers.get(request)) is not None:
            transfer.join(reader)
            return transfer, True
        shared, host = self.store.disk, None
        if isinstance(shared, SharedGroupStore) and request.digest and request.exact:
            host = HostCarrier(self.connection, shared)
        transfer = self._transfers[request] = SharedTransfer(request, self, host)
        transfer.join(reader)
        transfer.begin(host or self.connection)
        return transfer, False

    def waits_its_turn(self, transfer: SharedTransfer) -> bool:
        """Return whether nothing comes of a transfer because something does that is at least as urgent."""
        since_s = max(transfer.heard_s, asyncio.get_running_loop().time() - TURN_S)
        return any(priority <= transfer.priority and at_s > since_s for priority, at_s in self._heard_s.items())

    def identified(self, loop: asyncio.AbstractEventLoop, data: memoryview, digest: str) -> None:
        """Keep a complete group that was asked for without a digest and has this one; called in a thread."""
        loop.call_soon_threadsafe(self._put, data, digest)

    async def close(self) -> None:
        """End all transfers, and tell their readers."""
        self._closed = True
        for transfer in list(self._transfers.values()):
            transfer.unwanted = True
            transfer.reject(ConnectionLostError("the client was closed"))
        await cancel_all(self._tasks)

    # ------------------------------------------------------ from the transfers

    def heard(self, transfer: SharedTransfer, count: int) -> None:
        """Note that bytes of a transfer have come."""
        transfer.heard_s = self._heard_s[transfer.priority] = asyncio.get_running_loop().time()
        if transfer.limit != "kept":
            self._link.received(count)
        if not transfer.from_host:
            self.metrics.downloaded_bytes_total.inc(count)
            if transfer.host is not None:
                transfer.host.share(transfer.data)
        self._vouch(transfer)

    def settled(self, transfer: SharedTransfer) -> None:
        """Note that a transfer is over; check what has come if its digest is known."""
        if transfer.complete and transfer.request.digest is not None:
            loop = asyncio.get_running_loop()
            transfer.checked = loop.create_future()
            self._track(loop.create_task(self._check(transfer, transfer.request.digest, transfer.checked)))
            return
        self._forget(transfer)
        if transfer.host is not None:
            transfer.host.give_up()
        result = "done" if transfer.complete else "cancelled" if transfer.unwanted else "failed"
        self.metrics.downloads_total.labels(result).inc()

    # -------------------------------------------------------------- internals

    async def _check(self, transfer: SharedTransfer, digest: str, checked: asyncio.Future[bool]) -> None:
        good, host = False, transfer.host
        try:
            # A reader that decodes the group at the same time waits for the same computation.
            if transfer.request.limit <= SMALL_BYTES:
                good = transfer.has_digest(digest)
            else:
                good = await asyncio.get_running_loop().run_in_executor(decoders(), transfer.has_digest, digest)
            shared = host is not None and await host.settle(good=good)
            if good and not shared:
                await self.store.put(digest, transfer.data)
        finally:
            if host is not None:
                host.give_up()
            self._forget(transfer)
            checked.set_result(good)
        self.metrics.downloads_total.labels("done" if good else "damaged").inc()

    def _put(self, data: memoryview, digest: str) -> None:
        if not self._closed and digest not in self.store:
            self._track(asyncio.get_running_loop().create_task(_stored(self.store, digest, data)))

    def _vouch(self, heard: SharedTransfer) -> None:
        """Tell other processes of transfers that nothing comes of because something as urgent does."""
        if heard.heard_s < self._vouched_s + _VOUCH_S:
            return
        self._vouched_s = heard.heard_s
        for transfer in self._transfers.values():
            if transfer.priority >= heard.priority and transfer.host is not None:
                transfer.host.vouch()

    def _forget(self, transfer: SharedTransfer) -> None:
        if self.find(transfer.request) is transfer:
            del self._transfers[transfer.request]

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _stored(store: TieredGroupStore, digest: str, data: memoryview) -> None:
    await store.put(digest, data)
