"""What the two halves of the connector share: requests from the scheduler to the worker, lookups, and a client.

Needs no vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvabr.client.blocking import Background, Handle
from kvabr.client.lookup import Found
from kvabr.engines.clients import EngineClient, open_client
from kvabr.engines.settings import TroubleLog
from kvabr.engines.vllm.config import VllmSettings
from kvabr.player.session_types import GPU_PRICE
from kvabr.types.catalog import Catalog, Track
from kvabr.types.errors import KvabrError
from kvabr.types.kv import KVSpec


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Play a cache, and keep what comes, compressed, for a `CopyRequest`."""

    play: int
    """Number of the play, unique in one engine."""
    request: str
    found: Found
    first: int
    """First token that is wanted; the engine has whole blocks before it."""
    last: int
    """Token after the last that is wanted: the end of a block."""
    behind: int
    """Tokens of the prompt from ``last`` on, which the engine computes."""
    tail: int
    """Most tokens before ``last`` that it may compute with them, instead of having them played."""
    deadline_s: float
    """Seconds left of the request's deadline when the scheduler wrote this."""
    tokens: Sequence[int] = ()
    """Ids of all its groups if there are several ranks, which find and name their own layers and heads by them, or if
    the engine publishes, which notes what it has played with losses."""
    salt: bytes = b""
    """The tenant's secret."""
    adapter: str | None = None
    """Digest of the request's LoRA adapter; None: it has none."""
    engine_price: float = GPU_PRICE
    """Price of a second of the engine, which other requests may need, nats per generated token."""


@dataclass(frozen=True, slots=True)
class PlacedPlay:
    """What a worker's play has brought, compressed."""

    play: int
    request: str
    end: int
    """Token after the last in place."""
    loss: float = 0.0
    """Expected loss for its own request, nats per generated token."""
    worst: float = 0.0
    """Expected loss for a request that shares nothing of what the engine computes behind it."""
    nbytes: int = 0
    """Host memory that it holds."""


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Decode a cache that was played into blocks, beside the steps: vLLM waits until it is told of the end."""

    play: int
    request: str
    first: int
    """First token that is wanted: the beginning of a block, not before the play's own first."""
    last: int
    """Token after the last that is wanted; all before it are in place in every worker."""
    blocks: tuple[tuple[int, ...], ...]
    """Per block table of the engine, the blocks for these tokens."""


@dataclass(frozen=True, slots=True)
class KeepRequest:
    """Keep what layers with windows have of some groups that this step completes: vLLM will drop it."""

    chunks: tuple[str, ...]
    """Chained digests of the groups."""
    blocks: tuple[tuple[int, ...], ...]
    """Per block table of the engine, the blocks of these groups; empty where no layer has a window."""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Keep the states that this step leaves at the end of a block: vLLM will drop them."""

    chunk: str
    """Chained digest of the last group before it."""
    blocks: dict[int, int]
    """For each table of states the block that holds it."""


@dataclass(frozen=True, slots=True)
class GrowRequest:
    """Publish what this step completes of a request, before the request has ended."""

    request: str
    tokens: Sequence[int]
    """Ids of all groups of its prompt when it is announced, else none."""
    first: int
    """First token that is new: all before it were handed over. The beginning of a block."""
    last: int
    """Token after the last that is new; ``first`` if there is nothing yet. The end of a block."""
    blocks: tuple[tuple[int, ...], ...]
    """Per block table of the engine, the blocks for these tokens."""
    salt: bytes
    adapter: str | None
    """Digest of the request's LoRA adapter; None: it has none."""
    had: int
    """Tokens that need not be computed, when it is announced."""
    step: int
    """Tokens of it that this step computes."""


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Publish what a request has computed, or end what was published of it while it was.

    vLLM keeps its blocks until the worker has copied them.
    """

    request: str
    tokens: Sequence[int]
    """Ids, whole groups."""
    blocks: tuple[tuple[int, ...], ...]
    """Per block table of the engine, the blocks for these tokens."""
    salt: bytes
    adapter: str | None = None
    """Digest of the request's LoRA adapter; None: it has none."""
    chunks: tuple[str, ...] = ()
    """Chained digests of the groups, as `KeepRequest` named them."""
    alive: bool = False
    """Whether the request goes on, so that its blocks stay; what was published of it while it was computed ends."""


@dataclass(slots=True)
class Step:
    """One step of the engine."""

    dropped: list[int] = field(default_factory=list)
    """Plays that are not wanted any more."""
    loads: list[LoadRequest] = field(default_factory=list)
    copies: list[CopyRequest] = field(default_factory=list)
    kept: list[KeepRequest] = field(default_factory=list)
    snapshots: list[SnapshotRequest] = field(default_factory=list)
    grown: list[GrowRequest] = field(default_factory=list)
    preempted: bool = False
    """Whether vLLM has taken blocks away from a request."""
    publications: list[PublishRequest] = field(default_factory=list)
    scheduled: int = 0
    """Tokens that the step computes."""
    prefill: tuple[int, int] | None = None
    """The prefill of one prompt that is as much work: tokens before it, and new ones. None: it is not known."""
    asking: bool = False
    """Whether a lookup is under way, or a digest, whose end only the scheduler sees."""


async def find_cache(
    client: EngineClient, tokens: Sequence[int], specs: Sequence[KVSpec], salt: bytes, within_s: float
) -> Found | None:
    """Return the longest cached prefix of a prompt for the first spec that has one; raise as `AsyncClient.find`.

    The publisher's element type does not matter: groups are decoded to the engine's. All specs together have
    ``within_s`` seconds; the client's own time limit is used, because its error has the reason.
    """
    ends_s = time.monotonic() + within_s
    for spec in specs:
        left_s = max(_MIN_FIND_S, ends_s - time.monotonic())
        found = await client.find(tokens, model=spec, salt=salt, within_s=left_s, any_dtype=True)
        if found is not None:
            return found
    return None


def cut(found: Found, last: int) -> Found:
    """Return what a prompt needs of a cache that goes on behind token ``last`` - 1, which lies in it."""
    catalog = found.catalog
    groups = catalog.group_at(last - 1) + 1
    return replace(found, catalog=catalog.prefix(groups) if catalog.every_token else catalog.prefix(groups, end=last))


def sizes(catalog: Catalog, only: str | None) -> tuple[int, ...]:
    """Return the bytes that a play of a cache may come to with each of its tracks as the dearest, descending.

    ``only`` is the one track of a policy that plays no other.
    """
    chosen = [track for track in catalog.tracks if track.name == only] or catalog.tracks
    return tuple(sorted({_with_lower(catalog, track) for track in chosen}, reverse=True))


def within(found: Found, skip: int, most: int) -> Found:
    """Return what was found, to be played without tracks that can take more than ``most`` bytes behind some groups."""
    left = found.catalog.suffix(skip)
    names = frozenset(track.name for track in left.tracks if _with_lower(left, track) <= most)
    return found if len(names) == len(left.tracks) else replace(found, only=names)


def _with_lower(catalog: Catalog, track: Track) -> int:
    """Return the bytes of a track with all below it, as a play keeps them."""
    nbytes, lower = track.total_bytes, track.refines
    while lower is not None:
        nbytes, lower = nbytes + catalog.by_name[lower].total_bytes, catalog.by_name[lower].refines
    return nbytes


_MIN_FIND_S = 1e-3
_PROBE_EVERY_S, _PROBE_S, _DIAL_S = 10.0, 1.0, 6.0
"""Seconds between two probes of the connection, fewer than QUIC keeps an idle one; seconds for the answer on an open
connection; and seconds for it while there is none, a little more than a dial may take, so that its error is known."""
_log = logging.getLogger("vllm.kvabr")
_trouble = TroubleLog(_log)
_clients: dict[VllmSettings, tuple[Background[EngineClient], int, Handle[None]]] = {}
_lock = threading.Lock()


def take_client(settings: VllmSettings) -> Background[EngineClient]:
    """Return the client for these settings, the same for both halves if they live in one process.

    A new client dials at once, and keeps its connection, so that every request finds one.
    """
    with _lock:
        if settings in _clients:
            client, users, stays = _clients[settings]
        else:
            client = Background(open_client(settings))
            # A bucket has no connection that ends when it is idle, and charges for each request.
            probes = str(settings.url).startswith("moqt")
            users, stays = 0, client.begin(partial(_stay_connected, probes=probes))
        _clients[settings] = (client, users + 1, stays)
        return client


def leave_client(settings: VllmSettings) -> None:
    """Give up the client of `take_client`; the last half to do so closes it."""
    with _lock:
        client, users, stays = _clients.pop(settings)
        if users > 1:
            _clients[settings] = (client, users - 1, stays)
            return
    stays.cancel()
    client.close()


async def _stay_connected(client: EngineClient, *, probes: bool) -> None:
    """Dial, and probe the connection now and then: the first request after a quiet minute has no time for a new one.

    An origin that cannot be reached is logged at once, before the first request needs it, and when it is back.
    """
    with contextlib.suppress(KvabrError):  # the probe below says why
        await client.known_link()  # a player process may still be starting
    within_s, away = _DIAL_S, False
    while True:
        try:
            await client.round_trip(probe_s=within_s if probes else None)
        except KvabrError as error:
            within_s, away = _DIAL_S, True
            _trouble.tell("the origin cannot be reached", error)
        else:
            if not probes:
                return
            if away:
                _log.info("kvabr: the origin answers again")
            within_s, away = _PROBE_S, False
        await asyncio.sleep(_PROBE_EVERY_S)
