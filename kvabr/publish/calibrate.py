"""Calibrates a codec profile on the caches of diverse texts."""

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

CONTEXT_TOKENS = 1024

STAGES = ("prefill", *PASSES)

SEARCH = "steps"

GAINS = "gains"

_HELD_OUT = 6

Progress = Callable[[str, int, int], None]


def cut_contexts(texts: Mapping[str, Sequence[int]], contexts: int, tokens: int) -> list[tuple[str, Sequence[int]]]:
    """Cut evenly spaced, disjoint contexts of ``tokens`` ids out of tokenised texts.

    ``contexts`` is approximate: longer texts give more contexts. Each text gives at least one context, which is shorter
    if the text is. Return pairs of a text's name and ids; raise `UsageError` if all texts are empty.
    """
    sizes = {name: len(ids) for name, ids in texts.items() if ids}
    if not sizes:
        raise UsageError("calibration needs a text, but all texts are empty")
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
    """Return the stages of `calibrate` in order. Pass ``by_layer`` for a `LayerEngine`."""
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
    notify: Callable[[str], None] = lambda _line: None,
) -> list[Profile]:
    """Return a model's profile for every scale of the steps. The profiles differ only in steps and tables.

    Args:
        model: the model with its tokenizer.
        texts: texts by name; a diverse set gives profiles that fit other texts better.
        scales: factors of all steps.
        contexts: see `cut_contexts`.
        tokens: per context; default `CONTEXT_TOKENS` or the model's context.
        config: settings of the fit.
        target: loss of one track to reach on held-out contexts. Steps of a layer class scale together, so the losses of
            other tracks change as well.
        gain: choose gains of decoded values, see `kvabr.publish.target`; only for scale 1.
        progress: called after every step.
        notify: receives results as sentences.

    Raises:
        UsageError: no text, contexts longer than the model's context, or a target that cannot be reached.
        FormatError: a layer class without AC tracks.
        ModelError: weights, caches or outputs of the model are NaN.
        AssetError: not enough disk space for temporary files of caches and gradients.
    """
    engine, config = model.engine, config or FitConfig()
    check_class(engine.spec, "AC")
    if tokens is None:
        tokens = min(CONTEXT_TOKENS, engine.context)
    if contexts < 1 or not 16 <= tokens <= engine.context:
        raise UsageError(
            f"calibration needs at least 1 context of 16 to {engine.context} tokens, got {contexts} of {tokens}"
        )
    cuts = [
        (name, opened(model, ids))
        for name, ids in cut_contexts(
            {name: model.encode(text) for name, text in texts.items()}, contexts, tokens - len(model.opening)
        )
    ]
    seen = Seen.of(texts, cuts)
    held: set[int] = set() if target is None and not gain else set(range(0, len(cuts), _HELD_OUT))
    if len(held) == len(cuts):
        raise UsageError(
            "--target-kl and --gain need a held-out context in addition to the fitted ones: give --contexts 2 or more"
        )
    try:
        with ExitStack() as files:
            classes, samples = collect(engine, [ids for _, ids in cuts], held, files, progress)
            count = len(cuts) - len(held)
            configs = [config] * len(classes)

            def class_progress(each: ClassFiles) -> Callable[[str, int], None]:
                return lambda stage, done: progress(_stage(each.name, stage), done, count)

            transforms = [
                fit_transform(each.spec, each.caches.read, config, class_progress(each), gradients=each.gradients.read)
                for each in classes
            ]
            if target is not None:
                chosen = StepSearch(transforms, config, samples, target, partial(progress, SEARCH)).choose()
                # All tracks use the class's steps; the transform contains the ratio of keys to values.
                means = [math.exp(fmean(map(math.log, own))) for own in chosen.factors]
                configs = [config.scaled(mean) for mean in means]
                transforms = [
                    made.scaled([factor / mean for factor in own])
                    for made, mean, own in zip(transforms, means, chosen.factors, strict=True)
                ]
                notify(_found(engine.spec, chosen, target, len(samples)))
            gained: list[FitConfig] = configs
            if gain:
                found, saved = choose_gains(transforms, configs, samples, partial(progress, GAINS))
                gained = [
                    replace(own, gains={TRACK: gains} if gains else {})
                    for own, gains in zip(configs, found, strict=True)
                ]
                notify(_gained(engine.spec, found, saved, len(samples)))
            quadruples = list(zip(classes, transforms, configs, gained, strict=True))
            return [
                joined(
                    engine.spec,
                    [
                        fit_tables(
                            made, each.caches.read, best if scale == 1 else own.scaled(scale), class_progress(each)
                        )
                        for each, made, own, best in quadruples
                    ],
                    seen,
                )
                for scale in scales
            ]
    except OSError as error:
        raise AssetError(
            f"{tempfile.gettempdir()}: cannot store the caches of {len(cuts)} contexts ({error.strerror}); set TMPDIR "
            "to a folder with more space, or give fewer --contexts"
        ) from error


def _gained(spec: KVSpec, gains: Gains, saved: float, samples: int) -> str:
    if not saved:
        return f"gains of decoded values save less than 1 % of {TRACK}'s loss on {samples} contexts: not used"
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
        kinds = ("keys", "values") if len(own) > 1 else ("keys and values",)
        words += [f"{factor:.3g} ({kind}{of})" for kind, factor in zip(kinds, own, strict=True)]
    factors = ", ".join(words)
    return f"steps times {factors}: {target.track} loses {chosen.kl:.3g} nats per token on {samples} contexts"
