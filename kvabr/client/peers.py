"""The peers of a client, and what they have: one connection each, which all plays share."""

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
"""Seconds for which a peer's list of models is believed. A prompt that is not found under it asks again sooner."""
_MAX_SHAPES = 4
"""Group sizes and shapes of one model in which a prompt is looked up."""
_PATIENCE, _MIN_PATIENCE_S = 4.0, 0.25
"""Time to look for other group sizes than an engine's: a multiple of what the first lookup took, with a floor."""
_SAID_SHARE = 0.9
"""Share of a lookup's time after which sources that have said nothing are not waited for."""
_LEAST_WAIT_S = 0.02
"""Time in which other sources of a play may answer after the first, at least."""
_AGAIN_S = 0.05
"""Pause before a prompt that nobody has begun to prefill is looked up again."""
_Answer = Found | Unplayable | None
Answered = tuple[_Answer, KVSpec | None]
"""What a peer has of a prompt, and the spec of its model."""
_Lookup = Callable[[Sequence[KVSpec]], Awaitable[_Answer]]


class ClientPeer:
    """An origin or a relay; `AsyncClient.peer` makes it."""

    def __init__(
        self,
        name: str,
        peer: PeerConnection,
        store: GroupCache,
        metrics: ClientMetrics,
        *,
        own: bool,
    ) -> None:
        """Dial nothing yet; for the arguments see `Downloads`."""
        self.name = name
        self.downloads = Downloads(peer, store, metrics, own=own)
        self._models: Sequence[KVSpec] = ()
        """Models of which we may read an asset, as of `_asked_s`."""
        self._asked_s = -math.inf
        """When the peer was asked for its models, on the event loop's clock."""

    @property
    def trouble(self) -> str | None:
        """What keeps it out of reach at the moment, in words; None if nothing is known to."""
        return self.downloads.peer.trouble

    @property
    def reached(self) -> bool:
        """Whether it is connected, or was."""
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
        """Return the longest cached prefix of a prompt, and the spec of its model; None for what is not there.

        The model is a spec, a name at the peer, or None for the only one that the peer has. Under a name, the prompt is
        looked up in each group size and shape that the peer has, at most four; under a spec with ``any_group_tokens``,
        also in the other sizes. With ``live``, what is still being prefilled is found, too; if nothing is, it is looked
        for again for ``wait_s`` seconds, and the answer is there by then. Errors as `AsyncClient.find`.
        """
        clock = asyncio.get_running_loop().time
        end_s = clock() + (wait_s if live else 0.0)
        await self.downloads.peer.connected()
        lookup = partial(_longest, connection, tokens, salt=salt, any_dtype=any_dtype, live=live)
        find = partial(self._find, connection, tokens, model, lookup, any_group_tokens=any_group_tokens)
        answer = await find()
        with contextlib.suppress(TimeoutError):  # what was answered last is still an answer
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
            with contextlib.suppress(ForeignError, UsageError):  # what was published since may change the answer
                specs = _shapes(recent, model)
                found = await lookup(specs)
                if isinstance(found, Found):
                    return found, found.catalog.spec
                tried = specs
        specs = _shapes(await self._ask(connection), model)
        found = found if specs == tried else await lookup(specs)
        return found, specs[0] if specs else None

    async def catalog(self, connection: Connection, name: TrackNamespace, *, live: bool) -> Answered:
        """Return the catalog of an asset whose name is known, as `find` does; errors as `AsyncClient.find_asset`."""
        await self.downloads.peer.connected()
        return await fetch_catalog(connection, name, live=live), None

    def relieve(self) -> None:
        """See `Connection.relieve`."""
        self.downloads.peer.relieve()

    async def close(self) -> None:
        """End all transfers, and the connection if this dialled it."""
        await self.downloads.close()

    async def _in_any_size(
        self, connection: Connection, tokens: Sequence[int], model: KVSpec, lookup: _Lookup
    ) -> _Answer:
        """Return the longest prefix in any group size; looking in other sizes may fail, and must not take long."""
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        others = asyncio.create_task(self._in_other_sizes(connection, model, lookup))
        try:
            found = await lookup([model])
            if _tokens(found) < len(tokens):
                with contextlib.suppress(TimeoutError):
                    other = await asyncio.wait_for(others, max(_MIN_PATIENCE_S, _PATIENCE * (clock() - begun_s)))
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
        """Return the models that the peer told of lately; None if it must be asked."""
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
"""What a play may name its peer by: from `AsyncClient.peer`, an open connection, a URL; None: the client's origin."""
PeersLike = PeerLike | Sequence[PeerLike]
"""One, or all that a play may take groups from."""


async def first_found(
    connection: PlaySources,
    lookups: Sequence[Coroutine[Any, Any, Answered]],
    tokens: int = 1,
    within_s: float = math.inf,
) -> Answered:
    """Return what the sources of a play have by one lookup at each, all at once: the longest prefix is played.

    The play does not wait long for the last of them once something has all ``tokens`` that it may, nor at all for those
    that could not be reached lately, and a little before ``within_s`` seconds have passed it takes what has been said.
    Of the others, those are sources that have the same asset, whenever they say so.
    """
    if len(lookups) == 1:
        connection.answered_by(0)
        return await lookups[0]
    asked = [asyncio.ensure_future(lookup) for lookup in lookups]
    try:
        round_trip_s = max((each or 0.0 for each in connection.round_trips), default=0.0)
        doubted = {task for task, source in zip(asked, connection.sources, strict=True) if source.unreachable}
        found = await _found_by(asked, doubted, tokens, round_trip_s, _SAID_SHARE * within_s)
    except BaseException:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)  # one may have failed at this very moment
        raise
    if not found:
        told = [task.result() for task in asked if task.done() and task.exception() is None]
        silent = [task.cancel() for task in asked if not task.done()]
        if told:
            return next((answer for answer in told if answer[0] is not None), told[0])
        if silent:
            raise TimeoutError
        # Who says that there is nothing does not speak for one that was not reached.
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
            late.add_done_callback(partial(_let_go, task))  # also if it is cancelled before it has begun
    return await asked[best]


async def _offered(connection: PlaySources, source: int, asked: asyncio.Future[Answered], played: Found) -> None:
    """Have a source that answers late join a play of what another one has."""
    await asyncio.wait({asked})
    _offer(connection, source, asked, played)


def _let_go(asked: asyncio.Future[Answered], _: object) -> None:
    """End a lookup that nobody waits for any more; it may have failed at this very moment."""
    if not asked.cancel() and not asked.cancelled():
        asked.exception()


def _offer(connection: PlaySources, source: int, asked: asyncio.Future[Answered], played: Found) -> None:
    """Note on which tracks a source that has answered has the groups of what is played; say why not on all."""
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
    """Return what was found of a prompt, by source: a while after the first, a short one once it is all of it.

    Nobody waits for the ``doubted``, whose sources could not be reached lately, once another has answered.
    ``round_trip_s`` is that to the farthest source; ``within_s`` is how long all may take.
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
            end_s = min(end_s, clock() + max(_LEAST_WAIT_S, took_s / 2))
        elif found and not waits:
            waits = True
            end_s = min(end_s, clock() + max(_MIN_PATIENCE_S, _PATIENCE * max(took_s, round_trip_s)))
    return found


def _answered(task: asyncio.Future[Answered]) -> bool:
    return task.done() and task.exception() is None


def _found(task: asyncio.Future[Answered]) -> Found | None:
    answer = None if task.exception() is not None else task.result()[0]
    return answer if isinstance(answer, Found) else None


def _same_tracks(one: Found, other: Found) -> tuple[Collection[str], str | None]:
    """Return the tracks on which two peers have the same groups of the same asset, complete; and what is wrong."""
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
    """Return the specs of a model, or of the only one if it is not named; raise `UsageError` if that is not clear."""
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
    """Return the longest cached prefix under any of some specs; raise an error only if nothing is found."""
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
