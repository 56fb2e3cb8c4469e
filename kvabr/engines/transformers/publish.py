"""Publishes the cache of a prefill: the ``past_key_values`` of a model become an asset for an origin.

A cache has states only after its last token. So for a model with states, a cache of n tokens is published up to the
last whole group before token n - 1; `prefill_prompt` keeps the snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvabr.codec.profile import Profile
from kvabr.data import default_catalog
from kvabr.data.profiles import rebound, shipped_profile
from kvabr.engines.transformers.cache import (
    SNAPSHOTS,
    States,
    cache_kv,
    has_states,
    new_cache,
    read_cache,
    snapshots_of,
    states_of,
)
from kvabr.engines.transformers.engine import CHUNK, TransformersEngine
from kvabr.engines.transformers.ready_cache import prompt_ids
from kvabr.publish.live_publisher import LivePublisher, LiveSlot
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot, read_profile
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.digests import SHA256
from kvabr.types.errors import ForeignError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import akin
from kvabr.types.units import snapshot_ends


def cache_publisher(
    engine: TransformersEngine,
    root: Path,
    *,
    profile: Profile | None = None,
    prior: Catalog | None = None,
    tracks: Sequence[str] | None = None,
    queue: int = 4,
    max_bytes: int | None = None,
    digest: str = SHA256,
    keep_tokens: bool = False,
) -> Publisher:
    """Return a publisher for `publish_cache`; the caller must close it.

    Args:
        engine: the model.
        root: a folder for `kvabr serve`.
        profile: codec profile of the model (`kvabr calibrate`); None: the shipped one, if it fits.
        prior: catalog of the same model to estimate losses from (`kvabr encode`); None: SmolLM2-135M's.
        tracks: names of tracks; None: FP16, Int8, Int4, with a profile the AC layers, and for float32 states Raw.
        queue: maximum number of caches that wait or are being encoded.
        max_bytes: limit of engine assets in that folder, see `kvabr.store.quota`; None: no limit.
        digest: kind of the groups' digests, see `kvabr.types.digests`.
        keep_tokens: True to store the token ids, see `kvabr.publish.publisher.Publisher`.

    Raises:
        UsageError: a track needs a profile or is missing in the prior, or the folder cannot be created.
        ForeignError: the profile is for another model.
    """
    return Publisher(
        root,
        engine.spec,
        prior=prior or default_catalog(),
        tracks=tracks,
        profile=profile or find_profile(engine.spec),
        queue=queue,
        max_bytes=max_bytes,
        source="a prefill of transformers",
        digest=digest,
        keep_tokens=keep_tokens,
    )


def publish_cache(
    publisher: Publisher,
    engine: TransformersEngine,
    cache: object,
    tokens: Sequence[int] | torch.Tensor,
    *,
    salt: bytes = b"",
) -> Future[PublishOutcome]:
    """Publish the first tokens of a cache: copy them now, and encode them in the background.

    A cache with states is published up to its last snapshot within these tokens.

    Args:
        publisher: from `cache_publisher`.
        engine: the model.
        cache: the ``past_key_values`` of the model's output, for one prompt; with states, from `prefill_prompt`.
        tokens: ids of the prompt, or of the prefix to publish.
        salt: a tenant's secret, see `kvabr.types.naming.chain`.

    Returns:
        The outcome: ``published``, ``known`` (published before), ``full`` (queue full) or ``failed``.

    Raises:
        UsageError: fewer tokens than a group or more than the cache has, no snapshot within these tokens, or a cache
            that was itself played with losses.
        ModelError: the cache is quantised, static, lacks tokens outside windows, or is from another model.
    """
    spec = engine.spec
    ids = prompt_ids(engine, tokens)
    if len(ids) < spec.group_tokens:
        raise UsageError(
            f"a cache must have at least one group of {spec.group_tokens} tokens, got {len(ids)}: recomputing so few "
            "is cheaper than fetching them"
        )
    if loss := getattr(cache, "kvabr_loss", 0.0):
        raise UsageError(
            f"this cache was played with an expected loss of {loss:.2g} nats per token, and players would take it as "
            "exact; publish a cache computed from the prompt alone"
        )
    if has_states(spec) and hasattr(cache, "layers"):
        ids = ids[: _last_snapshot(cache, spec, len(ids))]
    done: Future[PublishOutcome] = Future()
    slot = publisher.reserve(ids, salt)
    if not isinstance(slot, Slot):
        done.set_result(PublishOutcome(slot))
        return done
    try:
        kv = cache_kv(cache, spec, len(ids))
    except BaseException:
        slot.leave()
        raise
    slot.fill(kv, done.set_result)
    return done


def prefill_prompt(engine: TransformersEngine, tokens: Sequence[int] | torch.Tensor) -> Any:
    """Compute the cache of a prompt, ids or ``input_ids``, except its last token, for publishing and generating.

    Pass the cache to `publish_cache`, then to ``generate()`` as ``past_key_values``, with all ``input_ids``. Window
    layers keep all tokens. States have snapshots every `LayerClass.interval` tokens, if set, and after the last whole
    group.

    Raises:
        UsageError: there is more than one prompt.
        ModelError: the tokens do not fit the model.
    """
    ids, spec = prompt_ids(engine, tokens)[:-1], engine.spec
    cache = new_cache(engine.model, whole=True)
    end = len(ids) // spec.group_tokens * spec.group_tokens
    every = [end, *(each.interval for each in spec.classes if each.interval is not None)]
    marks = (
        sorted({mark for apart in every if apart for mark in range(apart, end + 1, apart)}) if has_states(spec) else []
    )
    given = torch.tensor([ids], dtype=torch.long, device=engine.device)
    snapshots: dict[int, States] = {}
    for first, last in pairwise(sorted({0, *marks, len(ids)})):
        engine.extend(cache, given[:, first:last], first)
        if last in marks:
            snapshots[last] = {where: state.clone() for where, state in states_of(cache).items()}
    setattr(cache, SNAPSHOTS, snapshots)
    return cache


def prefill_live(
    live: LivePublisher,
    engine: TransformersEngine,
    tokens: Sequence[int] | torch.Tensor,
    *,
    pace: PrefillCost | None = None,
    salt: bytes = b"",
    run_tokens: int = CHUNK,
    always: bool = True,
    begun: Callable[[LiveSlot], object] = lambda _slot: None,
    progress: Callable[[int, int], object] = lambda _done, _all: None,
) -> tuple[Any, Future[PublishOutcome]]:
    """Compute the cache of a prompt and publish it at once, so that others can play it while it grows.

    If the model fails or is interrupted, the computed tokens are published as the cache of a shorter prompt.

    Args:
        live: a `kvabr.publish.live_publisher.LivePublisher` of a `cache_publisher`.
        engine: the model.
        tokens: ids of the prompt; omit its last token to continue with ``generate()``.
        pace: cost of a prefill; None: that of the prior if it is of this model, else a short prefill is timed.
        salt: a tenant's secret, see `kvabr.types.naming.chain`.
        run_tokens: tokens computed at a time; fewer towards the end, so that little is left to publish.
        always: True to also compute a cache that cannot be published, for instance because another process publishes
            it; False to return None instead.
        begun: called once the prompt is announced.
        progress: called with the computed tokens and all tokens.

    Returns:
        The cache, as from `prefill_prompt`, and the outcome, as from `publish_cache`.

    Raises:
        UsageError: there is more than one prompt, or ``run_tokens`` is less than 1.
        ModelError: the tokens do not fit the model.
    """
    ids, spec = prompt_ids(engine, tokens), engine.spec
    engine.check(ids)
    marks = {end for part in spec.parts for end in snapshot_ends(part, len(ids))}
    ends = runs(len(ids), run_tokens, spec.group_tokens, marks)
    done: Future[PublishOutcome] = Future()
    slot = live.begin(ids, pace=pace or _pace(live, engine, ids), salt=salt, done=done.set_result)
    if isinstance(slot, LiveSlot):
        begun(slot)
    else:
        done.set_result(PublishOutcome(slot))
        if not always:
            return None, done
    cache, given = new_cache(engine.model, whole=True), torch.tensor([ids], dtype=torch.long, device=engine.device)
    try:
        for first, last in pairwise((0, *ends)):
            engine.extend(cache, given[:, first:last], first)
            if isinstance(slot, LiveSlot):
                slot.groups(first, _run(cache, spec, first, last, len(ids)), last - first)
            progress(last, len(ids))
    except BaseException as error:
        if isinstance(slot, LiveSlot):
            slot.fail(str(error) or type(error).__name__)
        raise
    if isinstance(slot, LiveSlot):
        slot.end()
    return cache, done


def runs(tokens: int, max_tokens: int, group_tokens: int, marks: Iterable[int] = ()) -> list[int]:
    """Return the ends of the runs in which a prompt is computed; runs are shorter towards the end.

    Each run but the last ends with a group or at a mark.
    """
    if max_tokens < 1:
        raise UsageError(f"run_tokens must be at least 1, got {max_tokens}")
    ends, first = [], 0
    while first < tokens:
        half = -(-(tokens - first) // (2 * group_tokens)) * group_tokens
        longest = max(group_tokens, max_tokens // group_tokens * group_tokens)
        limit = min(first + min(half, longest), tokens)
        first = min((mark for mark in marks if first < mark < limit), default=limit)
        ends.append(first)
    return ends


def _run(cache: Any, spec: KVSpec, first: int, last: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Copy the last run of tokens of a cache, and for a state the snapshot at the run's end, if there is one."""
    pairs = zip(read_cache(cache, spec, first, last), spec.parts, strict=True)
    return tuple(
        kv[:, :, :, :0] if part.only.kind == "state" and last not in snapshot_ends(part, tokens) else kv
        for kv, part in pairs
    )


def _pace(live: LivePublisher, engine: TransformersEngine, ids: Sequence[int]) -> PrefillCost:
    prior = live.publisher.offer.prior
    if prior.prefill is not None and prior.spec.model == engine.spec.model:
        return prior.prefill
    first = ids[: engine.spec.group_tokens]
    for _ in range(2):  # the first prefill takes longer
        began_s = time.perf_counter()
        engine.prefill_classes(first)
        seconds = time.perf_counter() - began_s
    return PrefillCost.from_rate(len(first) / seconds)


def _last_snapshot(cache: object, spec: KVSpec, tokens: int) -> int:
    kept = getattr(cache, SNAPSHOTS, None) or snapshots_of(cache, spec)
    found = [end for end in kept if spec.group_tokens <= end <= tokens]
    if not found:
        raise UsageError(
            f"{spec.model} has states, and the cache has none between token {spec.group_tokens} and {tokens}: prefill "
            f"more than {spec.group_tokens} tokens with `prefill_prompt`, which keeps them"
        )
    return max(found)


def find_profile(spec: KVSpec, path: Path | None = None) -> Profile | None:
    """Return the codec profile in a file; without a path, the shipped profile for this shape, if any.

    A profile of the same model before fine-tuning or with other adapters fits, since the statistics hardly differ.
    Raise `AssetError` if the file cannot be read, `FormatError` if it is not a profile, `ForeignError` if it is for
    another model.
    """
    if path is None:
        shipped = shipped_profile(spec)
        return None if shipped is None else Profile.from_bytes(shipped.bound(spec))
    profile = read_profile(path)
    theirs = replace(profile.spec, model=spec.model, tokenizer=spec.tokenizer)
    if akin(profile.spec.model, spec.model) and theirs.same_cache(spec) and not profile.spec.same_cache(spec):
        profile = Profile.from_bytes(rebound(profile.to_bytes(), profile.spec, spec))
    try:
        profile.check(spec)
    except ForeignError as error:
        raise ForeignError(f"{path}: {error}") from error
    return profile
