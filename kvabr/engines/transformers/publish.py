"""Publishes what a prefill computed: the ``past_key_values`` of a model become an asset that an origin serves.

A state exists only behind the tokens that were computed, and a prompt cannot go on from a later one. Of a model with
states, the cache of a prompt of n tokens is therefore published up to its last whole group before token n - 1: the
same prompt can be played to there, and any that begins alike. `prefill_prompt` keeps the snapshots that this needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvabr.codec.profile import Profile
from kvabr.data import default_catalog, default_profile_bytes
from kvabr.engines.transformers.cache import (
    SNAPSHOTS,
    States,
    cache_kv,
    has_states,
    new_cache,
    snapshots_of,
    states_of,
)
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.engines.transformers.ready_cache import prompt_ids
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot, read_profile
from kvabr.types.catalog import Catalog
from kvabr.types.errors import ForeignError, UsageError
from kvabr.types.kv import KVSpec


def cache_publisher(
    engine: TransformersEngine,
    root: Path,
    *,
    profile: Profile | None = None,
    prior: Catalog | None = None,
    tracks: Sequence[str] | None = None,
    queue: int = 4,
    most_bytes: int | None = None,
) -> Publisher:
    """Return a publisher for `publish_cache`; close it at the end.

    Args:
        engine: the model.
        root: the folder that `kvabr serve` serves.
        profile: codec profile of the model (`kvabr calibrate`); None: the one that kvabr ships, if it fits.
        prior: source of the expected losses, which a serving model has no time to measure: the catalog of an asset of
            the same model (`kvabr encode`); None: one of SmolLM2-135M.
        tracks: names of the tracks; None: FP16, Int8, Int4, with a profile the AC layers, and for states in float32
            Raw.
        queue: caches that may wait or be encoded at once.
        most_bytes: size limit of what engines publish in that folder: caches computed longest ago are removed first.
            None: unlimited.

    Raises:
        UsageError: a track needs a profile or is missing in the prior, or the folder cannot be made.
        ForeignError: the profile is of another model.
    """
    return Publisher(
        root,
        engine.spec,
        prior=prior or default_catalog(),
        tracks=tracks,
        profile=profile or find_profile(engine.spec),
        queue=queue,
        max_bytes=most_bytes,
        source="a prefill of transformers",
    )


def publish_cache(
    publisher: Publisher,
    engine: TransformersEngine,
    cache: object,
    tokens: Sequence[int] | torch.Tensor,
    *,
    salt: bytes = b"",
) -> Future[PublishOutcome]:
    """Publish the first tokens of a cache. The cache is copied at once; encoding goes on in the background.

    Of a model with states, what ends with the last snapshot among these tokens is published.

    Args:
        publisher: from `cache_publisher`.
        engine: the model.
        cache: the ``past_key_values`` of its output, for one prompt; of a model with states from `prefill_prompt`.
        tokens: ids of the prompt, or of the part that others will share. The cache may hold more.
        salt: a tenant's secret, see `kvabr.types.naming.chain`.

    Returns:
        The outcome: ``published``, ``known`` (published before), ``full`` (too many wait) or ``failed``.

    Raises:
        UsageError: there are fewer tokens than a group has or more than the cache holds, the cache has no snapshot of
            its states among them, or it was itself played with losses and would pass as exact.
        ModelError: the cache is quantised, static, has dropped what left its windows, or is another model's.
    """
    spec = engine.spec
    ids = prompt_ids(engine, tokens)
    if len(ids) < spec.group_tokens:
        raise UsageError(
            f"{len(ids)} tokens are fewer than a group has ({spec.group_tokens}): computing them again is cheaper "
            "than fetching them"
        )
    if loss := getattr(cache, "kvabr_loss", 0.0):
        raise UsageError(
            f"this cache was itself played with an expected loss of {loss:.2g} nats a token: published, it would pass "
            "as exact; publish what the model computed from the prompt alone"
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
    """Compute the cache of a prompt but for its last token, so that it can be published and text be generated.

    It goes to ``generate()`` as ``past_key_values``, with all ``input_ids``, and to `publish_cache` before that. Layers
    with windows keep all tokens. Of states, snapshots are kept: behind every `LayerClass.interval` tokens if the spec
    has one, and behind the last whole group.

    Args:
        engine: the model.
        tokens: the prompt: ids, or ``input_ids`` of a batch of one.

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


def _last_snapshot(cache: object, spec: KVSpec, tokens: int) -> int:
    """Return how many of the first tokens of a cache end with a snapshot that it has of its states."""
    kept = getattr(cache, SNAPSHOTS, None) or snapshots_of(cache, spec)
    found = [end for end in kept if spec.group_tokens <= end <= tokens]
    if not found:
        raise UsageError(
            f"{spec.model} has states, and the cache has none between token {spec.group_tokens} and {tokens}: prefill "
            f"more than {spec.group_tokens} tokens with `prefill_prompt`, which keeps them"
        )
    return max(found)


def find_profile(spec: KVSpec, path: Path | None = None) -> Profile | None:
    """Return the codec profile in a file; without one, the profile that kvabr ships if it is of this model.

    Raises:
        AssetError: the file cannot be read.
        FormatError: it is not a profile.
        ForeignError: it is of another model.
    """
    if path is None:
        profile = Profile.from_bytes(default_profile_bytes())
        try:
            profile.check(spec)
        except ForeignError:
            return None
        return profile
    profile = read_profile(path)
    try:
        profile.check(spec)
    except ForeignError as error:
        raise ForeignError(f"{path}: {error}") from error
    return profile
