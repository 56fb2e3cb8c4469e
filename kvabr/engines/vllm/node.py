"""The fetcher that both halves of the connector share where they live in one process, and how it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvabr.client.async_client import AsyncClient
from kvabr.client.blocking import Client, Handle
from kvabr.client.lookup import Found
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.result import PlayedPrefix
from kvabr.engines.vllm.config import VllmSettings
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ForeignError, PlayError, TransportError
from kvabr.types.kv import DTYPES, KVSpec

_PLAYS, _WAITING = 64, 1024
"""Plays at a time, and such as wait: an engine bounds its requests itself."""
_HUNG_S, _HUNG_DEADLINES = 5.0, 2.0
"""Seconds, and deadlines, after which a play that has not ended by itself is ended: no request waits for ever."""


class Node:
    """Lookups and plays of one engine, begun from its threads; a fetcher's event loop does the work."""

    def __init__(self, settings: VllmSettings) -> None:
        """Start the loop, and dial: the first request shall find a connection, not a library to load.

        Raises:
            UsageError: the URL or an option of the connection makes no sense.
        """
        self._settings = settings
        limits = Limits(memory_bytes=settings.store_mib << 20, plays=_PLAYS, waiting=_WAITING)
        self.client = Client(str(settings.url), **_dial_options(settings), limits=limits, cache=settings.cache)
        self._dtype: str | None = None
        """Element type that the origin's assets of our model say, once one was seen."""
        self._dialled = self.client.begin(self._dial)

    def look_up(
        self, tokens: Sequence[int], specs: Sequence[KVSpec], salt: bytes, within_s: float
    ) -> Handle[Found | None]:
        """Begin to ask what the origin has of a prompt; what the handle's result raises is said below.

        Args:
            tokens: ids of the prompt.
            specs: of the caches that would do; the first of which there is one is taken.
            salt: the tenant's secret.
            within_s: seconds that it may take.

        Raises:
            TransportError, TimeoutError: the origin cannot be asked, or not in time.
            ForeignError: it has a cache of another model, or shape.
            FormatError: what it has is no catalog.
        """
        return self.client.begin(lambda client: self._look_up(client, tokens, specs, salt, within_s))

    def play(
        self,
        found: Found,
        options: PlayOptions,
        *,
        deadline_s: float,
        cost: PrefillCost,
        skip: int,
        behind: int,
    ) -> Handle[PlayedPrefix]:
        """Begin a play; see `AsyncClient.play_prefix`."""
        return self.client.begin(lambda client: self._play(client, found, options, deadline_s, cost, skip, behind))

    def play_mine(
        self,
        spec: KVSpec,
        tokens: Sequence[int],
        options: PlayOptions,
        *,
        deadline_s: float,
        cost: PrefillCost,
        skip: int,
        behind: int,
    ) -> Handle[PlayedPrefix]:
        """As `play`, of what must first be found: another rank was told of its own heads alone."""
        return self.client.begin(
            lambda client: self._play_mine(client, spec, tokens, options, deadline_s, cost, skip, behind)
        )

    def close(self) -> None:
        """End all of it."""
        self.client.close()

    async def _dial(self, client: AsyncClient) -> None:
        with contextlib.suppress(TransportError):  # the first lookup dials again, and says what is wrong
            await client.connect()

    async def _look_up(
        self, client: AsyncClient, tokens: Sequence[int], specs: Sequence[KVSpec], salt: bytes, within_s: float
    ) -> Found | None:
        async with asyncio.timeout(within_s):
            for spec in specs:
                if (found := await self._find(client, tokens, spec, salt)) is not None:
                    return found
        return None

    async def _find(self, client: AsyncClient, tokens: Sequence[int], spec: KVSpec, salt: bytes) -> Found | None:
        first = self._dtype or spec.dtype
        try:
            return await client.find(tokens, model=replace(spec, dtype=first), salt=salt)
        except ForeignError:
            # The publisher's element type is part of what names a cache, and no obstacle: frames are decoded to
            # whatever the engine has.
            for dtype in (name for name in DTYPES if name != first):
                try:
                    found = await client.find(tokens, model=replace(spec, dtype=dtype), salt=salt)
                except ForeignError:
                    continue
                self._dtype = dtype
                return found
            raise

    async def _play_mine(
        self,
        client: AsyncClient,
        spec: KVSpec,
        tokens: Sequence[int],
        options: PlayOptions,
        deadline_s: float,
        cost: PrefillCost,
        skip: int,
        behind: int,
    ) -> PlayedPrefix:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        found = await self._look_up(client, tokens, [spec], options.salt, deadline_s / 2)
        if found is None or found.catalog.groups <= skip:
            raise PlayError(f"another rank's heads are published, those of {spec.model} are not")
        left_s = max(1e-3, deadline_s - (loop.time() - began_s))
        return await self._play(client, found, options, left_s, cost, skip, behind)

    async def _play(
        self,
        client: AsyncClient,
        found: Found,
        options: PlayOptions,
        deadline_s: float,
        cost: PrefillCost,
        skip: int,
        behind: int,
    ) -> PlayedPrefix:
        async with asyncio.timeout(_HUNG_S + _HUNG_DEADLINES * deadline_s):
            return await client.play_prefix(
                found, deadline=deadline_s, cost=cost, skip=skip, behind=behind, options=options
            )


def _dial_options(settings: VllmSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("token", "ca", "fingerprint", "insecure", "quic")}


_nodes: dict[Any, tuple[Node, int]] = {}
_lock = threading.Lock()


def take_node(settings: VllmSettings) -> Node:
    """The node for these options, one per process however often it is taken; `leave_node` when done."""
    with _lock:
        # A second engine that wants a store of another size gets a node of its own, not the first one's store.
        key = (
            settings.url,
            settings.store_mib,
            settings.cache,
            *sorted((name, str(value)) for name, value in _dial_options(settings).items()),
        )
        node, users = _nodes.get(key, (None, 0))
        if node is None:
            node = Node(settings)
        _nodes[key] = (node, users + 1)
        return node


def leave_node(node: Node) -> None:
    """The last to leave closes it."""
    with _lock:
        for key, (kept, users) in list(_nodes.items()):
            if kept is node:
                if users > 1:
                    _nodes[key] = (node, users - 1)
                    return
                del _nodes[key]
    node.close()
