"""A download that all processes of a host share: one gets it from the peer, the others read what it writes.

Which process does is decided by a claim in shared memory (`kvabr.store.shared_folder`). The others see the bytes come
as if they came from the peer, so a player judges them as it judges any download, and abandons what is too slow. If the
process that has the claim dies, the next one begins anew; if it stands still, another tries, and in the end each for
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvabr.quic.interface import Connection, Download, DownloadStats, GroupRequest
from kvabr.store.shared_claims import GroupClaim, NeighbourGroup
from kvabr.store.shared_groups import SharedGroupStore
from kvabr.types.errors import RequestError

STILL_S, STILL_RTTS, STILL_SHARE = 0.25, 4.0, 0.05
"""A download of another process stands still if nothing of it came for this many seconds and round trips, and for this
share of the time that its most urgent reader has left."""
_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.02
"""Between two looks at it; doubled while nothing comes."""


class HostDownload(Download):
    """One group whose digest and size are known."""

    def __init__(
        self,
        connection: Connection,
        store: SharedGroupStore,
        request: GroupRequest,
        priority: int,
        time_left: Callable[[], float],
    ) -> None:
        """Claim it, and ask the peer if that takes no time; else `read` does.

        ``time_left`` returns the seconds that the most urgent reader has left.
        """
        self._loop = asyncio.get_running_loop()
        self.stats = DownloadStats(self._loop.time())
        self.from_host = False
        """Whether its last bytes came from another process."""
        self._connection, self._store, self._request, self._priority = connection, store, request, priority
        self._time_left = time_left
        self._digest = request.digest or ""
        self._inner: Download | None = None
        self._claim: GroupClaim | None = None
        self._arriving: NeighbourGroup | None = None
        self._given = 0
        """Bytes that `read` has returned."""
        self._view = memoryview(b"")
        self._sign = (0, 0)
        """Last sign of life of what another process writes: bytes, time of the file."""
        self._sign_s = 0.0
        self._pause_s = _PAUSE_S
        self._cancelled = False
        with suppress(BlockingIOError):
            self._begin(store.claim_now(self._digest, request.limit))

    @property
    def data(self) -> memoryview:
        """See `Download.data`."""
        return self._view if self._inner is None else self._inner.data

    @property
    def complete(self) -> bool:
        """Whether all of it is here, unchecked."""
        return self._given >= self._request.limit

    async def read(self) -> memoryview:
        """See `Download.read`."""
        while not self._cancelled and not self.complete:
            if self._inner is not None:
                part = await self._inner.read()
                if not part:
                    return part
                self._share(part)
            elif self._arriving is not None:
                await self._look(self._arriving)
            else:
                self._begin(await self._store.claim(self._digest, self._request.limit, self._patience_s()))
            if len(self.data) > self._given:
                fresh = self.data[self._given :]
                self._given += len(fresh)
                return fresh
        if self._cancelled:
            raise RequestError(f"{self._request}: cancelled")
        return memoryview(b"")

    def has_digest(self, digest: str) -> bool:
        """See `Download.has_digest`."""
        return super().has_digest(digest) if self._inner is None else self._inner.has_digest(digest)

    def prioritise(self, priority: int) -> None:
        """See `Download.prioritise`; what another process downloads has the priority that it has there."""
        self._priority = priority
        if self._inner is not None:
            self._inner.prioritise(priority)

    def vouch(self) -> None:
        """Tell other processes that it waits for its turn."""
        if self._claim is not None:
            self._claim.vouch()

    def cancel(self) -> None:
        """See `Download.cancel`. The claim on what is complete stays, until `settle`."""
        self._cancelled = True
        if self._inner is not None:
            self._inner.cancel()
        if self._arriving is not None:
            if not self.complete and self._loop.time() - self._sign_s > self._patience_s() / 2:
                self._store.folder.distrust(self._arriving)  # a player that asks again must not wait for it again
            self._arriving.close()
        if not self.complete:
            self.drop()

    async def settle(self, *, good: bool) -> bool:
        """End the claim on what is complete and was checked; return whether the group is in the shared store."""
        claim, self._claim = self._claim, None
        if claim is not None:
            if good:
                return await self._store.publish(claim)
            self._store.drop(claim)
        elif self._arriving is not None:
            if good:
                return True
            self._store.folder.distrust(self._arriving)
            await self._store.delete(self._digest)
        return False

    def drop(self) -> None:
        """Give up the claim, if there is one: another process may try."""
        claim, self._claim = self._claim, None
        if claim is not None:
            self._store.drop(claim)

    # -------------------------------------------------------------- internals

    def _begin(self, found: GroupClaim | NeighbourGroup | None) -> None:
        """Download, or look at what another process does."""
        if self._cancelled:
            if isinstance(found, GroupClaim):
                self._store.drop(found)
            elif found is not None:
                found.close()
        elif isinstance(found, NeighbourGroup):
            self._arriving, self.from_host = found, True
            self._sign, self._sign_s, self._pause_s = (0, 0), self._loop.time(), _PAUSE_S
            count = self._seen(found)
            self.stats.limit = "kept"
            if count > self._given:
                self._show(found, count)
        else:
            self._claim, self.from_host = found, False
            self._inner = self._connection.request(self._request, self._priority)
            self.stats = self._inner.stats

    async def _look(self, arriving: NeighbourGroup) -> None:
        """Wait a moment for further bytes of another process, or for no more of them."""
        count = self._seen(arriving)
        if count > self._given:
            self.stats.limit = "network"
            self._show(arriving, count)
            return
        silent_s = self._loop.time() - self._sign_s
        left = arriving.is_left() and self._seen(arriving) < self._request.limit
        if not left and count >= 0 and silent_s <= self._patience_s():
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
            return
        if not left:
            self._store.folder.distrust(arriving)
        arriving.close()
        if self._arriving is arriving:
            self._arriving, self._view = None, memoryview(b"")

    def _patience_s(self) -> float:
        rtt_s = self._connection.stats().rtt_s or 0.0
        return max(STILL_S, STILL_RTTS * rtt_s, STILL_SHARE * self._time_left())

    def _seen(self, arriving: NeighbourGroup) -> int:
        """Return how many bytes are there, and note signs of life."""
        sign = arriving.look()
        if sign != self._sign:
            self._sign, self._sign_s, self._pause_s = sign, self._loop.time(), _PAUSE_S
        return sign[0]

    def _show(self, arriving: NeighbourGroup, count: int) -> None:
        try:
            self._view = arriving.data(count)
        except OSError:  # no memory for the mapping, or it is damaged: as if it stood still
            self._sign_s = 0.0

    def _share(self, part: memoryview) -> None:
        """Let other processes have what has come."""
        if self._claim is not None and not self._claim.write(part):
            self.drop()
