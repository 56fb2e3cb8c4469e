"""What the two halves of the connector share: requests from the scheduler to the worker, lookups and plays, a client.

Where both halves live in one process, they share a client: one connection, one store of groups. Needs no vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvabr.client.async_client import AsyncClient
from kvabr.client.blocking import Client
from kvabr.client.lookup import Found
from kvabr.client.options import PlayOptions
from kvabr.client.result import PlayedPrefix
from kvabr.engines.settings import open_client
from kvabr.engines.vllm.config import VllmSettings
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import KvabrError, PlayError
from kvabr.types.kv import KVSpec

_HUNG_S, _HUNG_DEADLINES = 5.0, 2.0
"""Seconds plus deadlines after which a play that does not end is cancelled: no request may wait forever."""
_MIN_LEFT_S = 1e-3


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Play a cache into blocks."""

    request: str
    found: Found
    first: int
    """First token that is wanted; the engine has whole blocks before it."""
    last: int
    """Token after the last that is wanted: the end of a block."""
    blocks: tuple[int, ...]
    """The engine's blocks for these tokens."""
    behind: int
    """Tokens of the prompt from ``last`` on, which the engine computes."""
    deadline_s: float
    """Seconds left of the request's deadline when the scheduler wrote this."""
    tokens: tuple[int, ...] = ()
    """Ids of all its groups if a rank holds some heads only: each rank finds and names its own by them."""
    salt: bytes = b""
    """The tenant's secret."""


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Publish what a request has computed. vLLM keeps its blocks until the worker has copied them."""

    request: str
    tokens: tuple[int, ...]
    """Ids, whole groups."""
    blocks: tuple[int, ...]
    """The engine's blocks for these tokens."""
    salt: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine."""

    loads: tuple[LoadRequest, ...] = ()
    publications: tuple[PublishRequest, ...] = ()
    scheduled: int = 0
    """Tokens that the step computes."""


@dataclass(slots=True)
class PendingStep:
    """A step in the making."""

    loads: list[LoadRequest] = field(default_factory=list)
    publications: list[PublishRequest] = field(default_factory=list)


async def find_cache(
    client: AsyncClient, tokens: Sequence[int], specs: Sequence[KVSpec], salt: bytes, within_s: float
) -> Found | None:
    """Return the longest cached prefix of a prompt for the first spec that has one, of any element type.

    The publisher's element type does not matter: groups are decoded to the engine's.

    Raises:
        TransportError, TimeoutError: the origin does not answer in time.
        ForeignError: it has a cache of another model or shape.
        FormatError: its answer is not a catalog.
    """
    async with asyncio.timeout(within_s):
        for spec in specs:
            found = await client.find(tokens, model=spec, salt=salt, within_s=within_s, any_dtype=True)
            if found is not None:
                return found
    return None


async def play_load(
    client: AsyncClient, load: LoadRequest, models: Sequence[KVSpec], cost: PrefillCost, options: PlayOptions
) -> PlayedPrefix:
    """Play what a request loads.

    Args:
        client: plays it.
        load: the request.
        models: caches that this rank can use, its own shard last. If another rank's shard was found, the rank looks up
            its own.
        cost: of the engine's prefill.
        options: how to play.

    Raises:
        PlayError: this rank's heads are not published, or the play failed.
        TimeoutError: it did not end.
        KvabrError: see `AsyncClient.find` and `AsyncClient.play_prefix`.
    """
    loop = asyncio.get_running_loop()
    due_s = loop.time() + load.deadline_s
    found, skip = load.found, load.first // load.found.catalog.spec.group_tokens
    async with asyncio.timeout(_HUNG_S + _HUNG_DEADLINES * load.deadline_s):
        if found.catalog.spec.model not in {spec.model for spec in models}:
            mine = models[-1]
            own = await find_cache(client, load.tokens, [mine], load.salt, load.deadline_s / 2)
            if own is None or own.catalog.groups <= skip:
                raise PlayError(f"another rank's heads are published, those of {mine.model} are not")
            found = own
        left_s = max(_MIN_LEFT_S, due_s - loop.time())
        return await client.play_prefix(
            found, deadline=left_s, cost=cost, skip=skip, behind=load.behind, options=options
        )


_clients: dict[VllmSettings, tuple[Client, int]] = {}
_lock = threading.Lock()


def take_client(settings: VllmSettings) -> Client:
    """Return the client for these settings, the same one for all halves of a process; `leave_client` when done.

    A new client dials at once, so that the first request finds a connection.

    Raises:
        UsageError: an option of the connection is wrong.
    """
    with _lock:
        client, users = _clients.get(settings, (None, 0))
        if client is None:
            client = open_client(Client, settings)
            client.begin(_dial)
        _clients[settings] = (client, users + 1)
        return client


def leave_client(client: Client) -> None:
    """Give up a client; the last half to do so closes it."""
    with _lock:
        for settings, (shared, users) in list(_clients.items()):
            if shared is client:
                if users > 1:
                    _clients[settings] = (client, users - 1)
                    return
                del _clients[settings]
    client.close()


async def _dial(client: AsyncClient) -> None:
    with contextlib.suppress(KvabrError):  # the first lookup dials again and reports the error
        await client.connect()
