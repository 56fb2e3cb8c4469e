"""Content steering: a client's origins tell it of further sources, which its next plays have as well."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvabr.client.lookup import fetch_view
from kvabr.client.peers import ClientPeer
from kvabr.client.play_connection import PlayConnection
from kvabr.types.errors import FormatError, NotFoundError, TransportError, UsageError
from kvabr.types.naming import MODELS_NAMESPACE, STEERING_TRACK
from kvabr.types.steering import MAX_STEERING_BYTES, STEERING_TTL_S, SteeringManifest

_SCHEME = "moqt://"
"""A publisher does not choose which stores are read with the credentials of this machine."""
_ASK_S = 2.0
"""Most seconds for an answer."""
_AGAIN_S = 60.0
"""Seconds after which an origin is asked again that did not answer."""
_MOST_PEERS = 64
"""Sources of all origins that a client gets to know."""


class Steering:
    """The sources that the origins of one client tell of."""

    def __init__(self, peer: Callable[[str], ClientPeer]) -> None:
        """``peer`` makes a peer of a URL, or raises `UsageError`."""
        self._peer = peer
        self._until_s: dict[ClientPeer, float] = {}
        """When each origin is asked again, on the event loop's clock."""
        self._told: dict[ClientPeer, tuple[ClientPeer, ...]] = {}
        self._known: dict[str, ClientPeer] = {}

    def peers(self, origins: Sequence[ClientPeer]) -> Sequence[ClientPeer]:
        """Return origins, and behind them what they have told of."""
        told = (other for origin in origins for other in self._told.get(origin, ()))
        return tuple(dict.fromkeys((*origins, *told)))

    async def ask(self, origins: Sequence[ClientPeer]) -> None:
        """Ask those of some origins that are connected, unless their last answer is still good; never raises."""
        now = asyncio.get_running_loop().time()
        due = [one for one in origins if one.transfers.reached and now >= self._until_s.get(one, -math.inf)]
        for origin in due:
            self._until_s[origin] = now + _AGAIN_S
        await asyncio.gather(*(self._ask(origin) for origin in due))

    async def _ask(self, origin: ClientPeer) -> None:
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
        self._told[origin] = tuple(peer for url in urls if (peer := self._known_as(url)) is not None)

    def _known_as(self, url: str) -> ClientPeer | None:
        if url not in self._known and url.startswith(_SCHEME) and len(self._known) < _MOST_PEERS:
            with suppress(UsageError):
                self._known[url] = self._peer(url)
        return self._known.get(url)
