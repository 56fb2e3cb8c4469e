"""One play, from a prompt to its cache: look it up, fetch what is cached, recompute what would be late.

It takes a connection, and an engine if there is one::

    async with kvabr.connect("moqt://origin.example/") as origin:
        played = await kvabr.play(origin, tokens, deadline=2.0, recompute=engine)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

from kvabr.client.lookup import fetch_catalog, find_prefix, shared_groups
from kvabr.client.orchestrator import Prepared, nothing, perform, prepare, recompute_all, timed, with_trouble
from kvabr.client.result import Clock, How, Played, PlayOptions
from kvabr.quic.interface import Connection
from kvabr.types.errors import FormatError, PlayError, TransportError, UsageError
from kvabr.types.events import LookupFailed
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace, chain

_LOOKUP_SHARE = 0.25
"""Share of the deadline that a lookup may take although the engine could then not recompute everything in time."""


async def play(
    origin: Connection,
    tokens: Sequence[int],
    *,
    deadline: float,
    spec: KVSpec | None = None,
    **how: Unpack[How],
) -> Played:
    """Get the KV cache of a prompt: the longest prefix that the origin has, as good as the deadline allows.

    Any number of plays may run at once on one connection. Cancelling one cancels its downloads.

    Args:
        origin: from `connect`.
        tokens: ids of the prompt.
        deadline: seconds from this call in which the cache is wanted. The engine's own time for what no cache covers
            comes out of it, if the engine is known.
        spec: of the model's cache; None: the engine's.
        how: see `How`: ``policy``, ``estimator``, ``recompute``, ``cost``, ``mode``, ``salt``, ``out``, ``dtype``,
            ``profiles``, ``patience``, ``log``, ``telemetry``, ``watch``, ``after``.

    Raises:
        UsageError: arguments that make no sense.
        PlayError: the cache can neither be fetched nor recomputed; the message says why.
        ModelError: the engine failed, and the network could not make up for it.
        PolicyError: from the policy or the estimator.
    """
    options = PlayOptions(deadline, **how)
    recompute = options.recompute
    if spec is None:
        if recompute is None:
            raise UsageError("play: say of which model the tokens are: spec=..., or recompute=an engine")
        spec = recompute.spec
    elif recompute is not None and not recompute.spec.same_cache(spec):
        raise UsageError(f"play: the engine computes caches of {recompute.spec.model}, not of {spec.model}")
    if not len(tokens):
        raise UsageError("play: a prompt has at least one token")
    with _telling(options) as options:
        return await _play(origin, tokens, spec, options)


async def play_asset(
    origin: Connection,
    namespace: TrackNamespace,
    *,
    deadline: float,
    tokens: Sequence[int] = (),
    **how: Unpack[How],
) -> Played:
    """Get the cache that is published under a name; `play` finds the name by the prompt.

    Args:
        origin: from `connect`.
        namespace: the name.
        deadline: seconds from this call in which the cache is wanted.
        tokens: ids of the asset's tokens; an engine needs them. If the asset has a salt, so does checking them.
        how: as for `play`.

    Raises:
        NotFoundError: there is no such asset, or none that we may read.
        TransportError: its catalog cannot be fetched.
        FormatError: its catalog is not what its name says, or none of its tracks can be decoded here.
        UsageError: arguments that make no sense, among them tokens that are not the asset's.
        PlayError: as `play`.
        ModelError: as `play`.
        PolicyError: as `play`.
    """
    options = PlayOptions(deadline, **how)
    recompute = options.recompute
    if recompute is not None and not len(tokens):
        raise UsageError("play_asset: to recompute, an engine needs the prompt: tokens=...")
    with _telling(options) as options:
        return await _play_asset(origin, namespace, tokens, options)


@contextmanager
def _telling(options: PlayOptions) -> Iterator[PlayOptions]:
    """The options of a play that tells of itself, from here to its end."""
    if options.telemetry is None:
        yield options
    else:
        with options.telemetry.play(options.log) as log:
            yield replace(options, log=log)


async def _play(origin: Connection, tokens: Sequence[int], spec: KVSpec, options: PlayOptions) -> Played:
    recompute = options.recompute
    options = await timed(options, tokens)
    clock = Clock(options.deadline_s)
    prepared: Prepared | None = None
    try:
        async with asyncio.timeout(_lookup_time(options, len(tokens))):
            found = await find_prefix(origin, tokens, spec, salt=options.salt)
        if found is not None:
            prepared = await prepare(origin, found, options, clock)
    except (TransportError, FormatError, TimeoutError) as error:
        reason = str(error) or with_trouble(f"no answer within {clock.now():.2f} s", origin)
        options.note(LookupFailed(0.0, reason))
        if recompute is None:
            raise PlayError(f"what the origin has of this prompt cannot be played: {reason}") from error
    if prepared is not None:
        return await perform(origin, prepared, tokens, options, clock)
    if recompute is not None:
        return await recompute_all(tokens, options, clock)
    return nothing(spec, options, clock)


async def _play_asset(
    origin: Connection, namespace: TrackNamespace, tokens: Sequence[int], options: PlayOptions
) -> Played:
    deadline, recompute = options.deadline_s, options.recompute
    options = await timed(options, tokens)
    clock = Clock(deadline)
    try:
        async with asyncio.timeout(deadline):
            found = await fetch_catalog(origin, namespace)
    except TimeoutError as error:
        late = f"the catalog did not come within the deadline of {deadline:g} s"
        raise PlayError(with_trouble(late, origin)) from error
    spec = found.catalog.spec
    if recompute is not None and not recompute.spec.same_cache(spec):
        raise UsageError(f"the engine computes caches of {recompute.spec.model}, the asset is of {spec.model}")
    if len(tokens):
        name = {"model": spec.model, "tokenizer": spec.tokenizer}
        ours = chain(tokens, **name, group_tokens=spec.group_tokens, salt=options.salt)
        if len(tokens) != found.catalog.tokens or shared_groups(found.catalog, tokens, ours) < found.catalog.groups:
            raise UsageError(f"the tokens given are not those of {namespace.model}/{namespace.prompt}")
    prepared = await prepare(origin, found, options, clock)
    return await perform(origin, prepared, tokens, options, clock)


def _lookup_time(options: PlayOptions, tokens: int) -> float:
    """Seconds that a lookup may take: as long as the engine could still recompute everything in time."""
    if options.cost is None:
        return options.deadline_s
    spare = options.deadline_s - options.guard_s - options.cost.seconds(0, tokens)
    return max(spare, _LOOKUP_SHARE * options.deadline_s)
