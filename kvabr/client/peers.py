"""The peers of a client, with one connection each, and lookups at them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvabr.client.downloads import Downloads
from kvabr.client.lookup import Found, Unplayable, fetch_catalog, fetch_models, find_prefix
from kvabr.client.sources import PlaySources
from kvabr.player.sources import NOT_KNOWN
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import Connection, PeerConnection
from kvabr.types.errors import (
    ForeignError,
    FormatError,
    NotFoundError,
    TransportError,
    UsageError,
    told_if_exhausted,
)
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

_MODELS_S = 5.0
"""Seconds to reuse a peer's list of models."""
_MAX_SHAPES = 4
_OTHER_SIZES_FACTOR, _MIN_OTHER_SIZES_S = 4.0, 0.25
"""Time for lookups in other group sizes: a multiple of the first lookup's, with a floor."""
_REPORT_SHARE = 0.9
"""Share of a lookup's time until silent sources are ignored."""
_MIN_WAIT_S = 0.02
_AGAIN_S = 0.05
_Answer = Found | Unplayable | None
Answered = tuple[_Answer, KVSpec | None]
_Asked = asyncio.Task[Answered | Exception]


@dataclass(frozen=True, slots=True)
class Query:
    """A lookup of a prompt's longest cached prefix."""

    tokens: Sequence[int]
    model: KVSpec | str | None
    """A spec, a name (looked up in up to four group sizes and shapes), or None for the peer's only model."""
    any_group_tokens: bool = False
    """Try other group sizes too."""
    salt: bytes = b""
    any_dtype: bool = False
    live: bool = False
    """Include assets still being prefilled."""
    wait_s: float = 0.0
    """Seconds to repeat a ``live`` lookup without an asset."""


class ClientPeer(Downloads):
    """An origin or a relay, created by `AsyncClient.peer`."""

    def __init__(
        self, name: str, peer: PeerConnection, store: GroupCache, metrics: ClientMetrics, *, own: bool
    ) -> None:
        """See `Downloads`."""
        super().__init__(peer, store, metrics, own=own)
        self.name = name
        self._models: Sequence[KVSpec] = ()
        self._asked_s = -math.inf

    @property
    def trouble(self) -> str | None:
        """The current connection error; None if there is none."""
        return self.peer.trouble

    @property
    def reached(self) -> bool:
        """True if it is or was connected."""
        return self.peer.reached

    async def find(self, connection: Connection, query: Query) -> Answered:
        """Return a prompt's longest cached prefix and its model's spec; errors as `AsyncClient.find`."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + (query.wait_s if query.live else 0.0)
        await self.peer.connected()
        answer = await self._find(connection, query)
        with suppress(TimeoutError):  # the last answer stands
            async with asyncio.timeout_at(end_s):
                while not isinstance(answer[0], Found) and clock() + _AGAIN_S <= end_s:
                    await asyncio.sleep(_AGAIN_S)
                    answer = await self._find(connection, query)
        return answer

    async def _find(self, connection: Connection, query: Query) -> Answered:
        model = query.model
        if isinstance(model, KVSpec):
            if query.any_group_tokens:
                return await self._in_any_size(connection, query, model), model
            return await _longest(connection, query, [model]), model
        recent, tried, found = self._recent(), None, None
        if recent is not None:
            with suppress(ForeignError, UsageError):  # new publications may change the answer
                specs = _shapes(recent, model)
                found = await _longest(connection, query, specs)
                if isinstance(found, Found):
                    return found, found.catalog.spec
                tried = specs
        specs = _shapes(await self._ask(connection), model)
        found = found if specs == tried else await _longest(connection, query, specs)
        return found, specs[0] if specs else None

    async def catalog(self, connection: Connection, name: TrackNamespace, *, live: bool) -> Answered:
        """Return an asset's catalog; errors as `AsyncClient.find_asset`."""
        await self.peer.connected()
        return await fetch_catalog(connection, name, live=live), None

    async def _in_any_size(self, connection: Connection, query: Query, model: KVSpec) -> _Answer:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        others = asyncio.create_task(self._in_other_sizes(connection, query, model))
        try:
            found = await _longest(connection, query, [model])
            if _tokens(found) < len(query.tokens):
                with suppress(TimeoutError):
                    other = await asyncio.wait_for(
                        others, max(_MIN_OTHER_SIZES_S, _OTHER_SIZES_FACTOR * (clock() - begun_s))
                    )
                    return max(found, other, key=_tokens)
        finally:
            others.cancel()
        return found

    async def _in_other_sizes(self, connection: Connection, query: Query, model: KVSpec) -> _Answer:
        with suppress(TransportError, FormatError, UsageError):
            recent = self._recent()
            told = await self._ask(connection) if recent is None else recent
            others = [spec for spec in told if spec != model and spec.same_cache(model)]
            return await _longest(connection, query, others[:_MAX_SHAPES])
        return None

    def _recent(self) -> Sequence[KVSpec] | None:
        return None if asyncio.get_running_loop().time() > self._asked_s + _MODELS_S else self._models

    async def _ask(self, connection: Connection) -> Sequence[KVSpec]:
        try:
            self._models = await fetch_models(connection)
        except NotFoundError as error:
            self._models = ()
            raise UsageError(
                "the origin does not tell which models it has: give a spec, model=KVSpec(...), or an engine"
            ) from error
        finally:
            self._asked_s = asyncio.get_running_loop().time()
        return self._models


@contextmanager
def relieving(peers: Iterable[ClientPeer]) -> Iterator[None]:
    """Release unused resources of the peers if one is exhausted; see `told_if_exhausted`."""
    with ExitStack() as told:
        for each in peers:
            told.enter_context(told_if_exhausted(each.peer.relieve))
        yield


PeerLike = ClientPeer | PeerConnection | str | None
"""A peer as named by a play; None: the client's."""
PeersLike = PeerLike | Sequence[PeerLike]


async def first_found(
    connection: PlaySources,
    peers: Sequence[ClientPeer],
    look: Callable[[ClientPeer, Connection], Coroutine[Any, Any, Answered]],
    tokens: int = 1,
    within_s: float = math.inf,
) -> Answered:
    """Look up at all sources of a play at once, and return the longest prefix.

    Once a source has all ``tokens``, wait briefly for the others, except recently unreachable ones, and at most
    ``within_s`` seconds. Other sources with the same asset join the play when they answer.
    """
    pairs = list(zip(peers, connection.sources, strict=True))
    if len(pairs) == 1:
        connection.answered_by(0)
        return await look(*pairs[0])
    asked = [connection.meanwhile(_said(look(*pair))) for pair in pairs]
    found: dict[int, Found] = {}
    try:
        round_trip_s = max((each or 0.0 for each in connection.round_trips), default=0.0)
        doubted = {task for task, source in zip(asked, connection.sources, strict=True) if source.unreachable}
        found = await _found_by(asked, doubted, tokens, round_trip_s, _REPORT_SHARE * within_s)
    finally:
        silent = [] if found else [task.cancel() for task in asked if not task.done()]
    if not found:
        said = [task.result() for task in asked if task.done() and not task.cancelled()]
        answers = [each for each in said if not isinstance(each, Exception)]
        if answers:
            return next((answer for answer in answers if answer[0] is not None), answers[0])
        errors = [each for each in said if isinstance(each, Exception)]
        # "Not found" does not speak for sources that were not reached.
        raise TimeoutError if silent else min(errors, key=lambda error: isinstance(error, NotFoundError))
    best = max(found, key=lambda source: (_tokens(found[source]), -source))
    connection.answered_by(best)
    for source, task in enumerate(asked):
        connection.offer(source, NOT_KNOWN)
        offered = partial(_offer, connection, source, played=found[best])
        if task.done():
            offered(task)
        else:
            task.add_done_callback(offered)
    return found[best], None


async def _said(lookup: Coroutine[Any, Any, Answered]) -> Answered | Exception:
    try:
        return await lookup
    except Exception as error:  # noqa: BLE001  # any error excludes only this source
        return error


def _offer(connection: PlaySources, source: int, asked: _Asked, played: Found) -> None:
    if asked.cancelled():
        return
    same: Collection[str] = frozenset()
    answer, found = asked.result(), _found(asked)
    if isinstance(answer, Exception):
        why: str | None = str(answer) or repr(answer)
    elif found is None:
        why = "it has nothing of it"
    else:
        same, why = _same_tracks(played, found)
    connection.offer(source, same)
    if why is not None:
        connection.left_out(source, why)


async def _found_by(
    asked: Sequence[_Asked],
    doubted: AbstractSet[_Asked],
    tokens: int,
    round_trip_s: float,
    within_s: float,
) -> dict[int, Found]:
    """Return the prefixes by source: a while after the first, or shortly after a complete one.

    After one answer, ignore ``doubted``, recently unreachable sources. ``round_trip_s`` is the farthest source's;
    ``within_s`` bounds the lookup.
    """
    clock = asyncio.get_running_loop().time
    begun_s, waits = clock(), False
    end_s = begun_s + within_s
    found: dict[int, Found] = {}
    pending = set(asked)
    while clock() < end_s and (pending - doubted or (pending and not any(map(_answered, asked)))):
        left_s = None if end_s == math.inf else end_s - clock()
        done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        found |= {asked.index(task): each for task in done if (each := _found(task)) is not None}
        took_s, whole = clock() - begun_s, max(map(_tokens, found.values()), default=0) >= tokens
        if whole:
            end_s = min(end_s, clock() + max(_MIN_WAIT_S, took_s / 2))
        elif found and not waits:
            waits = True
            end_s = min(end_s, clock() + max(_MIN_OTHER_SIZES_S, _OTHER_SIZES_FACTOR * max(took_s, round_trip_s)))
    return found


def _answered(task: _Asked) -> bool:
    return task.done() and not isinstance(task.result(), Exception)


def _found(task: _Asked) -> Found | None:
    answer = task.result()
    return answer[0] if not isinstance(answer, Exception) and isinstance(answer[0], Found) else None


def _same_tracks(one: Found, other: Found) -> tuple[Collection[str], str | None]:
    """Return the tracks with identical, complete groups at two peers, and any mismatch."""
    if one is other:
        return frozenset(one.catalog.by_name), None
    if one.catalog.namespace != other.catalog.namespace:
        return frozenset(), f"it has another asset, of {other.catalog.tokens:,} tokens"
    if other.live is not None:
        return frozenset(), "it is still being prefilled there"
    theirs = other.catalog.by_name
    both = [track for track in one.catalog.tracks if track.name in theirs]
    same = frozenset(track.name for track in both if theirs[track.name].digests == track.digests)
    differ = ", ".join(track.name for track in both if track.name not in same)
    return same, f"its catalog names other groups of {differ}" if differ else None


def _shapes(told: Sequence[KVSpec], model: str | None) -> list[KVSpec]:
    specs = [spec for spec in told if model in (None, spec.model)]
    names = sorted({spec.model for spec in specs})
    if len(names) > 1:
        raise UsageError(f"the origin has caches of several models: say which, model=...; there are {', '.join(names)}")
    if len(specs) > _MAX_SHAPES:
        raise UsageError(
            f"the origin has caches of {names[0]} in {len(specs)} shapes: give the spec of one, model=KVSpec(...)"
        )
    return specs


async def _longest(connection: Connection, query: Query, specs: Sequence[KVSpec]) -> _Answer:
    lookups = (
        find_prefix(connection, query.tokens, spec, salt=query.salt, any_dtype=query.any_dtype, live=query.live)
        for spec in specs
    )
    answers = await asyncio.gather(*lookups, return_exceptions=True)
    found = [answer for answer in answers if isinstance(answer, Found)]
    for answer in answers:
        if isinstance(answer, BaseException) and not found:
            raise answer
    unplayable = next((answer for answer in answers if isinstance(answer, Unplayable)), None)
    return max(found, key=_tokens, default=unplayable)


def _tokens(answer: _Answer) -> int:
    return answer.catalog.tokens if isinstance(answer, Found) else 0
