"""Publishes a cache: run the model over a prompt, encode every group on every track, measure what each costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvabr.codec.base import codec
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.profile import Profile
from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.publish.frames import FrameBook
from kvabr.publish.mixes import measure_mixes, sample_mixes
from kvabr.publish.quality import MAX_PASSES, measure_quality
from kvabr.publish.score import Reference, ScoringEngine
from kvabr.store.asset import Prompt
from kvabr.types.catalog import Catalog, Mix, Quality, Track
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import time_prefills
from kvabr.types.errors import UsageError
from kvabr.types.kv import GROUP_TOKENS, KVSpec
from kvabr.types.naming import TrackNamespace, chain

Progress = Callable[[str, int, int], None]
"""Told of every step: what is being done, steps done, steps in all."""

STAGES = ("prefill", "encode", "time", "measure", "mix")
"""What `publish` does, in this order; ``prefill`` counts tokens."""

_OWN_CLASSES = 16
"""Classes of rows in a profile that is estimated from one asset, and travels with it."""

_TOP = 65504.0
"""FP16's largest number."""

_CHARACTERS_PER_TOKEN = 16
"""More than any text has on average: so much of a long text is tokenised at first."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """Where frames are kept while they are made and measured."""

    put: Callable[[int, str, bytes], None]
    get: Callable[[int, str], bytes]
    profile: Callable[[bytes], None] = lambda _data: None
    """Takes the file of the profile, if a track needs one."""

    @classmethod
    def in_memory(cls) -> Keeper:
        """A keeper for measurements that leave nothing behind."""
        kept: dict[tuple[int, str], bytes] = {}
        return cls(lambda group, track, frame: kept.__setitem__((group, track), frame), lambda *key: kept[key])


def cut_prompt(bed: LoadedModel, text: str, tokens: int, continuation: int) -> Prompt:
    """The first tokens of a text as a prompt, and the ones after it as its continuation.

    Raises:
        UsageError: the text is too short, or the model cannot see so many tokens.
    """
    if tokens < 1 or continuation < 2:
        raise UsageError("a prompt takes at least 1 token, and a continuation at least 2 to measure the loss on")
    wanted = tokens + continuation
    if wanted > bed.engine.context:
        raise UsageError(
            f"{tokens} tokens and {continuation} of continuation do not fit {bed.engine.spec.model}, which sees "
            f"{bed.engine.context} at most: ask for --tokens {max(0, bed.engine.context - continuation)} or fewer"
        )
    head = text[: wanted * _CHARACTERS_PER_TOKEN]
    ids = bed.encode(head)
    # The cut may fall within a word, so tokens near it do not count.
    if len(head) < len(text) and len(ids) < wanted + 16:
        ids = bed.encode(text)
    if len(ids) < wanted:
        raise UsageError(
            f"the text has {len(ids)} tokens, but {tokens} and {continuation} of continuation were asked for: give a "
            f"longer text, or --tokens {max(0, len(ids) - continuation)}"
        )
    return Prompt(tuple(ids[:tokens]), tuple(ids[tokens:wanted]))


def compute_cache(
    engine: ScoringEngine, tokens: Sequence[int], progress: Callable[[int, int], None] = lambda _done, _all: None
) -> torch.Tensor:
    """The exact cache of a prompt, [layer, K/V, head, token, dim] in the engine's dtype, computed group by group."""
    # Four groups at a time: large enough for the matrix units, small enough to see it move.
    step = 4 * GROUP_TOKENS
    cache: torch.Tensor | None = None
    for first in range(0, len(tokens), step):
        before = None if cache is None else cache[:, :, :, :first]
        part = engine.prefill(tokens[first : first + step], before)
        if cache is None:
            cache = part.new_empty(engine.spec.shape(len(tokens)))
        cache[:, :, :, first : first + step] = part
        progress(min(first + step, len(tokens)), len(tokens))
    if cache is None:
        raise UsageError("a prompt takes at least 1 token")
    return cache


def own_profile(spec: KVSpec, exact: torch.Tensor) -> Profile:
    """A profile for one cache alone, where the model has none: no transform, few tables, so that it is small.

    Args:
        spec: the cache's spec.
        exact: the cache, [layer, K/V, head, token, dim].
    """
    tokens = int(exact.shape[3])
    plain = FitConfig(transform=False, classes=_OWN_CLASSES, sinks=min(FitConfig.sinks, tokens - 1))
    return fit(spec, lambda: [exact], plain)


def publish(
    engine: ScoringEngine,
    prompt: Prompt,
    tracks: Sequence[str],
    profile: Profile | None,
    keeper: Keeper,
    *,
    source: str = "",
    salt: bytes = b"",
    max_passes: int = MAX_PASSES,
    time_engine: bool = True,
    progress: Progress = lambda _stage, _done, _all: None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Catalog:
    """Encode and measure one prompt.

    Args:
        engine: the model.
        prompt: what to publish, and what really followed.
        tracks: names of the tracks, see `kvabr.publish.frames.ordered_tracks`.
        profile: side information of the model, for the tracks that need it; None: one is estimated from this very
            cache, small and without a transform, and published with it.
        keeper: takes every frame, and gives it back for measuring; and the profile.
        source: what the prompt is, in words, for the catalog.
        salt: a tenant's secret, see `kvabr.types.naming.chain`; it is not kept, and then `Prompt.sealed` must tie the
            token ids to the catalog.
        max_passes: forward passes for attributing losses to groups, see `kvabr.publish.quality`.
        time_engine: whether to time a few prefills for the catalog's cost model.
        progress: told of every step.
        tell: told, in words, what is unusual about the cache.

    Returns:
        The catalog, with measured losses, decode times and mixes. Floats have six significant digits.

    Raises:
        ForeignError: the profile is of another model.
    """
    spec = engine.spec
    needing = [track for track in tracks if codec(track).needs_profile]
    if not needing:
        profile = None
    if profile is not None:
        profile.check(spec)
    exact = compute_cache(engine, prompt.tokens, lambda done, total: progress("prefill", done, total))
    if needing:
        if profile is None:
            profile = own_profile(spec, exact)
            tell(
                f"no profile of {spec.model}: the AC tracks have tables of this asset alone and take two to three "
                "times the bytes; `kvabr calibrate` makes a profile"
            )
        keeper.profile(profile.to_bytes())
    chunks = chain(prompt.tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
    book = FrameBook(spec, chunks, len(prompt.tokens), tracks, profile, put=keeper.put, get=keeper.get)
    book.encode(exact, lambda done, total: progress("encode", done, total))
    if book.replaced:
        tell(f"{book.replaced:,} numbers of the cache were NaN, infinite or beyond FP16; they were replaced")
        # A model that is given what is not finite says nothing that anything could be compared with.
        exact = torch.nan_to_num(exact, nan=0.0, posinf=_TOP, neginf=-_TOP)
    for track, count in book.aside.items():
        if count:
            tell(f"{track} keeps {count:,} of {len(prompt.tokens):,} tokens aside, which stand out")
    decode_s = {}
    for index, track in enumerate(tracks):
        decode_s[track] = book.decode_seconds(track)
        progress("time", index + 1, len(tracks) + 1)
    prefill: PrefillCost | None = None
    if time_engine and len(prompt.tokens) >= 128:
        prefill = time_prefills(engine, prompt.tokens)
        prefill = PrefillCost(*(_six(value) for value in prefill.to_json().values()))
    progress("time", len(tracks) + 1, len(tracks) + 1)
    reference = Reference(engine, exact, prompt.continuation)
    measured = measure_quality(
        reference,
        exact,
        spec,
        tracks,
        book.decode,
        max_passes=max_passes,
        progress=lambda done, total: progress("measure", done, total),
    )
    del exact
    catalog = Catalog(
        namespace=TrackNamespace(spec.model, chunks[-1]),
        spec=spec,
        tokens=len(prompt.tokens),
        chunks=tuple(chunks),
        tracks=tuple(
            Track(
                name=track,
                bytes=tuple(book.bytes[track]),
                loss=tuple(map(_six, measured.loss[track])),
                digests=tuple(book.digests[track]),
                refines=codec(track).refines,
                decode_s=_six(decode_s[track]),
                measured=_round(measured.quality[track]),
            )
            for track in tracks
        ),
        profile=None if profile is None else profile.digest,
        profile_bytes=0 if profile is None else len(profile.to_bytes()),
        prefill=prefill,
        loss_method=measured.method,
        source=source,
    )
    mixes = measure_mixes(
        catalog,
        sample_mixes(catalog),
        reference,
        prompt.tokens,
        book.decode,
        progress=lambda done, total: progress("mix", done, total),
    )
    return replace(catalog, mixes=tuple(Mix(mix.tracks, _six(mix.predicted), _six(mix.measured)) for mix in mixes))


def _round(quality: Quality) -> Quality:
    return Quality(_six(quality.kl), _six(quality.dnll), _six(quality.top1))


def _six(value: float) -> float:
    return float(f"{value:.6g}")
