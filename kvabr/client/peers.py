"""The peers of a client, with one connection each, and lookups at them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from kvabr.client.downloads import Downloads
from kvabr.client.lookup import Found, Unplayable, fetch_catalog, fetch_models, find_prefix
from kvabr.client.sources import PlaySources
from kvabr.player.sources import NOT_KNOWN
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import Connection, PeerConnection
from kvabr.types.errors import ForeignError, FormatError, NotFoundError, TransportError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

_MODELS_S = 5.0
"""Seconds for which a peer's list of models is reused; a failed lookup fetches it anew."""
_MAX_SHAPES = 4
"""Most group sizes and shapes of one model to look up."""
_OTHER_SIZES_FACTOR, _MIN_OTHER_SIZES_S = 4.0, 0.25
"""Time for lookups in other group sizes than the engine's: a multiple of the first lookup's time, with a floor."""
_REPORT_SHARE = 0.9
"""Share of a lookup's time until silent sources are ignored."""
_MIN_WAIT_S = 0.02
"""Least wait for other sources after the first answer."""
_AGAIN_S = 0.05
"""Pause before a lookup for a producer is repeated."""
_Answer = Found | Unplayable | None
Answered = tuple[_Answer, KVSpec | None]
"""A peer's answer to a lookup, and its model's spec."""
_Lookup = Callable[[Sequence[KVSpec]], Awaitable[_Answer]]


class ClientPeer:
    """An origin or a relay, created by `AsyncClient.peer`."""

    def __init__(
        self,
        name: str,
        peer: PeerConnection,
        store: GroupCache,
        metrics: ClientMetrics,
        *,
        own: bool,
    ) -> None:
        """Prepare without dialling; for the arguments see `Downloads`."""
        self.name = name
        self.downloads = Downloads(peer, store, metrics, own=own)
        self._models: Sequence[KVSpec] = ()
        self._asked_s = -math.inf
        """Time of the last request for models."""

    @property
    def trouble(self) -> str | None:
        """The current connection error; None if there is none."""
        return self.downloads.peer.trouble

    @property
    def reached(self) -> bool:
        """True if it is or was connected."""
        return self.downloads.peer.reached

    async def find(
        self,
        connection: Connection,
        tokens: Sequence[int],
        model: KVSpec | str | None,
        *,
        any_group_tokens: bool = False,
        salt: bytes = b"",
        any_dtype: bool = False,
        live: bool = False,
        wait_s: float = 0.0,
    ) -> Answered:
        """Return the longest cached prefix of a prompt, and the spec of its model; each None if not found.

        The model is a spec, a name at the peer, or None for its only one. A name is looked up in up to four group sizes
        and shapes; a spec with ``any_group_tokens`` also in other sizes. ``live`` includes assets still being
        prefilled; if there is none, the lookup is repeated, and answers within ``wait_s`` seconds. Errors as
        `AsyncClient.find`.
        """
        clock = asyncio.get_running_loop().time
        end_s = clock() + (wait_s if live else 0.0)
        await self.downloads.peer.connected()
        lookup = partial(_longest, connection, tokens, salt=salt, any_dtype=any_dtype, live=live)
        find = partial(self._find, connection, tokens, model, lookup, any_group_tokens=any_group_tokens)
        answer = await find()
        with contextlib.suppress(TimeoutError):  # the last answer stands
            async with asyncio.timeout_at(end_s):
                while not isinstance(answer[0], Found) and clock() + _AGAIN_S <= end_s:
                    await asyncio.sleep(_AGAIN_S)
                    answer = await find()
        return answer

    async def _find(
        self,
        connection: Connection,
        tokens: Sequence[int],
        model: KVSpec | str | None,
        lookup: _Lookup,
        *,
        any_group_tokens: bool,
    ) -> Answered:
        if isinstance(model, KVSpec):
            found = await (
                self._in_any_size(connection, tokens, model, lookup) if any_group_tokens else lookup([model])
            )
            return found, model
        recent, tried, found = self._recent(), None, None
        if recent is not None:
            with contextlib.suppress(ForeignError, UsageError):  # new publications may change the answer
                specs = _shapes(recent, model)
                found = await lookup(specs)
                if isinstance(found, Found):
                    return found, found.catalog.spec
                tried = specs
        specs = _shapes(await self._ask(connection), model)
        found = found if specs == tried else await lookup(specs)
        return found, specs[0] if specs else None

    async def catalog(self, connection: Connection, name: TrackNamespace, *, live: bool) -> Answered:
        """Return an asset's catalog, like `find`; errors as `AsyncClient.find_asset`."""
        await self.downloads.peer.connected()
        return await fetch_catalog(connection, name, live=live), None

    def relieve(self) -> None:
        """See `Connection.relieve`."""
        self.downloads.peer.relieve()

    async def close(self) -> None:
        """End all transfers, and close the connection if this dialled it."""
        await self.downloads.close()

    async def _in_any_size(
        self, connection: Connection, tokens: Sequence[int], model: KVSpec, lookup: _Lookup
    ) -> _Answer:
        """Return the longest prefix in any group size; other sizes may fail and have limited time."""
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        others = asyncio.create_task(self._in_other_sizes(connection, model, lookup))
        try:
            found = await lookup([model])
            if _tokens(found) < len(tokens):
                with contextlib.suppress(TimeoutError):
                    other = await asyncio.wait_for(
                        others, max(_MIN_OTHER_SIZES_S, _OTHER_SIZES_FACTOR * (clock() - begun_s))
                    )
                    if _tokens(other) > _tokens(found):
                        return other
        finally:
            others.cancel()
        return found

    async def _in_other_sizes(self, connection: Connection, model: KVSpec, lookup: _Lookup) -> _Answer:
        with contextlib.suppress(TransportError, FormatError, UsageError):
            recent = self._recent()
            told = await self._ask(connection) if recent is None else recent
            others = [spec for spec in told if spec != model and spec.same_cache(model)]
            return await lookup(others[:_MAX_SHAPES])
        return None

    def _recent(self) -> Sequence[KVSpec] | None:
        """Return the peer's models if recent, else None."""
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


PeerLike = ClientPeer | PeerConnection | str | None
"""A peer as named by a play: a `ClientPeer`, an open connection, or a URL; None: the client's origin."""
PeersLike = PeerLike | Sequence[PeerLike]
"""One peer, or several sources of groups."""


async def first_found(
    connection: PlaySources,
    lookups: Sequence[Coroutine[Any, Any, Answered]],
    tokens: int = 1,
    within_s: float = math.inf,
) -> Answered:
    """Look up at all sources of a play at once, and return the longest prefix.

    Once a source has all ``tokens``, wait briefly for the others, and not at all for recently unreachable ones. Shortly
    before ``within_s`` seconds, use the answers so far. Other sources with the same asset join the play when they
    answer.
    """
    if len(lookups) == 1:
        connection.answered_by(0)
        return await lookups[0]
    asked = [asyncio.ensure_future(lookup) for lookup in lookups]
    try:
        round_trip_s = max((each or 0.0 for each in connection.round_trips), default=0.0)
        doubted = {task for task, source in zip(asked, connection.sources, strict=True) if source.unreachable}
        found = await _found_by(asked, doubted, tokens, round_trip_s, _REPORT_SHARE * within_s)
    except BaseException:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)  # one may fail at this moment
        raise
    if not found:
        told = [task.result() for task in asked if task.done() and task.exception() is None]
        silent = [task.cancel() for task in asked if not task.done()]
        if told:
            return next((answer for answer in told if answer[0] is not None), told[0])
        if silent:
            raise TimeoutError
        # "Not found" does not speak for sources that were not reached.
        raise next((error for task in asked if not isinstance(error := task.exception(), NotFoundError)), None) or (
            asked[0].exception() or TimeoutError()
        )
    best = max(found, key=lambda source: (_tokens(found[source]), -source))
    connection.answered_by(best)
    for source, task in enumerate(asked):
        if task.done():
            _offer(connection, source, task, found[best])
        else:
            connection.offer(source, NOT_KNOWN)
            late = connection.meanwhile(_offered(connection, source, task, found[best]))
            late.add_done_callback(partial(_let_go, task))  # even if cancelled before its start
    return await asked[best]


async def _offered(connection: PlaySources, source: int, asked: asyncio.Future[Answered], played: Found) -> None:
    await asyncio.wait({asked})
    _offer(connection, source, asked, played)


def _let_go(asked: asyncio.Future[Answered], _: object) -> None:
    """End an unneeded lookup, which may fail at this moment."""
    if not asked.cancel() and not asked.cancelled():
        asked.exception()


def _offer(connection: PlaySources, source: int, asked: asyncio.Future[Answered], played: Found) -> None:
    """Record the tracks that a source shares with the play, and why others are excluded."""
    same: Collection[str] = frozenset()
    if (error := asked.exception()) is not None:
        why: str | None = str(error) or repr(error)
    elif not isinstance(answer := asked.result()[0], Found):
        why = "it has nothing of it"
    else:
        same, why = _same_tracks(played, answer)
    connection.offer(source, same)
    if why is not None:
        connection.left_out(source, why)


async def _found_by(
    asked: Sequence[asyncio.Future[Answered]],
    doubted: AbstractSet[asyncio.Future[Answered]],
    tokens: int,
    round_trip_s: float,
    within_s: float,
) -> dict[int, Found]:
    """Return the prefixes by source: a while after the first, or shortly after a complete one.

    After one answer, ``doubted`` sources, recently unreachable, are ignored. ``round_trip_s`` is the farthest source's;
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


def _answered(task: asyncio.Future[Answered]) -> bool:
    return task.done() and task.exception() is None


def _found(task: asyncio.Future[Answered]) -> Found | None:
    answer = None if task.exception() is not None else task.result()[0]
    return answer if isinstance(answer, Found) else None


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
    """Return the specs of a model, or of the only one; raise `UsageError` if ambiguous."""
    specs = [spec for spec in told if model in (None, spec.model)]
    names = sorted({spec.model for spec in specs})
    if len(names) > 1:
        raise UsageError(f"the origin has caches of several models: say which, model=...; there are {', '.join(names)}")
    if len(specs) > _MAX_SHAPES:
        raise UsageError(
            f"the origin has caches of {names[0]} in {len(specs)} shapes: give the spec of one, model=KVSpec(...)"
        )
    return specs


async def _longest(connection: Connection, tokens: Sequence[int], specs: Sequence[KVSpec], **how: Any) -> _Answer:
    """Return the longest cached prefix under any spec; raise an error only if there is none."""
    answers = await asyncio.gather(
        *(find_prefix(connection, tokens, spec, **how) for spec in specs),
        return_exceptions=True,
    )
    found = [answer for answer in answers if isinstance(answer, Found)]
    for answer in answers:
        if isinstance(answer, BaseException) and not found:
            raise answer
    unplayable = next((answer for answer in answers if isinstance(answer, Unplayable)), None)
    return max(found, key=_tokens, default=unplayable)


def _tokens(answer: _Answer) -> int:
    return answer.catalog.tokens if isinstance(answer, Found) else 0
