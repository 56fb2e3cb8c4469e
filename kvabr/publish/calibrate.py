"""Calibrates a codec profile: run the model over diverse texts, and take the statistics of its caches."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import IO

import torch

from kvabr.codec.columns import check_class
from kvabr.codec.fit import PASSES, FitConfig, fit_tables, fit_transform
from kvabr.codec.group import clean, largest_number
from kvabr.codec.payload import raw
from kvabr.codec.profile import Profile, joined
from kvabr.publish.model import CalibrationEngine, TextModel, opened
from kvabr.publish.quality import Reference
from kvabr.publish.target import Chosen, HeldOutText, StepSearch, Target
from kvabr.types.engine import prefill_classes
from kvabr.types.errors import AssetError, UsageError
from kvabr.types.kv import KVSpec

CONTEXTS = 24
"""Default number of contexts."""

CONTEXT_TOKENS = 1024
"""Default tokens of a context."""

_SCORED_SHARE = 4
"""The last quarter of a context is scored, to see which errors in the cache of the rest matter."""

STAGES = ("prefill", *PASSES)
"""Stages of `calibrate` for a model with one layer class, in order; each has one step per context."""

SEARCH = "steps"
"""Stage in which steps are searched for; each of its steps measures a loss."""

_SNAPSHOTS = 8
"""Parts of a context; at the ends of all but the first, snapshots are taken of its states."""

_HELD_OUT = 6
"""With a target, one in this many contexts is kept from the fit, to measure on."""

Cache = tuple[torch.Tensor, ...]
"""A tensor per layer class."""
Progress = Callable[[str, int, int], None]
"""Called with a stage, its steps done, and its steps in all."""


def cut_contexts(texts: Mapping[str, Sequence[int]], contexts: int, tokens: int) -> list[tuple[str, Sequence[int]]]:
    """Cut contexts out of tokenised texts: evenly spaced, none overlapping, more from longer texts, one from each.

    Args:
        texts: token ids by name; `UsageError` if there is none.
        contexts: how many; there is at least one per text.
        tokens: length of each; a shorter text gives one shorter context.

    Returns:
        Pairs of a text's name and a context's token ids.
    """
    sizes = {name: len(ids) for name, ids in texts.items() if ids}
    if not sizes:
        raise UsageError("calibration needs at least one text that is not empty")
    total = sum(sizes.values())
    out = []
    for name, size in sizes.items():
        count = max(1, min(size // tokens, round(contexts * size / total)))
        length = min(tokens, size)
        for index in range(count):
            start = index * (size - length) // max(1, count - 1)
            out.append((name, texts[name][start : start + length]))
    return out


def stages(spec: KVSpec, *, search: bool = False) -> tuple[str, ...]:
    """Return the stages of `calibrate` for a model, in order: the passes over the caches of each layer class."""
    names = spec.names if len(spec.classes) > 1 else ("",)
    *first, last = ([_stage(name, stage) for name in names for stage in half] for half in (PASSES[:-1], PASSES[-1:]))
    return ("prefill", *(stage for half in first for stage in half), *([SEARCH] if search else ()), *last)


def _stage(name: str, stage: str) -> str:
    return f"{name}: {stage}" if name else stage


def calibrate(
    model: TextModel,
    texts: Mapping[str, str],
    *,
    contexts: int = CONTEXTS,
    tokens: int | None = None,
    config: FitConfig | None = None,
    target: Target | None = None,
    progress: Progress = lambda _stage, _done, _all: None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Profile:
    """Return a profile of a model, made from texts: of every layer class, if it has several.

    The arguments are those of `calibrate_scaled`.
    """
    made = calibrate_scaled(
        model, texts, contexts=contexts, tokens=tokens, config=config, target=target, progress=progress, tell=tell
    )
    return made[0]


def calibrate_scaled(
    model: TextModel,
    texts: Mapping[str, str],
    *,
    scales: Sequence[float] = (1.0,),
    contexts: int = CONTEXTS,
    tokens: int | None = None,
    config: FitConfig | None = None,
    target: Target | None = None,
    progress: Progress = lambda _stage, _done, _all: None,
    tell: Callable[[str], None] = lambda _line: None,
) -> list[Profile]:
    """Return a profile for every scale of the steps. All have the same transforms; only steps and tables differ.

    Args:
        model: the model with its tokenizer.
        texts: by name; the more they differ, the better the profile fits other texts.
        scales: what to multiply all steps with, which ``config`` or the target gives.
        contexts: contexts to cut out of them, see `cut_contexts`.
        tokens: tokens of each; None: `CONTEXT_TOKENS`, or as many as the model sees. Caches and gradients are kept in
            temporary files, 16 bits per element; memory holds one at a time.
        config: settings of the fit.
        target: the loss that one track may have, measured on a sixth of the contexts, which the fit does not see. All
            steps of a layer class are scaled alike, so the other tracks move with it. None: `config`'s steps.
        progress: called after every step of each of `stages`.
        tell: called, in words, with what the search has found.

    Raises:
        UsageError: there is no text, contexts are longer than the model sees, or the target cannot be met.
        FormatError: there are no AC tracks of a layer class.
        AssetError: the disk has no room for the caches.
    """
    engine, config = model.engine, config or FitConfig()
    check_class(engine.spec, "AC")
    if tokens is None:
        tokens = min(CONTEXT_TOKENS, engine.context)
    if contexts < 1 or not 16 <= tokens <= engine.context:
        raise UsageError(f"a calibration takes at least 1 context of 16 to {engine.context} tokens")
    cuts = [
        (name, opened(model, ids))
        for name, ids in cut_contexts(
            {name: model.encode(text) for name, text in texts.items()}, contexts, tokens - len(model.opening)
        )
    ]
    held: set[int] = set() if target is None else set(range(0, len(cuts), _HELD_OUT))
    if len(held) == len(cuts):
        raise UsageError("--target-kl keeps a context from the fit to measure on: give at least 2, --contexts 2")
    try:
        with ExitStack() as files:
            classes = []
            for part in engine.spec.parts:
                spools = (files.enter_context(tempfile.TemporaryFile(prefix="kvabr-calibrate-")) for _ in range(2))
                classes.append(_Class(part, next(spools), next(spools)))
            samples = _prefill(engine, [ids for _, ids in cuts], held, classes, partial(progress, "prefill"))
            count = len(cuts) - len(held)
            configs = [config] * len(classes)

            def told(each: _Class) -> Callable[[str, int], None]:
                return lambda stage, done: progress(_stage(each.name, stage), done, count)

            transforms = [
                fit_transform(each.spec, each.caches.read, config, told(each), gradients=each.gradients.read)
                for each in classes
            ]
            if target is not None:
                chosen = StepSearch(transforms, config, samples, target, partial(progress, SEARCH)).choose()
                # All tracks have the class's steps; what keys and values differ in is their unit.
                means = [math.exp(fmean(map(math.log, own))) for own in chosen.factors]
                configs = [config.scaled(mean) for mean in means]
                transforms = [
                    made.scaled([factor / mean for factor in own])
                    for made, mean, own in zip(transforms, means, chosen.factors, strict=True)
                ]
                tell(_found(engine.spec, chosen, target, len(samples)))
            triples = list(zip(classes, transforms, configs, strict=True))
            return [
                joined(
                    engine.spec,
                    [fit_tables(made, each.caches.read, own.scaled(scale), told(each)) for each, made, own in triples],
                )
                for scale in scales
            ]
    except OSError as error:
        raise AssetError(
            f"{tempfile.gettempdir()}: no room for the caches of {len(cuts)} contexts ({error})"
        ) from error


def _prefill(
    engine: CalibrationEngine,
    cuts: Sequence[Sequence[int]],
    held: Collection[int],
    classes: Sequence[_Class],
    progress: Callable[[int, int], None],
) -> list[HeldOutText]:
    """Compute all caches; keep those that are held out, and store the others with their gradients."""
    samples = []
    for number, ids in enumerate(cuts):
        scored = len(ids) // _SCORED_SHARE
        cache, kept = _caches(engine, ids, len(ids) - scored)
        if number in held:
            samples.append(HeldOutText(kept, Reference(engine, kept, ids[-scored:])))
        else:
            gradients = engine.gradient_classes(kept, ids[-scored:], seed=number)
            for each, part, slope in zip(classes, cache, gradients, strict=True):
                each.caches.add(part)
                each.gradients.add(slope)
        progress(number + 1, len(cuts))
    return samples


def _caches(engine: CalibrationEngine, ids: Sequence[int], end: int) -> tuple[Cache, Cache]:
    """Return the cache of a context, with several snapshots of each state, and that of its first ``end`` tokens."""
    parts, total = engine.spec.parts, len(ids)
    states = [part.only.kind == "state" for part in parts]
    marks = {end, *(total * step // _SNAPSHOTS for step in range(2, _SNAPSHOTS))} if any(states) else ()
    pieces: list[Cache] = []
    whole: Cache | None = None
    for first, last in pairwise(sorted({0, *marks, total})):
        pieces.append(prefill_classes(engine, ids[first:last], whole))
        before = pieces[-1] if whole is None else whole
        whole = tuple(
            piece if whole is None or state else torch.cat((one, piece), dim=3)
            for one, piece, state in zip(before, pieces[-1], states, strict=True)
        )
        if last == end or not marks:
            kept = whole
    # A cache of 16 bits may hold infinities, behind which all probabilities are NaN.
    clear = (
        clean(one if state else one[:, :, :, :end], largest_number(part))[0]
        for one, part, state in zip(kept, parts, states, strict=True)
    )
    return tuple(torch.cat(part, dim=3) for part in zip(*pieces, strict=True)), tuple(clear)


def _found(spec: KVSpec, chosen: Chosen, target: Target, samples: int) -> str:
    words = []
    for name, own in zip(spec.names, chosen.factors, strict=True):
        of = f" of {name}" if len(spec.classes) > 1 else ""
        whose = ("keys", "values") if len(own) > 1 else ("keys and values",)
        words += [f"{factor:.3g} ({kind}{of})" for kind, factor in zip(whose, own, strict=True)]
    factors = ", ".join(words)
    return f"steps times {factors}: {target.track} loses {chosen.kl:.3g} nats per token on {samples} contexts"


class _Class:
    """A layer class: its spec, and its caches and gradients in temporary files."""

    def __init__(self, spec: KVSpec, caches: IO[bytes], gradients: IO[bytes]) -> None:
        self.spec, self.name = spec, "" if spec.part_of is None else spec.part_of[1]
        self.caches, self.gradients = _Spool(caches, spec), _Spool(gradients, spec, torch.bfloat16)


class _Spool:
    """Tensors of one spec in a file, one after the other: `add` appends, `read` yields all."""

    def __init__(self, file: IO[bytes], spec: KVSpec, dtype: torch.dtype | None = None) -> None:
        self._file, self._spec, self._dtype = file, spec, dtype or spec.torch_dtype
        self._tokens: list[int] = []

    def add(self, cache: torch.Tensor) -> None:
        self._file.write(raw(cache.to(self._dtype)))
        self._tokens.append(cache.shape[3])

    def read(self) -> Iterator[torch.Tensor]:
        self._file.seek(0)
        for tokens in self._tokens:
            shape = self._spec.shape(tokens)
            data = bytearray(math.prod(shape) * self._dtype.itemsize)
            self._file.readinto(data)  # type: ignore[attr-defined]  # every binary file has it
            yield torch.frombuffer(data, dtype=self._dtype).reshape(shape)
