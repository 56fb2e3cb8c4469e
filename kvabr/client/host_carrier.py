"""Groups that all processes of a host share: one gets each from the peer, the others read what it writes.

Which process does is decided by a claim in shared memory (`kvabr.store.shared_folder`). The others see the bytes come
as if they came from the peer, so a player judges them as it judges any transfer, and abandons what is too slow. If the
process that has the claim dies, the next one begins anew; if it stands still, another tries, and in the end each for
itself.
"""

from __future__ import annotations

import asyncio

from kvabr.store.shared_folder import GroupClaim, NeighbourGroup
from kvabr.store.shared_groups import SharedGroupStore
from kvabr.transfer.interface import PeerConnection
from kvabr.transfer.transfer import Carrier, GroupTransfer
from kvabr.types.backoff import Backoff

STILL_S, STILL_RTTS, STILL_SHARE = 0.25, 4.0, 0.05
"""A transfer of another process stands still if nothing of it came for this many seconds and round trips, and for this
share of the time that its most urgent reader has left."""
_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.02
"""Between two looks at it; doubled while nothing comes."""


class HostCarrier(Carrier):
    """Brings one group whose digest and size are known: from another process, or from the peer for all of them."""

    def __init__(self, link: PeerConnection, store: SharedGroupStore) -> None:
        self._loop = asyncio.get_running_loop()
        self.from_host = False
        """Whether the last bytes came from another process."""
        self._link, self._store = link, store
        self._transfer: GroupTransfer | None = None
        self._task: asyncio.Task[None] | None = None
        """Waits for what another process does."""
        self._claim: GroupClaim | None = None
        self._arriving: NeighbourGroup | None = None
        self._sign = (0, 0)
        """Last sign of life of what another process writes: bytes, time of the file."""
        self._sign_s = 0.0
        self._pauses = Backoff(_PAUSE_S, _MOST_PAUSE_S)

    def carry(self, transfer: GroupTransfer) -> None:
        """See `Carrier.carry`: claim the group, or see who has."""
        self._transfer, request = transfer, transfer.request
        try:
            found = self._store.claim_now(request.digest or "", request.limit)
        except BlockingIOError:
            self._task = self._loop.create_task(self._follow(transfer))
        else:
            self._begin(transfer, found)
            if self._arriving is not None and not transfer.over:
                self._task = self._loop.create_task(self._follow(transfer))

    def reprioritise(self, transfer: GroupTransfer) -> None:
        """See `Carrier.reprioritise`; what another process brings has the priority that it has there."""

    def drop(self, transfer: GroupTransfer) -> None:
        """See `Carrier.drop`."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        arriving = self._arriving
        if arriving is not None:
            if not transfer.complete and self._loop.time() - self._sign_s > self._patience_s(transfer) / 2:
                self._store.folder.distrust(arriving)  # a player that asks again must not wait for it again
            arriving.close()

    def share(self, data: memoryview) -> None:
        """Let other processes have everything that has come."""
        if (claim := self._claim) is not None and not claim.write(data[claim.written :]):
            self.give_up()

    def vouch(self) -> None:
        """Tell other processes that it waits for its turn."""
        if self._claim is not None:
            self._claim.vouch()

    async def settle(self, *, good: bool) -> bool:
        """End the claim on what is complete and was checked; return whether the group is in the shared store."""
        claim, self._claim = self._claim, None
        if claim is not None:
            if good:
                return await self._store.publish(claim)
            self._store.drop(claim)
        elif self._arriving is not None and self._transfer is not None:
            if good:
                return True
            self._store.folder.distrust(self._arriving)
            await self._store.delete(self._transfer.request.digest or "")
        return False

    def give_up(self) -> None:
        """Give up the claim, if there is one: another process may try."""
        claim, self._claim = self._claim, None
        if claim is not None:
            self._store.drop(claim)

    # -------------------------------------------------------------- internals

    async def _follow(self, transfer: GroupTransfer) -> None:
        """Take what another process brings, as long as one does."""
        try:
            while transfer.source is self and not transfer.over:
                if self._arriving is not None:
                    await self._look(transfer, self._arriving)
                else:
                    request, wait_s = transfer.request, self._patience_s(transfer)
                    self._begin(transfer, await self._store.claim(request.digest or "", request.limit, wait_s))
        except Exception as error:  # noqa: BLE001  # the store's, whatever it is: it is for the readers
            transfer.reject(error)

    def _begin(self, transfer: GroupTransfer, found: GroupClaim | NeighbourGroup | None) -> None:
        """Have the peer send it, or look at what another process does."""
        if transfer.over:
            if isinstance(found, GroupClaim):
                self._store.drop(found)
            elif found is not None:
                found.close()
        elif isinstance(found, NeighbourGroup):
            self._arriving, self.from_host = found, True
            self._sign, self._sign_s = (0, 0), self._loop.time()
            self._pauses.reset()
            if (count := self._seen(found)) > len(transfer.data):
                self._show(transfer, found, count, kept=True)
        else:
            self._claim, self.from_host = found, False
            transfer.restart(self._link)

    async def _look(self, transfer: GroupTransfer, arriving: NeighbourGroup) -> None:
        """Wait a moment for further bytes of another process, or for no more of them."""
        count = self._seen(arriving)
        if count > len(transfer.data):
            self._show(transfer, arriving, count)
            return
        silent_s = self._loop.time() - self._sign_s
        left = arriving.is_left() and self._seen(arriving) < transfer.request.limit
        if not left and count >= 0 and silent_s <= self._patience_s(transfer):
            await asyncio.sleep(self._pauses.longer())
            return
        if not left:
            self._store.folder.distrust(arriving)
        arriving.close()
        self._arriving = None

    def _patience_s(self, transfer: GroupTransfer) -> float:
        rtt_s = self._link.stats().rtt_s or 0.0
        left_s = min((reader.time_left_s for reader in transfer.readers), default=0.0)
        return max(STILL_S, STILL_RTTS * rtt_s, STILL_SHARE * left_s)

    def _seen(self, arriving: NeighbourGroup) -> int:
        """Return how many bytes are there, and note signs of life."""
        sign = arriving.look()
        if sign != self._sign:
            self._sign, self._sign_s = sign, self._loop.time()
            self._pauses.reset()
        return sign[0]

    def _show(self, transfer: GroupTransfer, arriving: NeighbourGroup, count: int, *, kept: bool = False) -> None:
        try:
            data = arriving.data(count)
        except OSError:  # no memory for the mapping, or it is damaged: as if it stood still
            self._sign_s = 0.0
        else:
            transfer.show(data, "kept" if kept else "network")
