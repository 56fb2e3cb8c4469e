"""One play, from a prompt to its cache: look it up, fetch what is cached, recompute what would be late.

It takes a connection, and an engine if there is one::

    async with kvabr.connect("moqt://origin.example/") as origin:
        played = await kvabr.play(origin, tokens, deadline=2.0, recompute=engine)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from kvabr.abr.policies import DEFAULT
from kvabr.client.lookup import fetch_catalog, find_prefix, shared_groups
from kvabr.client.perform import Prepared, nothing, perform, prepare, recompute_all, timed, with_trouble
from kvabr.client.played import Clock, Log, Played, PlayOptions
from kvabr.client.watch import Watch
from kvabr.errors import FormatError, PlayError, TransportError, UsageError
from kvabr.kv import KVSpec
from kvabr.naming import TrackNamespace, chain
from kvabr.recompute.cost import PrefillCost
from kvabr.recompute.engine import Engine
from kvabr.recompute.planner import EngineMode
from kvabr.transport.base import Connection

_LOOKUP_SHARE = 0.25
"""Share of the deadline that a lookup may take although the engine could then not recompute everything in time."""


async def play(
    origin: Connection,
    tokens: Sequence[int],
    *,
    deadline: float,
    policy: str = DEFAULT,
    estimator: str | None = None,
    recompute: Engine | None = None,
    cost: PrefillCost | None = None,
    mode: EngineMode | None = None,
    spec: KVSpec | None = None,
    salt: bytes = b"",
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    profiles: Path | None = None,
    patience: float = 10.0,
    log: Log | None = None,
    watch: Watch | None = None,
) -> Played:
    """Get the KV cache of a prompt: the longest prefix that the origin has, as good as the deadline allows.

    Any number of plays may run at once on one connection. Cancelling one cancels its downloads.

    Args:
        origin: from `connect`.
        tokens: ids of the prompt.
        deadline: seconds from this call in which the cache is wanted. The engine's own time for what no cache covers
            comes out of it, if the engine is known.
        policy: ABR policy, see `kvabr policies`.
        estimator: bandwidth estimator; None: the policy's own.
        recompute: an engine that computes what would be late, or, if nothing is cached, everything.
        cost: what its prefill costs; None: it is timed at its first play, before the deadline begins to count, see
            `kvabr.prefill_cost`.
        mode: what the engine can recompute; None: what it says itself.
        spec: of the model's cache; None: the engine's.
        salt: the tenant's secret, see `kvabr.naming.chain`.
        out: where to put the cache, [layer, K/V, head, token, dim] with room for all tokens; None: a new tensor.
        dtype: element type of the new tensor; None: that of the cache.
        profiles: folder where codec profiles are kept from one process to the next; None: nowhere.
        patience: deadlines after which a play that cannot be completed ends, beside what the engine needs.
        log: takes every event of the play, one dictionary each.
        watch: called with a snapshot some fifty times per deadline, on the event loop's thread.

    Raises:
        UsageError: arguments that make no sense.
        PlayError: the cache can neither be fetched nor recomputed; the message says why.
        ModelError: the engine failed, and the network could not make up for it.
        PolicyError: from the policy or the estimator.
    """
    options = PlayOptions(
        deadline, policy, estimator, recompute, cost, mode, salt, out, dtype, profiles, patience, log, watch
    )
    if spec is None:
        if recompute is None:
            raise UsageError("play: say of which model the tokens are: spec=..., or recompute=an engine")
        spec = recompute.spec
    elif recompute is not None and recompute.spec.digest() != spec.digest():
        raise UsageError(f"play: the engine computes caches of {recompute.spec.model}, not of {spec.model}")
    if not len(tokens):
        raise UsageError("play: a prompt has at least one token")
    options = await timed(options, tokens)
    clock = Clock(deadline)
    prepared: Prepared | None = None
    try:
        async with asyncio.timeout(_lookup_time(options, len(tokens))):
            found = await find_prefix(origin, tokens, spec, salt=salt)
        if found is not None:
            prepared = await prepare(origin, found, options, clock)
    except (TransportError, FormatError, TimeoutError) as error:
        reason = str(error) or with_trouble(f"no answer within {clock.now():.2f} s", origin)
        options.note("lookup_failed", 0.0, reason=reason)
        if recompute is None:
            raise PlayError(f"what the origin has of this prompt cannot be played: {reason}") from error
    if prepared is not None:
        return await perform(origin, prepared, tokens, options, clock)
    if recompute is not None:
        return await recompute_all(tokens, options, clock)
    return nothing(spec, options, clock)


async def play_asset(
    origin: Connection,
    namespace: TrackNamespace,
    *,
    deadline: float,
    tokens: Sequence[int] = (),
    policy: str = DEFAULT,
    estimator: str | None = None,
    recompute: Engine | None = None,
    cost: PrefillCost | None = None,
    mode: EngineMode | None = None,
    salt: bytes = b"",
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    profiles: Path | None = None,
    patience: float = 10.0,
    log: Log | None = None,
    watch: Watch | None = None,
) -> Played:
    """Get the cache that is published under a name; `play` finds the name by the prompt.

    Args:
        origin: from `connect`.
        namespace: the name.
        deadline: seconds from this call in which the cache is wanted.
        tokens: ids of the asset's tokens; an engine needs them.
        policy: as for `play`.
        estimator: as for `play`.
        recompute: as for `play`.
        cost: as for `play`.
        mode: as for `play`.
        salt: as for `play`; needed where tokens are given of an asset that has one.
        out: as for `play`.
        dtype: as for `play`.
        profiles: as for `play`.
        patience: as for `play`.
        log: as for `play`.
        watch: as for `play`.

    Raises:
        NotFoundError: there is no such asset, or none that we may read.
        TransportError: its catalog cannot be fetched.
        FormatError: its catalog is not what its name says, or none of its tracks can be decoded here.
        UsageError: arguments that make no sense, among them tokens that are not the asset's.
        PlayError: as `play`.
        ModelError: as `play`.
        PolicyError: as `play`.
    """
    if recompute is not None and not len(tokens):
        raise UsageError("play_asset: to recompute, an engine needs the prompt: tokens=...")
    options = PlayOptions(
        deadline, policy, estimator, recompute, cost, mode, salt, out, dtype, profiles, patience, log, watch
    )
    options = await timed(options, tokens)
    clock = Clock(deadline)
    try:
        async with asyncio.timeout(deadline):
            found = await fetch_catalog(origin, namespace)
    except TimeoutError as error:
        late = f"the catalog did not come within the deadline of {deadline} s"
        raise PlayError(with_trouble(late, origin)) from error
    spec = found.catalog.spec
    if recompute is not None and recompute.spec.digest() != spec.digest():
        raise UsageError(f"the engine computes caches of {recompute.spec.model}, the asset is of {spec.model}")
    if len(tokens):
        ours = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
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
