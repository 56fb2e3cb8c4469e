"""Calibrates a codec profile: run the model over diverse texts, and take the statistics of its caches."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import fmean

from kvabr.codec.calibration_fingerprint import Seen
from kvabr.codec.columns import check_class
from kvabr.codec.fit import PASSES, FitConfig, fit_tables, fit_transform
from kvabr.codec.profile import Profile, joined
from kvabr.publish.collect import ClassFiles, collect, collecting_stages
from kvabr.publish.model import TextModel, opened
from kvabr.publish.target import TRACK, Chosen, Gains, StepSearch, Target, choose_gains
from kvabr.types.errors import AssetError, UsageError
from kvabr.types.kv import KVSpec

CONTEXTS = 24
"""Default number of contexts."""

CONTEXT_TOKENS = 1024
"""Default tokens of a context."""

STAGES = ("prefill", *PASSES)
"""Stages of `calibrate` for a model with one layer class, in order; each has one step per context."""

SEARCH = "steps"
"""Stage in which steps are searched for; each of its steps measures a loss."""

GAINS = "gains"
"""Stage in which gains of decoded values are chosen; each of its steps measures a loss."""

_HELD_OUT = 6
"""With a target or gains, one in this many contexts is kept from the fit, to measure on."""

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


def stages(spec: KVSpec, *, search: bool = False, gain: bool = False, by_layer: bool = False) -> tuple[str, ...]:
    """Return the stages of `calibrate` for a model, in order: collecting, and passes over each class's caches.

    With ``search`` steps are chosen by their loss, with ``gain`` gains of decoded values; with ``by_layer`` the engine
    is one that runs layer by layer.
    """
    names = spec.names if len(spec.classes) > 1 else ("",)
    first, last = ([_stage(name, stage) for name in names for stage in half] for half in (PASSES[:-2], PASSES[-2:]))
    chosen = [stage for stage, wanted in ((SEARCH, search), (GAINS, gain)) if wanted]
    return (*collecting_stages(search=search or gain, by_layer=by_layer), *first, *chosen, *last)


def _stage(name: str, stage: str) -> str:
    return f"{name}: {stage}" if name else stage


def calibrate(
    model: TextModel,
    texts: Mapping[str, str],
    *,
    scales: Sequence[float] = (1.0,),
    contexts: int = CONTEXTS,
    tokens: int | None = None,
    config: FitConfig | None = None,
    target: Target | None = None,
    gain: bool = False,
    progress: Progress = lambda _stage, _done, _all: None,
    tell: Callable[[str], None] = lambda _line: None,
) -> list[Profile]:
    """Return a profile of a model, made from texts, for every scale of the steps: of all its layer classes.

    They have the same transforms; only steps and tables differ.

    Args:
        model: the model with its tokenizer.
        texts: by name; the more they differ, the better the profile fits other texts.
        scales: what to multiply all steps with, which ``config`` or the target gives.
        contexts: contexts to cut out of them, see `cut_contexts`.
        tokens: tokens of each; None: `CONTEXT_TOKENS`, or as many as the model sees. Caches and gradients are kept in
            temporary files, see `kvabr.publish.collect`.
        config: settings of the fit.
        target: the loss that one track may have, measured on a sixth of the contexts, which the fit does not see. All
            steps of a layer class are scaled alike, so the other tracks move with it. None: `config`'s steps.
        gain: whether to choose gains of decoded values, on the same contexts; see `kvabr.publish.target`. They are for
            the steps as they are, so profiles of other ``scales`` have none.
        progress: called after every step of each of `stages`.
        tell: called, in words, with what the search has found.

    Raises:
        UsageError: there is no text, contexts are longer than the model sees, or the target cannot be met.
        FormatError: there are no AC tracks of a layer class.
        ModelError: weights, caches or outputs of the model are NaN.
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
    seen = Seen.of(texts, cuts)
    held: set[int] = set() if target is None and not gain else set(range(0, len(cuts), _HELD_OUT))
    if len(held) == len(cuts):
        raise UsageError("--target-kl and --gain measure on a context that the fit does not see: give 2, --contexts 2")
    try:
        with ExitStack() as files:
            classes, samples = collect(engine, [ids for _, ids in cuts], held, files, progress)
            count = len(cuts) - len(held)
            configs = [config] * len(classes)

            def told(each: ClassFiles) -> Callable[[str, int], None]:
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
            gained: list[FitConfig] = configs
            if gain:
                found, saved = choose_gains(transforms, configs, samples, partial(progress, GAINS))
                gained = [
                    replace(own, gains={TRACK: gains} if gains else {})
                    for own, gains in zip(configs, found, strict=True)
                ]
                tell(_gained(engine.spec, found, saved, len(samples)))
            quadruples = list(zip(classes, transforms, configs, gained, strict=True))
            return [
                joined(
                    engine.spec,
                    [
                        fit_tables(made, each.caches.read, best if scale == 1 else own.scaled(scale), told(each))
                        for each, made, own, best in quadruples
                    ],
                    seen,
                )
                for scale in scales
            ]
    except OSError as error:
        raise AssetError(
            f"{tempfile.gettempdir()}: no room for the caches of {len(cuts)} contexts ({error.strerror}); set TMPDIR "
            "to a folder with more room, or give fewer --contexts"
        ) from error


def _gained(spec: KVSpec, gains: Gains, saved: float, samples: int) -> str:
    if not saved:
        return f"gains of decoded values save less than 1 % of {TRACK}'s loss on {samples} contexts: none are kept"
    several = len(spec.classes) > 1
    words = []
    for name, own in zip(spec.names, gains, strict=True):
        stacks = ", ".join(f"{gain:g}" for gain in own if gain != 1)
        words += [f"{stacks} ({name})" if several else stacks] if stacks else []
    return f"decoded values of {TRACK} times {', '.join(words)}: its loss is {saved:.0%} less on {samples} contexts"


def _found(spec: KVSpec, chosen: Chosen, target: Target, samples: int) -> str:
    words = []
    for name, own in zip(spec.names, chosen.factors, strict=True):
        of = f" of {name}" if len(spec.classes) > 1 else ""
        whose = ("keys", "values") if len(own) > 1 else ("keys and values",)
        words += [f"{factor:.3g} ({kind}{of})" for kind, factor in zip(whose, own, strict=True)]
    factors = ", ".join(words)
    return f"steps times {factors}: {target.track} loses {chosen.kl:.3g} nats per token on {samples} contexts"
