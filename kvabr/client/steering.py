"""Content steering: a client's origins tell it of further sources, which its plays have as well.

A publisher does not choose what is reached from here: it is followed to origins and relays alone, and to addresses that
are no nearer to this machine than its own. It is shown the client's token over TLS only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Any

from kvabr.client.lookup import Found, fetch_view
from kvabr.client.peers import Answered, ClientPeer, joined
from kvabr.client.play_connection import PlayConnection, PlaySources
from kvabr.link.moqt.connect import parse_url
from kvabr.link.moqt.names import addresses_of
from kvabr.transfer.interface import Connection
from kvabr.types.errors import FormatError, NotFoundError, TransportError, UsageError
from kvabr.types.naming import MODELS_NAMESPACE, STEERING_TRACK
from kvabr.types.steering import MAX_STEERING_BYTES, STEERING_TTL_S, SteeringManifest

_SCHEME = "moqt://"
"""A publisher does not choose which stores are read with the credentials of this machine."""
_ASK_S = 2.0
"""Most seconds for an answer."""
_AGAIN_S = 60.0
"""Seconds after which an origin is asked again that did not answer."""
_BESIDE_S = 0.02
"""Seconds that a play waits for what its origins tell of, once its lookup is over; they were asked with it."""
_MOST_PEERS = 64
"""Sources of all origins that a client knows at a time; those that no origin tells of any more make room."""


class Steering:
    """The sources that the origins of one client tell of."""

    def __init__(self, peer: Callable[[str], ClientPeer]) -> None:
        """``peer`` makes a peer of a URL, or raises `UsageError`; it ends when nobody tells of it any more."""
        self._peer = peer
        self._until_s: dict[ClientPeer, float] = {}
        """When each origin is asked again, on the event loop's clock."""
        self._told: dict[ClientPeer, tuple[ClientPeer, ...]] = {}
        self._known: dict[str, ClientPeer] = {}
        """Peers of its own: what the client was given keeps its price, and stays."""

    def peers(self, origins: Sequence[ClientPeer]) -> Sequence[ClientPeer]:
        """Return origins, and behind them what they have told of."""
        told = (other for origin in origins for other in self._told.get(origin, ()))
        return tuple(dict.fromkeys((*origins, *told)))

    def beside(self, connection: PlaySources, origins: Sequence[ClientPeer]) -> JoiningSources | None:
        """Begin to ask the origins of a play, beside its lookup; None if no source may join it."""
        return JoiningSources(self, connection, origins) if connection.grows else None

    async def ask(self, origins: Sequence[ClientPeer]) -> None:
        """Ask those of some origins that are connected, unless their last answer is still good; never raises."""
        now = asyncio.get_running_loop().time()
        due = [one for one in origins if one.transfers.reached and now >= self._until_s.get(one, -math.inf)]
        for origin in due:
            self._until_s[origin] = now + _AGAIN_S
        await asyncio.gather(*(self._ask(origin, origins) for origin in due))

    async def _ask(self, origin: ClientPeer, origins: Sequence[ClientPeer]) -> None:
        ttl_s, urls = STEERING_TTL_S, tuple[str, ...]()
        try:
            async with (
                asyncio.timeout(_ASK_S),
                PlayConnection(origin.transfers, lambda _, priority: priority) as connection,
            ):
                data = await fetch_view(connection, MODELS_NAMESPACE, STEERING_TRACK, MAX_STEERING_BYTES)
            manifest = SteeringManifest.loads(bytes(data))
            ttl_s, urls = manifest.ttl_s, manifest.sources
        except NotFoundError:
            pass
        except (TransportError, FormatError, TimeoutError):
            return  # what it told before is still the best that is known
        self._until_s[origin] = asyncio.get_running_loop().time() + ttl_s
        near = min(await _nearness(origin.name), default=0)  # its names are its own: one of them may be near
        allowed = [
            url
            for url in dict.fromkeys(urls)
            if url.startswith(_SCHEME) and max(await _nearness(url), default=math.inf) <= near
        ]
        given = {one.name for one in origins}
        found = [self._known_as(url) for url in allowed if url not in given]
        self._told[origin] = tuple(peer for peer in found if peer is not None)
        for peer in self._told[origin]:
            peer.price_per_gb = origin.price_per_gb
        await self._make_room()

    def _known_as(self, url: str) -> ClientPeer | None:
        if url not in self._known and len(self._known) < _MOST_PEERS:
            with suppress(UsageError):
                self._known[url] = self._peer(url)
        return self._known.get(url)

    async def _make_room(self) -> None:
        told = {peer for peers in self._told.values() for peer in peers}
        for url, peer in list(self._known.items()):
            if peer not in told:
                del self._known[url]
                await peer.close()

    async def close(self) -> None:
        """End all peers."""
        while self._known:
            await self._known.popitem()[1].close()


class JoiningSources:
    """The sources that join a play under way, as its origins tell of them."""

    def __init__(self, steering: Steering, connection: PlaySources, origins: Sequence[ClientPeer]) -> None:
        self._steering, self._connection, self._origins = steering, connection, origins
        self._asking = connection.meanwhile(self._ask())

    async def _ask(self) -> None:
        await asyncio.gather(*(one.transfers.connected() for one in self._origins), return_exceptions=True)
        await self._steering.ask(self._origins)

    async def join(
        self,
        some: Sequence[ClientPeer],
        found: Found,
        lookup: Callable[[ClientPeer, Connection], Coroutine[Any, Any, Answered]],
    ) -> None:
        """Have those join that are not among the play's sources yet, once they say that they have what was found."""
        if found.live is not None:
            return
        await asyncio.wait({self._asking}, timeout=_BESIDE_S)
        for one in self._steering.peers(self._origins):
            if one not in some:
                source = self._connection.join(one.transfers)
                joined(self._connection, source, lookup(one, self._connection.sources[source]), found)


async def _nearness(url: str) -> list[int]:
    """Return how near to this machine each address of a host is: 0 public, 1 private, 2 this machine or its link."""
    try:
        host, port, _ = parse_url(url)
        async with asyncio.timeout(_ASK_S):
            addresses = await addresses_of(host, port)
    except (OSError, TimeoutError, UsageError):  # an open connection has no name
        return []
    return [_near(str(where[0])) for _, where in addresses]


def _near(address: str) -> int:
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback or found.is_link_local or found.is_unspecified or found.is_multicast:
        return 2
    return 0 if found.is_global else 1
