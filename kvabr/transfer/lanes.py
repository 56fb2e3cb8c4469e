"""Several connections to one peer, for a path that carries more than one of them, or one core, does.

They are one source, and one link, to those that ask: a request goes out on the lane with the least to bring. Another
lane is opened while enough waits, and stays in use only if all together then bring clearly more than before. So a slow
or busy path is not pressed by more connections than it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvabr.transfer.interface import ConnectionStats, PeerConnection
from kvabr.transfer.transfer import GroupTransfer
from kvabr.transfer.work import cancel_all
from kvabr.types.errors import ConnectionLostError, TransportError

_WAITS_BYTES = 1 << 20
"""Bytes per lane that must be on their way for a rate to say what lanes bring."""
_MEASURED_S, _MEASURED_BYTES = 0.05, 4 << 20
"""Least time and bytes of such a rate."""
_MORE = 1.1
"""What another lane must bring, as a multiple of the rate without it."""
_AGAIN_S = 60.0
"""Seconds after which one that brought nothing is tried again."""


class LanesConnection(PeerConnection):
    """Fetches on several connections to one peer."""

    def __init__(self, first: PeerConnection, dial: Callable[[], Awaitable[PeerConnection]], most: int) -> None:
        """Take over the first connection; ``dial`` makes another to the same peer, up to ``most`` in all."""
        self._lanes, self._dial, self._most = [first], dial, most
        self.used = 1
        """The lanes that are in use: the first ones."""
        self._on: dict[GroupTransfer, PeerConnection] = {}
        self._opening: asyncio.Task[None] | None = None
        self._before = 0.0
        """Rate with a lane less, bytes per second; 0.0 with one lane."""
        self._since: tuple[float, int] | None = None
        """When the rate that is being measured began, and what had come by then."""
        self._again_s = 0.0
        self.closed = False

    @property
    def peer(self) -> str | None:  # type: ignore[override]
        """See `Connection.peer`."""
        return self._lanes[0].peer

    @property
    def backend(self) -> str:  # type: ignore[override]
        """See `Connection.backend`."""
        return self._lanes[0].backend

    @property
    def protocol(self) -> str:  # type: ignore[override]
        """See `Connection.protocol`."""
        return self._lanes[0].protocol

    @property
    def trouble(self) -> str | None:  # type: ignore[override]
        """See `Connection.trouble`: of the first lane."""
        return self._lanes[0].trouble

    @property
    def unreachable(self) -> bool:  # type: ignore[override]
        """See `Connection.unreachable`."""
        return all(lane.unreachable for lane in self._lanes)

    def carry(self, transfer: GroupTransfer) -> None:
        """See `Carrier.carry`."""
        if self.closed:
            transfer.fail(ConnectionLostError("this side closed the connection"))
            return
        left = dict.fromkeys(self._lanes[: self.used], 0)
        for one, lane in self._on.items():
            if lane in left and not one.request.live:
                left[lane] += one.request.limit - one.received
        # A lane in trouble dials again; until then it keeps what it has, and gets nothing more.
        lane = min(left, key=lambda lane: (lane.trouble is not None, left[lane]))
        if transfer.request.live:  # all on one, so that each track has one subscription
            lane = self._lanes[0]
        self._on[transfer] = lane
        lane.carry(transfer)
        self._measure(sum(left.values()))

    def reprioritise(self, transfer: GroupTransfer) -> None:
        """See `Carrier.reprioritise`."""
        if (lane := self._on.get(transfer)) is not None:
            lane.reprioritise(transfer)

    def drop(self, transfer: GroupTransfer) -> None:
        """See `Carrier.drop`."""
        if (lane := self._on.get(transfer)) is not None:
            lane.drop(transfer)

    def answered(self, transfer: GroupTransfer) -> None:
        """See `Carrier.answered`."""
        if (lane := self._on.get(transfer)) is not None:
            lane.answered(transfer)

    def explain(self, transfer: GroupTransfer, error: Exception) -> Exception:
        """See `Carrier.explain`."""
        lane = self._on.get(transfer)
        return error if lane is None else lane.explain(transfer, error)

    def released(self, transfer: GroupTransfer) -> None:
        """See `Carrier.released`."""
        if (lane := self._on.pop(transfer, None)) is not None:
            lane.released(transfer)
            self._measure(sum(one.request.limit - one.received for one in self._on if not one.request.live))

    def relieve(self) -> None:
        """See `Connection.relieve`."""
        for lane in self._lanes:
            lane.relieve()

    async def renew(self) -> None:
        """See `Connection.renew`."""
        for lane in self._lanes:
            await lane.renew()

    async def answers(self, within_s: float) -> bool:
        """See `Connection.answers`; of the first lane."""
        return await self._lanes[0].answers(within_s)

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`; of the first lane, with the bytes of all."""
        every = [lane.stats() for lane in self._lanes]
        rates = [one.rate for one in every if one.rate is not None]
        lost = [one.lost_packets for one in every if one.lost_packets is not None]
        received = sum(one.bytes_received for one in every)
        return ConnectionStats(
            every[0].rtt_s, received, sum(lost) if lost else None, sum(rates) if rates else None, self.used
        )

    async def close(self) -> None:
        """See `Connection.close`."""
        self.closed = True
        if self._opening is not None:
            await cancel_all([self._opening])
        for lane in self._lanes:
            await lane.close()

    # -------------------------------------------------------------- internals

    def _measure(self, waiting: int) -> None:
        """Judge the lanes by what they have brought while ``waiting`` bytes were on their way all the time."""
        if waiting < self.used * _WAITS_BYTES or self._opening is not None:  # that may take a while
            self._since = None
            return
        now = asyncio.get_running_loop().time()
        received = sum(lane.stats().bytes_received for lane in self._lanes)
        if self._since is None:
            self._since = now, received
            return
        seconds, came = now - self._since[0], received - self._since[1]
        if seconds < _MEASURED_S or came < _MEASURED_BYTES or now < self._again_s:
            return
        rate, self._since = came / seconds, None
        if rate < _MORE * self._before:
            self.used -= 1  # the path, or this machine, carries no more
            self._before, self._again_s = 0.0, now + _AGAIN_S
        elif self.used < self._most:
            self._before = rate
            self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        try:
            if self.used == len(self._lanes):
                self._lanes.append(await self._dial())
            self.used, self._since = self.used + 1, None
        except TransportError:  # as many connections as the peer allows
            self._before, self._again_s = 0.0, asyncio.get_running_loop().time() + _AGAIN_S
        finally:
            self._opening = None
