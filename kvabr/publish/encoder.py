"""Publishes a cache: run the model over a prompt, encode every group on every track, and measure the losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from kvabr.codec.base import codec, names
from kvabr.codec.columns import check_class, has_ac
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.group import largest
from kvabr.codec.profile import Profile, joined
from kvabr.codec.rope import rotate
from kvabr.publish.frames import FrameEncoder, holding_tracks, needs_profile, six
from kvabr.publish.model import ScoringEngine
from kvabr.publish.quality import MAX_PASSES, measure_mixes, measure_quality, sample_mixes
from kvabr.publish.reference import Reference
from kvabr.publish.tails import TailMeter, answered
from kvabr.store.asset import FrameStore
from kvabr.store.prompt import Prompt
from kvabr.types.catalog import Catalog, Mix, Quality
from kvabr.types.cost import PrefillCost
from kvabr.types.digests import SHA256
from kvabr.types.engine import Engine, prefill_classes, time_prefills
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import chain
from kvabr.types.passage import PassageNotes, check_movable, passage_chain
from kvabr.types.units import cache_length, snapshot_ends

Progress = Callable[[str, int, int], None]

STAGES = ("prefill", "encode", "time", "answers", "measure", "tails", "groups", "mix")
"""Stages of `publish`; steps of ``prefill`` are tokens. Without measurements ``encode`` is the last."""

ON_REQUEST = ("FP4",)
"""Tracks encoded only if named: FP4 is no smaller than Int4 and loses twice as much."""

RAW = "Raw"
"""The track that keeps the engine's elements. It is a default if no other track is exact."""

NO_SMALLER = ("FP16", "BF16", "FP8", "Int8")
"""Tracks at least as large as a quantised cache."""

_PREFILL_TOKENS = 512

_OWN_CLASSES = 16


@dataclass(frozen=True, eq=False)
class PassageBase:
    """The cache of a passage, for `publish`."""

    kv: torch.Tensor
    """[layer, K/V, head, token, dim] float32, keys before rotation."""
    notes: PassageNotes
    before: torch.Tensor
    """Exact cache of a neutral text, placed before the passage to measure losses."""

    def at(self, position: int, spec: KVSpec) -> torch.Tensor:
        """Return the cache rotated to a position in a prompt, in the engine's element type."""
        placed = self.kv.float().clone()
        placed[:, 0] = rotate(placed[:, 0], spec.rope, position)
        return placed.to(self.before.dtype)


def ordered_tracks(wanted: Sequence[str] | None, spec: KVSpec | None = None) -> tuple[str, ...]:
    """Return the tracks in coding order, each after its base.

    None means all tracks for ``spec`` except `ON_REQUEST`. Raise `FormatError` for an unknown codec, `UsageError` for a
    duplicate or a layer without its base.
    """
    if wanted is None:
        ac = spec is None or has_ac(spec)
        left_out = (*ON_REQUEST, *redundant_tracks(spec))
        wanted = [name for name in names() if name not in left_out and (ac or not codec(name).needs_profile)]
    if len(set(wanted)) != len(wanted) or not wanted:
        raise UsageError(f"tracks must be at least one, and each given only once, got {', '.join(wanted) or 'none'}")
    out: list[str] = []
    rest = list(wanted)
    while rest:
        ready = [name for name in rest if codec(name).refines is None or codec(name).refines in out]
        if not ready:
            raise UsageError(f"track {rest[0]} refines {codec(rest[0]).refines}: give {codec(rest[0]).refines} as well")
        out.append(ready[0])
        rest.remove(ready[0])
    return tuple(out)


def compute_cache(
    engine: Engine,
    tokens: Sequence[int],
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    spec: KVSpec | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute the exact cache of a prompt in pieces, in the engine's dtype.

    Return one tensor per layer class of ``spec`` (default: the engine's spec), [layer, K/V, head, token, dim] of all
    tokens, or of all snapshots of a state.
    """
    total, parts = len(tokens), (spec or engine.spec).parts
    if not total:
        raise UsageError("a prompt must have at least 1 token, got 0")
    snapshots = [snapshot_ends(part, total) for part in parts]
    ends = sorted({*range(_PREFILL_TOKENS, total, _PREFILL_TOKENS), total}.union(*snapshots))
    cache: tuple[torch.Tensor, ...] = ()
    pieces: tuple[torch.Tensor, ...] = ()
    for first, end in pairwise((0, *ends)):
        before = None
        if cache:
            held = zip(cache, pieces, snapshots, strict=True)
            before = tuple(piece if marks else place[:, :, :, :first] for place, piece, marks in held)
        pieces = prefill_classes(engine, tokens[first:end], before)
        if not cache:
            shapes = [part.shape(cache_length(part, total)) for part in parts]
            cache = tuple(piece.new_empty(shape) for piece, shape in zip(pieces, shapes, strict=True))
        for place, piece, marks in zip(cache, pieces, snapshots, strict=True):
            if not marks:
                place[:, :, :, first:end] = piece
            elif end in marks:
                row = marks.index(end) * piece.shape[3]
                place[:, :, :, row : row + piece.shape[3]] = piece
        progress(end, total)
    return cache


def _check_profile(spec: KVSpec, tracks: Sequence[str], profile: Profile | None) -> None:
    check_class(spec, next(track for track in tracks if codec(track).needs_profile))
    if profile is not None:
        profile.check(spec)


def own_profile(spec: KVSpec, exact: Sequence[torch.Tensor]) -> Profile:
    """Return a small profile for one cache: no transform, few tables."""
    plain = FitConfig(transform=False, classes=_OWN_CLASSES, sinks=min(FitConfig.sinks, int(exact[0].shape[3]) - 1))
    pairs = zip(spec.parts, exact, strict=True)
    return joined(spec, [fit(part, partial(list, (cache,)), plain) for part, cache in pairs])


def publish(
    engine: ScoringEngine,
    prompt: Prompt,
    tracks: Sequence[str],
    profile: Profile | None,
    store: FrameStore,
    *,
    passage: PassageBase | None = None,
    group_tokens: int | None = None,
    snapshots_every: int | None = None,
    source: str = "",
    salt: bytes = b"",
    digest: str = SHA256,
    questions: Sequence[Sequence[int]] = (),
    max_passes: int = MAX_PASSES,
    time_engine: bool = True,
    estimate: Callable[[FrameEncoder], Catalog] | None = None,
    named: Callable[[str], None] = lambda _digest: None,
    progress: Progress = lambda _stage, _done, _all: None,
    notify: Callable[[str], None] = lambda _line: None,
) -> Catalog:
    """Encode one prompt, measure or estimate its losses, and return its catalog; floats have six digits.

    Args:
        engine: the model.
        prompt: with its continuation.
        tracks: see `ordered_tracks`.
        profile: codec profile; None: fit a small profile to this cache, and publish it with the asset.
        store: keeps frames and profile, and returns frames for measuring.
        passage: the cache of a passage; None: the engine computes the prompt's cache.
        group_tokens: tokens per group (default: the engine's).
        snapshots_every: tokens between snapshots of a state, a multiple of the group size (default: the engine's).
        source: description for the catalog.
        salt: a tenant's secret, see `kvabr.types.naming.chain`. It is not stored, so `Prompt.sealed` must tie the token
        ids
            to the catalog.
        digest: kind of frame digests.
        questions: token ids, see `kvabr.publish.tails.questions`.
        max_passes: see `kvabr.publish.quality`.
        time_engine: True to time a few prefills for the catalog's cost model.
        estimate: builds a catalog with estimated losses; if given, no loss is measured. Not for passages.
        named: receives the prompt's digest before any computation; may raise to stop.
        progress: called after every step.
        notify: receives warnings as sentences.

    Raises:
        ForeignError: the profile is for another model.
        FormatError: an invalid group size or snapshot interval, tracks that cannot hold the cache, or a model without
            passages.
        NotFiniteError: NaN or infinity in the cache.
        UsageError: snapshots of a model without states.
    """
    spec = published_spec(engine.spec, group_tokens, snapshots_every)
    needing = needs_profile(tracks)
    if needing:
        _check_profile(spec, tracks, profile)
    chained = chain if passage is None else passage_chain
    chunks = chained(
        prompt.tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt
    )
    named(chunks[-1])
    exact = _exact(engine, prompt, passage, spec, partial(progress, "prefill"))
    if needing and profile is None:
        profile = own_profile(spec, exact if passage is None else (passage.at(0, spec),))
        notify(
            f"no profile of {spec.model}: the AC tracks use tables of this asset alone and need two to three times the "
            "bytes; make a profile with `kvabr calibrate`"
        )
    coded = exact if passage is None else (passage.kv,)
    held = holding_tracks(tracks, spec, [largest(kv, part) for kv, part in zip(coded, spec.parts, strict=True)])
    if left_out := [track for track in tracks if track not in held]:
        notify(f"the cache has numbers that {', '.join(left_out)} cannot hold; publishing without these tracks")
    tracks = held
    frames = FrameEncoder(
        spec,
        chunks,
        len(prompt.tokens),
        tracks,
        profile,
        store,
        position=0 if passage is None else passage.before.shape[3],
        passage=None if passage is None else passage.notes,
        digest=digest,
        finer_end=passage is None and estimate is None,  # engines reuse the last groups of estimated assets
    )
    frames.encode(coded, partial(progress, "encode"))
    del coded
    for track, count in frames.outliers.items():
        if count:
            notify(f"{track} stores {count:,} outliers of {len(prompt.tokens):,} tokens separately")
    if estimate is not None:
        return estimate(frames)
    decode_s = {}
    for index, track in enumerate(tracks):
        decode_s[track] = frames.decode_seconds(track)
        progress("time", index + 1, len(tracks) + 1)
    prefill: PrefillCost | None = None
    if time_engine and len(prompt.tokens) >= 128:
        prefill = PrefillCost.fit(time_prefills(engine, prompt.tokens))
        prefill = PrefillCost(**{name: six(value) for name, value in prefill.to_json().items()})
    progress("time", len(tracks) + 1, len(tracks) + 1)
    before = None if passage is None else passage.before
    reference = Reference(engine, exact, prompt.continuation, before=before)
    references = answered(engine, exact, questions, before, partial(progress, "answers"))
    meter = TailMeter(reference, references, prompt.tokens)
    measured = measure_quality(
        reference,
        exact,
        spec,
        tracks,
        frames.decode,
        tokens=len(prompt.tokens),
        max_passes=max_passes,
        meter=meter,
        progress=progress,
    )
    del exact
    qualities = {track: _rounded(one) for track, one in measured.quality.items()}
    catalog = frames.catalog(
        measured.loss,
        decode_s,
        loss_method=measured.method,
        source=source,
        measured=qualities,
        tails=measured.tails,
        prefill=prefill,
        asked=tuple(map(six, measured.asked)),
    )
    if not catalog.every_token or passage is not None:
        return catalog  # measuring mixes would recompute single groups
    mixes = measure_mixes(
        catalog, sample_mixes(catalog), reference, prompt.tokens, frames.decode, progress=partial(progress, "mix")
    )
    return replace(catalog, mixes=tuple(Mix(mix.tracks, six(mix.predicted), six(mix.measured)) for mix in mixes))


def _rounded(quality: Quality) -> Quality:
    return Quality(*(None if value is None else six(value) for value in astuple(quality)))  # type: ignore[arg-type]


def _exact(
    engine: Engine,
    prompt: Prompt,
    passage: PassageBase | None,
    spec: KVSpec,
    progress: Callable[[int, int], None],
) -> tuple[torch.Tensor, ...]:
    if passage is None:
        return compute_cache(engine, prompt.tokens, progress, spec=spec)
    check_movable(spec)
    if not prompt.tokens or passage.kv.shape[3] != len(prompt.tokens):
        raise UsageError(
            f"a passage and its cache must have the same number of tokens, at least 1; got {len(prompt.tokens)} and "
            f"{passage.kv.shape[3]}"
        )
    return (passage.at(passage.before.shape[3], spec),)


def published_spec(spec: KVSpec, group_tokens: int | None, snapshots_every: int | None) -> KVSpec:
    """Return ``spec`` with the given group size and snapshot interval."""
    if group_tokens is not None:
        spec = replace(spec, group_tokens=group_tokens)
    if snapshots_every is None:
        return spec
    states = [each.kind == "state" for each in spec.classes]
    if not any(states):
        raise UsageError(f"{spec.model} has no recurrent states to take snapshots of")
    pairs = zip(spec.classes, states, strict=True)
    return replace(
        spec, classes=tuple(replace(each, interval=snapshots_every) if state else each for each, state in pairs)
    )


def needs_raw(spec: KVSpec) -> bool:
    """Return True if only `RAW` is exact, as for quantised caches and float32 states."""
    return any(each.scales is not None or (each.kind == "state" and each.dtype == "float32") for each in spec.classes)


def redundant_tracks(spec: KVSpec | None) -> tuple[str, ...]:
    """Return the tracks that are redundant for the layer classes of ``spec`` (None: for 16-bit classes)."""
    if spec is None or not needs_raw(spec):
        return (RAW,)
    return NO_SMALLER if any(each.scales is not None for each in spec.classes) else ()
