"""Code for both halves of the connector: messages to workers, lookups, and the client. Does not import vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
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
    """Message to a worker: play a cache, and keep it compressed for a `CopyRequest`."""

    play: int
    request: str
    found: Found
    first: int
    """First token to load, after the engine's own whole blocks."""
    last: int
    """Token after the last to load, at the end of a block."""
    uncached: int
    """Number of tokens of the prompt from ``last`` on."""
    tail: int
    """Maximum tokens before ``last`` that the engine may compute instead."""
    deadline_s: float
    """Seconds until the deadline when the message is sent."""
    tokens: Sequence[int] = ()
    """Token ids of the found cache, if needed for lookups by other ranks or to record lossy plays."""
    salt: bytes = b""
    adapter: str | None = None
    engine_price: float = GPU_PRICE
    """Cost of a second of engine time, nats per generated token."""
    max_loss: float = math.inf
    """Maximum expected loss, nats per generated token."""


@dataclass(frozen=True, slots=True)
class PlacedPlay:
    """Result of a worker's play."""

    play: int
    request: str
    end: int
    """Token after the last token in place."""
    loss: float = 0.0
    """Expected loss for the request itself, nats per generated token."""
    worst: float = 0.0
    """Expected loss for another request that shares no later tokens, nats per generated token."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Message to a worker: decode a played cache into blocks during other steps. vLLM waits for the end."""

    play: int
    request: str
    first: int
    last: int
    """Token after the last token to copy; every worker has all tokens before it."""
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class KeepRequest:
    """Message to a worker: keep window layers of completed groups before vLLM drops them."""

    chunks: tuple[str, ...]
    blocks: tuple[tuple[int, ...], ...]
    """Blocks by block table; empty for tables without windows."""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Message to a worker: keep the states at the end of a block before vLLM drops them."""

    chunk: str
    """Chained digest of the last group before the states."""
    blocks: dict[int, int]
    """Block number, by table of states."""


@dataclass(frozen=True, slots=True)
class GrowRequest:
    """Message to a worker: publish the tokens that this step computes for a running request."""

    request: str
    tokens: Sequence[int]
    """Token ids of all groups of the prompt in the first message; later empty."""
    first: int
    """First new token, at the start of a block."""
    last: int
    """Token after the last new token, at the end of a block."""
    blocks: tuple[tuple[int, ...], ...]
    """Blocks by block table."""
    salt: bytes
    adapter: str | None
    had: int
    """Number of tokens that vLLM already had, in the first message."""
    step: int


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Message to a worker: publish a request's cache, or finish its growing one. vLLM keeps the blocks until then."""

    request: str
    tokens: Sequence[int]
    """Token ids of whole groups."""
    blocks: tuple[tuple[int, ...], ...]
    """Blocks by block table."""
    salt: bytes
    adapter: str | None = None
    chunks: tuple[str, ...] = ()
    alive: bool = False
    """True if the request continues and keeps its blocks."""


@dataclass(slots=True)
class Step:
    """Messages for one step of the engine."""

    dropped: list[int] = field(default_factory=list)
    loads: list[LoadRequest] = field(default_factory=list)
    copies: list[CopyRequest] = field(default_factory=list)
    kept: list[KeepRequest] = field(default_factory=list)
    snapshots: list[SnapshotRequest] = field(default_factory=list)
    grown: list[GrowRequest] = field(default_factory=list)
    preempted: bool = False
    """True if vLLM has taken blocks from a request."""
    publications: list[PublishRequest] = field(default_factory=list)
    scheduled: int = 0
    prefill: tuple[int, int] | None = None
    """A prefill of one prompt that takes as long as this step: tokens before it, and new tokens; None if unknown."""
    polling: bool = False
    """True while a lookup or digest is in progress; its end is only noticed by polling."""


async def find_cache(
    client: EngineClient, tokens: Sequence[int], specs: Sequence[KVSpec], salt: bytes, within_s: float
) -> Found | None:
    """Return the longest cached prefix for the first spec that has one; errors as in `AsyncClient.find`.

    Lookups for all specs together take at most ``within_s`` seconds; caches of any element type are accepted.
    """
    ends_s = time.monotonic() + within_s
    for spec in specs:
        left_s = max(_MIN_FIND_S, ends_s - time.monotonic())
        found = await client.find(tokens, model=spec, salt=salt, within_s=left_s, any_dtype=True)
        if found is not None:
            return found
    return None


def cut(found: Found, last: int) -> Found:
    """Cut a cache after token ``last`` - 1."""
    catalog = found.catalog
    groups = catalog.group_at(last - 1) + 1
    return replace(found, catalog=catalog.prefix(groups) if catalog.every_token else catalog.prefix(groups, end=last))


def usable(catalog: Catalog, only: str | None, max_loss: float) -> Sequence[Track]:
    """Return the tracks that a play may end on: only ``only`` if set, and those within ``max_loss`` if any are."""
    chosen = [track for track in catalog.tracks if track.name == only] or catalog.tracks
    return [track for track in chosen if track.total_loss <= max_loss] or chosen


def sizes(catalog: Catalog, tracks: Sequence[Track]) -> tuple[int, ...]:
    """Return the maximum bytes of a play for each track as its largest, descending."""
    return tuple(sorted({_with_lower(catalog, track) for track in tracks}, reverse=True))


def within(found: Found, skip: int, limit: int) -> Found:
    """Exclude tracks with more than ``limit`` bytes in the groups after the first ``skip``."""
    left = found.catalog.suffix(skip)
    names = frozenset(track.name for track in left.tracks if _with_lower(left, track) <= limit)
    return found if len(names) == len(left.tracks) else replace(found, only=names)


def _with_lower(catalog: Catalog, track: Track) -> int:
    nbytes, lower = track.total_bytes, track.refines
    while lower is not None:
        nbytes, lower = nbytes + catalog.by_name[lower].total_bytes, catalog.by_name[lower].refines
    return nbytes


_MIN_FIND_S = 1e-3
_PROBE_EVERY_S, _PROBE_S, _DIAL_S = 10.0, 1.0, 6.0
"""Seconds between probes, less than QUIC's idle time; time limits of a probe without and with a dial."""
_log = logging.getLogger("vllm.kvabr")
_trouble = TroubleLog(_log)
_clients: dict[VllmSettings, tuple[Background[EngineClient], int, Handle[None]]] = {}
_lock = threading.Lock()


def take_client(settings: VllmSettings) -> Background[EngineClient]:
    """Return the shared client for these settings; a new client connects at once and stays connected."""
    with _lock:
        if settings in _clients:
            client, users, stays = _clients[settings]
        else:
            client = Background(open_client(settings))
            # Buckets have no idle connection, and charge for each request.
            probes = str(settings.url).startswith("moqt")
            users, stays = 0, client.begin(partial(_stay_connected, probes=probes))
        _clients[settings] = (client, users + 1, stays)
        return client


def leave_client(settings: VllmSettings) -> None:
    """Release the client of `take_client`; the last user closes it."""
    with _lock:
        client, users, stays = _clients.pop(settings)
        if users > 1:
            _clients[settings] = (client, users - 1, stays)
            return
    stays.cancel()
    client.close()


async def _stay_connected(client: EngineClient, *, probes: bool) -> None:
    """Connect, and probe regularly to keep the connection open; log when it is lost and when it is back."""
    with contextlib.suppress(KvabrError):  # the probe below logs the reason
        await client.known_link()  # a player process may still be starting
    within_s, away = _DIAL_S, False
    while True:
        try:
            await client.round_trip(probe_s=within_s if probes else None)
        except KvabrError as error:
            within_s, away = _DIAL_S, True
            _trouble.warn("the origin cannot be reached", error)
        else:
            if not probes:
                return
            if away:
                _log.info("kvabr: the origin answers again")
            within_s, away = _PROBE_S, False
        await asyncio.sleep(_PROBE_EVERY_S)
