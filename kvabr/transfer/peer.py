"""A peer (an origin, a relay or an object store) on one or several connections, which are dialled when needed.

Several connections, called lanes, help if one connection or core cannot fill the path. Plays see one source and one
link: a request uses the lane with the fewest bytes left. Another lane is opened while enough bytes are wanted, and
stays only if the total rate then clearly rises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

from kvabr.transfer.interface import CLOSED, ConnectionStats, PeerConnection, PrefixFinder, cancel_all
from kvabr.transfer.lane import Dialler, PeerLane
from kvabr.transfer.transfer import GroupTransfer
from kvabr.types.errors import ConnectionLostError, NoAnswerError, RequestError, TransportError, UnauthorizedError

_WAITS_BYTES = 1 << 20
"""Wanted bytes per lane for a meaningful measurement."""
_MEASURED_S, _MEASURED_BYTES = 0.05, 4 << 20
"""Least time and bytes of a measurement."""
_MIN_GAIN_FACTOR = 1.1
"""Factor by which another lane must raise the rate."""
_AGAIN_S = 60.0
"""Seconds until a useless lane is tried again."""
_PATIENCE_S = 30.0
"""Seconds for which a lost peer is dialled while requests wait."""


def _of_connection(name: str, unconnected: str | None) -> Any:
    return property(lambda peer: getattr(peer._connection, name, unconnected))  # noqa: SLF001


class Peer(PeerConnection):
    """Fetches from one peer, in one event loop. Its context manager connects."""

    backend: str = _of_connection("backend", "none")
    protocol: str = _of_connection("protocol", "none")
    finder: PrefixFinder | None = _of_connection("finder", None)

    def __init__(self, dialler: Dialler, *, needed: bool = True, patience_s: float = _PATIENCE_S) -> None:
        """Prepare to dial, by the first request or `connected`.

        Requests fail if the first dial does, unless not ``needed``, and after ``patience_s`` of redialling a lost peer.
        """
        self.first_dialled: Callable[[BaseException | None], None] = lambda _: None
        """Called after each reported dial of the first lane (see `PeerLane`)."""
        self._dialler, self._needed, self._patience_s = dialler, needed, patience_s
        self._over = False
        self._lanes = [self._lane(self._dialled)]
        self.used = 1
        self._opening: asyncio.Task[None] | None = None
        self._before = 0.0
        """Rate with one lane fewer, bytes per second; 0.0 with one lane."""
        self._since: tuple[float, int] | None = None
        """Start of the current measurement, and bytes by then."""
        self._again_s = 0.0

    def _lane(self, dialled: Callable[[BaseException | None], None] = lambda _: None) -> PeerLane:
        return PeerLane(
            self._dialler,
            patience_s=self._patience_s,
            persistent=not self._needed,
            released=self._measure,
            dialled=dialled,
        )

    def _dialled(self, error: BaseException | None) -> None:
        self.first_dialled(error)

    async def __aenter__(self) -> Self:
        try:
            await self.connected()
        except BaseException as error:
            away = isinstance(error, NoAnswerError | ConnectionLostError | RequestError)
            if self._needed or not away or isinstance(error, UnauthorizedError):
                await self.close()
                raise
        return self

    # ------------------------------------------------------------------ Connection

    @property
    def _connection(self) -> PeerConnection | None:
        return self._lanes[0].connection

    @property
    def names(self) -> Sequence[str]:
        connection = self._connection
        return self._dialler.names if connection is None else super().names

    @property
    def peer(self) -> str | None:  # type: ignore[override]
        connection = self._connection
        return self._dialler.names[0] if connection is None else connection.peer or self._dialler.names[0]

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether this was closed, or the last dial failed without any earlier connection."""
        first = self._lanes[0]
        return self._over or (self._needed and not self.reached and first.unreachable and not first.dialling)

    @property
    def reached(self) -> bool:  # type: ignore[override]
        """`Connection.reached` of the first lane."""
        return self._connection is not None

    @property
    def trouble(self) -> str | None:  # type: ignore[override]
        return self._lanes[0].trouble

    @property
    def unreachable(self) -> bool:  # type: ignore[override]
        return all(lane.unreachable for lane in self._lanes)

    @property
    def announced_rate(self) -> float:  # type: ignore[override]
        """The best `Connection.announced_rate` of all lanes."""
        every = (lane.connection.announced_rate for lane in self._lanes if lane.connection is not None)
        return max(every, default=0.0)

    @property
    def dials(self) -> int:
        """Number of reconnections."""
        return sum(lane.dials for lane in self._lanes)

    async def connected(self) -> None:
        await self._lanes[0].connected()

    async def renew(self) -> None:
        for lane in self._lanes:
            await lane.renew()

    async def answers(self, within_s: float) -> bool:
        return self._connection is not None and await self._connection.answers(within_s)

    def stats(self) -> ConnectionStats:
        every = [lane.connection.stats() for lane in self._lanes if lane.connection is not None]
        if not every:
            return ConnectionStats()
        return ConnectionStats(every[0].rtt_s, self._received())

    async def close(self) -> None:
        self._over = True
        if self._opening is not None:
            await cancel_all([self._opening])
        for lane in self._lanes:
            await lane.close()

    # ------------------------------------------------------------------ Carrier

    def carry(self, transfer: GroupTransfer) -> None:
        if self._over:
            transfer.fail(ConnectionLostError(CLOSED))
            return
        lane = self._lanes[0]
        if self.used > 1 and not transfer.request.live:  # live transfers share one lane: one subscription per track
            # A lane in trouble redials; until then it gets no new requests.
            lane = min(self._lanes[: self.used], key=lambda lane: (lane.trouble is not None, lane.left_bytes))
        lane.carry(transfer)
        self._measure()

    # ------------------------------------------------------------------ lanes

    def _received(self) -> int:
        return sum(lane.bytes_received for lane in self._lanes)

    def _measure(self) -> None:
        if self._over or self._dialler.most_lanes < 2:
            return
        waiting = sum(lane.left_bytes for lane in self._lanes)
        if waiting < self.used * _WAITS_BYTES or self._opening is not None:  # opening may take a while
            self._since = None
            return
        now, received = asyncio.get_running_loop().time(), self._received()
        if self._since is None:
            self._since = now, received
            return
        seconds, gained = now - self._since[0], received - self._since[1]
        if seconds < _MEASURED_S or gained < _MEASURED_BYTES or now < self._again_s:
            return
        rate, self._since = gained / seconds, None
        if rate < _MIN_GAIN_FACTOR * self._before:
            self.used -= 1  # the path or this machine is saturated
            self._before, self._again_s = 0.0, now + _AGAIN_S
        elif self.used < self._dialler.most_lanes:
            self._before = rate
            self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        try:
            if self.used == len(self._lanes):
                lane = self._lane()
                try:
                    await lane.connected()
                except BaseException:
                    await lane.close()  # its dial would continue
                    raise
                self._lanes.append(lane)
            self.used, self._since = self.used + 1, None
        except TransportError:  # the peer allows no more connections
            self._before, self._again_s = 0.0, asyncio.get_running_loop().time() + _AGAIN_S
        finally:
            self._opening = None
