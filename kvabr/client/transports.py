"""Which transport is better to a peer, where that is left to kvabr: both are measured once, while nothing is played.

What a transport carries depends on the path, on its losses, and on both machines. So the same few groups, which a play
has just fetched, are fetched again over the connection that there is and over one by the other transport. The ratio
goes to the peer's history, and the connection is replaced if the other is clearly better.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kvabr.client.origins import Dialling
from kvabr.client.peers import ClientPeer
from kvabr.client.shared_bandwidth import PeerHistory
from kvabr.link.moqt.connect import CLEARLY, Connecting
from kvabr.transfer.interface import PeerConnection, read_view
from kvabr.transfer.transfer import GroupRequest
from kvabr.types.errors import TransportError

IDLE_S = 0.5
"""Seconds without a play after which a peer is measured."""
_MOST_S, _MOST_BYTES, _LEAST_BYTES = 0.25, 4 << 20, 1 << 20
"""Most that one of the fetches should take, by what is known; fewer bytes say nothing, and are soon there."""
_TIMES = 3
"""Fetches over each."""
_PATIENCE_S = 3.0
"""Most seconds for all of it."""
_AGAIN_S = 3600.0
"""Seconds after which a peer is measured again that could not be."""
_LEAST_URGENT = 255


class TransportComparison:
    """Compares the transports to the peers of one client."""

    def __init__(self, history: PeerHistory) -> None:
        """Begin with what ``history`` has; what is measured goes there."""
        self._history = history
        self._tried_s: dict[ClientPeer, float] = {}

    def due(self, peer: ClientPeer) -> bool:
        """Return whether a peer should be measured, which costs some bytes."""
        source, transfers = peer.transfers.source, peer.transfers
        if not isinstance(source, Connecting) or source.other is None or not transfers.reached:
            return False
        now = asyncio.get_running_loop().time()
        if transfers.connection.trouble is not None or now < self._tried_s.get(peer, -_AGAIN_S) + _AGAIN_S:
            return False
        here, there = source.name_of(source.other[0]), source.name_of(source.other[1])
        enough = sum(request.limit for request in self._wanted(peer, self._history.rate(here))) >= _LEAST_BYTES
        return enough and not self._history.rate(there)

    async def measure(self, peer: ClientPeer) -> None:
        """Measure both transports to a peer; raises nothing."""
        self._tried_s[peer] = asyncio.get_running_loop().time()
        source, here = peer.transfers.source, peer.transfers.connection
        assert isinstance(source, Connecting)  # noqa: S101  # as `due` says
        assert source.other is not None  # noqa: S101  # as above
        (used, other), rate = source.other, self._history.rate(source.name_of(source.other[0]))
        wanted = self._wanted(peer, rate)
        clock = asyncio.get_running_loop().time
        mine, others, cut_s = list[float](), list[float](), 0.0
        with suppress(TransportError):
            try:
                async with asyncio.timeout(_PATIENCE_S), await source.dial_over(other) as there:
                    for _ in range(_TIMES):
                        mine.append(await _seconds(here, wanted))
                        began_s = clock()
                        others.append(await _seconds(there, wanted))
            except TimeoutError:
                if not mine:
                    return
                cut_s = clock() - began_s if len(mine) > len(others) else 0.0  # the other takes longer than that
                if not others and cut_s < mine[0]:
                    return  # which does not say that it is slower
            # The first time, one has just been dialled; of the others the sooner, as something else may be in the way.
            ratio = min(mine[1:] or mine) / (min(others[1:]) if others[1:] else max([*others, cut_s]))
            self._history.heard(source.name_of(other), ratio * rate, here.stats().rtt_s or 0.0)
            await asyncio.get_running_loop().run_in_executor(None, self._history.save)
            if ratio > CLEARLY and peer.transfers.connection is here and source.other[0] == used:
                await here.renew()

    @staticmethod
    def _wanted(peer: ClientPeer, rate: float) -> Sequence[GroupRequest]:
        """Return what is fetched to measure: what came last, as much as takes no long time at a rate."""
        wanted, left = list[GroupRequest](), min(_MOST_BYTES, _MOST_S * rate)
        for request in reversed(peer.transfers.recent):
            if request.limit <= left:
                wanted.append(request)
                left -= request.limit
        return wanted


def measured(history: PeerHistory, source: Dialling | None) -> str:
    """Return what is known of the transports to a peer that ``source`` dials, in words; empty unless of two."""
    rates = [(name, history.rate(name)) for name in (() if source is None else source.peers)]
    known = [f"{name.partition(' ')[2] or 'quic'} {8e-6 * rate:.3g} Mbit/s" for name, rate in rates if rate > 0]
    return f" ({', '.join(known)})" if len(known) > 1 else ""


async def _seconds(connection: PeerConnection, wanted: Sequence[GroupRequest]) -> float:
    """Return the seconds in which a connection brings some groups, behind whatever else it brings."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    await asyncio.gather(*(read_view(connection.request(request, _LEAST_URGENT)) for request in wanted))
    return clock() - began_s
