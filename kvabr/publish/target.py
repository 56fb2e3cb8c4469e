"""Chooses quantiser steps and gains by the loss on held-out texts: `kvabr calibrate --target-kl` and `--gain`.

A coarse quantiser rounds many values to zero, which weakens the influence of the context. To compensate, decoded values
are scaled around their mean by slightly more than 1. Keys are not scaled: more noise in keys would shift attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from kvabr.codec.analysis import Analysis
from kvabr.codec.columns import turned, turned_back
from kvabr.codec.fit import FitConfig
from kvabr.codec.native import coder
from kvabr.codec.quantiser import SINGLE, quantise
from kvabr.codec.transform import FARTHEST, FINE, Transform
from kvabr.publish.reference import Reference
from kvabr.types.errors import UsageError
from kvabr.types.naming import LAYERS

COARSEST, FINEST = 16.0, 1 / 64
_ROUNDS = 3
_MORE_ROUNDS = 6
_MARGIN = 0.97
"""Aim at this fraction of the target, since the loss is not exactly a power of the step."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The loss that a calibration must reach."""

    kl: float
    track: str = SINGLE
    """Track to measure; a layer is measured together with those below it."""


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """A prompt to try steps on."""

    cache: tuple[torch.Tensor, ...]
    """One tensor per layer class, [layer, K/V, head, token, dim], finite and within FP16."""
    reference: Reference


Factors = tuple[tuple[float, ...], ...]
"""Factors of each layer class: one for keys and one for values, or one for both."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Chosen factors of the steps, and the resulting loss."""

    factors: Factors
    kl: float


class CodedClass:
    """Simulates the coding of one layer class, without the lossless entropy coder."""

    kinds: int

    def __init__(self, transform: Transform, config: FitConfig, track: str, caches: Sequence[torch.Tensor]) -> None:
        self._transform, self._part = transform, transform.structure.spec
        self._caches = [turned(cache, self._part) for cache in caches]
        config = config.of(self._part)
        # A layer with all layers below it decodes to the same values as a single layer with its step.
        self._step, self._dead, self._sinks = config.steps[track], config.dead.get(track, 0.0), config.sinks
        analysis = Analysis(transform)
        self._coefficients = [analysis.analyse(cache, 0).here() for cache in self._caches]
        structure = transform.structure
        self.kinds = structure.halves
        self._kind = torch.zeros(structure.rows, dtype=torch.long)
        for number, stack in enumerate(structure.stacks):
            self._kind[slice(*structure.first_rows[number : number + 2])] = stack.kind
        power = torch.cat([(each.rows * ~each.outlying).square() for each in self._coefficients], dim=1).mean(dim=1)
        self._tokens = sum(cache.shape[3] for cache in self._caches)
        self._power = [power[self._kind == kind] for kind in range(self.kinds)]

    def coded(self, number: int, factors: Sequence[float], gains: tuple[float, ...] = ()) -> torch.Tensor:
        """Return a cache after coding with scaled steps and gains."""
        step, cache, found = factors[0] * self._step, self._caches[number], self._coefficients[number]
        others = torch.tensor(factors)[self._kind, None] / factors[0]
        index = quantise(found.rows / others, step, self._dead).clamp_(-FARTHEST, FARTHEST)
        outliers = found.outlying | (found.reach > min(factors) * self._step)
        outliers[: self._sinks] = True
        out = torch.empty_like(cache)
        transform = self._transform.scaled([factor / factors[0] for factor in factors])
        coder.synthesise(transform, (index * FINE).short().numpy(), step, 0, out, gains)
        out[:, :, :, outliers] = cache[:, :, :, outliers]
        return turned_back(out, self._part)

    def slope(self, kind: int, factor: float) -> float:
        """Return the approximate number of extra bits if the step of a kind is halved."""
        power = self._power[kind]
        return self._tokens * float((power / (power + (factor * self._step / 2) ** 2)).sum())


class StepSearch:
    """Searches steps, first separately for the keys and the values of each layer class, then together."""

    def __init__(
        self,
        transforms: Sequence[Transform],
        config: FitConfig,
        samples: Sequence[HeldOutText],
        target: Target,
        progress: Progress = lambda _done, _all: None,
    ) -> None:
        self._samples, self._target, self._progress = samples, target, progress
        caches = zip(*(sample.cache for sample in samples), strict=True)
        pairs = zip(transforms, caches, strict=True)
        self._classes = [CodedClass(made, config, target.track, own) for made, own in pairs]
        self._units = [(number, kind) for number, each in enumerate(self._classes) for kind in range(each.kinds)]
        self._done, self._all = 0, (len(self._units) * _ROUNDS if len(self._units) > 1 else 0) + _MORE_ROUNDS

    def choose(self) -> Chosen:
        """Return the coarsest steps with a measured loss within the target.

        The loss is divided among classes and kinds in proportion to the bits that halving their step costs, which is
        optimal. Raise `UsageError` if even the finest steps lose more.
        """
        target = self._target.kl
        balance = self._balanced()
        scale, kl = self._reach(lambda scale: self._loss(_times(balance, scale)), target, 1.0, _MORE_ROUNDS)
        factors = _times(balance, scale)
        if not kl <= target:
            raise UsageError(
                f"cannot reach a KL of {target:g}: with the finest steps tried, {min(map(min, factors)):.3g} of "
                f"the usual ones, {self._target.track} loses {kl:.3g} nats per token on {len(self._samples)} "
                "contexts; give a larger target, or use Int8, FP8 or BF16"
            )
        self._progress(self._all, self._all)
        return Chosen(factors, kl)

    def _balanced(self) -> Factors:
        factors = dict.fromkeys(self._units, 1.0)
        last: dict[tuple[int, int], tuple[float, float]] = {}
        for _ in range(_ROUNDS if len(factors) > 1 else 0):
            slopes = {
                (number, kind): self._classes[number].slope(kind, factors[number, kind]) for number, kind in factors
            }
            for unit, factor in factors.items():
                kl = self._loss(self._each({unit: factor}))
                wanted = self._target.kl * slopes[unit] / sum(slopes.values())
                factors[unit] = _next(factor, kl, last.get(unit), wanted)
                last[unit] = factor, kl
        return self._each(factors)

    def _each(self, factors: Mapping[tuple[int, int], float]) -> Factors:
        return tuple(
            tuple(factors.get((number, kind), 0.0) for kind in range(each.kinds))
            for number, each in enumerate(self._classes)
        )

    def _loss(self, factors: Factors) -> float:
        """Measure the loss; a factor of 0 leaves the keys or values of a class exact."""
        losses = []
        for number, sample in enumerate(self._samples):
            coded = []
            for each, own, exact in zip(self._classes, factors, sample.cache, strict=True):
                cache = exact
                if any(own):
                    cache = each.coded(number, [factor or 1.0 for factor in own])
                    for kind, factor in enumerate(own):
                        if not factor:
                            cache[:, kind] = exact[:, kind]
                coded.append(cache)
            losses.append(sample.reference.measure(tuple(coded)).kl)
        self._done += 1
        self._progress(min(self._done, self._all - 1), self._all)
        return fmean(losses)

    @staticmethod
    def _reach(loss: Callable[[float], float], target: float, first: float, rounds: int) -> tuple[float, float]:
        factor, best = first, (0.0, math.inf)
        last: tuple[float, float] | None = None
        finest = (math.inf, math.inf)
        for _ in range(rounds):
            kl = loss(factor)
            if kl <= target and factor > best[0]:
                best = factor, kl
            if factor < finest[0]:
                finest = factor, kl
            if not kl > 0 or _MARGIN**2 * target <= kl <= target:
                break
            ahead = _next(factor, kl, last, _MARGIN * target)
            last = factor, kl
            if ahead == factor:
                break
            factor = ahead
        return best if best[0] else finest


def _next(factor: float, kl: float, last: tuple[float, float] | None, wanted: float) -> float:
    power = 2.0
    if last is not None and last[0] != factor and min(last[1], kl) > 0:
        power = min(4.0, max(0.5, math.log(last[1] / kl) / math.log(last[0] / factor)))
    ahead: float = factor * min(8.0, max(1 / 8, (wanted / max(kl, 1e-12)) ** (1 / power)))
    return min(COARSEST, max(FINEST, ahead))


def _times(factors: Factors, scale: float) -> Factors:
    return tuple(tuple(min(COARSEST, max(FINEST, scale * factor)) for factor in own) for own in factors)


TRACK = LAYERS[0]
"""The track with gains; finer steps do not benefit."""
TRIAL_GAIN = 1.1
"""Trial gain of each stack. The losses at 1, at this gain, and at its square define a parabola."""
MAX_GAIN = 1.25
_MIN_SAVING = 0.01

Gains = tuple[tuple[float, ...], ...]


def measurements(transforms: Sequence[Transform]) -> int:
    """Return the number of losses that `choose_gains` measures."""
    return 2 + 2 * sum(len(_stacks(transform)) for transform in transforms)


def choose_gains(
    transforms: Sequence[Transform],
    configs: Sequence[FitConfig],
    samples: Sequence[HeldOutText],
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> tuple[Gains, float]:
    """Return the gains of every layer class (empty if they save too little), and the fraction of the loss saved.

    Each stack of values is measured alone, then all stacks together, on held-out samples. Transforms and configs are in
    the order of `KVSpec.parts`.
    """
    caches = zip(*(sample.cache for sample in samples), strict=True)
    triples = zip(transforms, configs, caches, strict=True)
    classes = [CodedClass(transform, config, TRACK, own) for transform, config, own in triples]
    done = 0

    def loss(gains: Gains) -> float:
        nonlocal done
        found = []
        for number, sample in enumerate(samples):
            coded = (each.coded(number, (1.0,) * each.kinds, own) for each, own in zip(classes, gains, strict=True))
            found.append(sample.reference.measure(tuple(coded)).loss)
        done += 1
        progress(done, measurements(transforms))
        return fmean(found)

    none: Gains = tuple((1.0,) * len(transform.structure.stacks) for transform in transforms)
    base = loss(none)
    best = [list(own) for own in none]
    for index, transform in enumerate(transforms):
        for stack in _stacks(transform):
            once, twice = (loss(_changed(none, index, stack, gain)) for gain in (TRIAL_GAIN, TRIAL_GAIN**2))
            best[index][stack] = least(base, once, twice)
    chosen = tuple(map(tuple, best))
    after = loss(chosen)
    if not after < (1 - _MIN_SAVING) * base:
        return ((),) * len(transforms), 0.0
    return tuple(own if any(gain != 1 for gain in own) else () for own in chosen), 1 - after / base


def _stacks(transform: Transform) -> list[int]:
    structure = transform.structure
    return [number for number, stack in enumerate(structure.stacks) if stack.kind == 1]


def _changed(gains: Gains, index: int, stack: int, gain: float) -> Gains:
    out = [list(own) for own in gains]
    out[index][stack] = gain
    return tuple(map(tuple, out))


def least(base: float, once: float, twice: float) -> float:
    """Return the gain from 1 to `MAX_GAIN` with the least loss, by fitting a parabola to three measured losses."""
    near, far = TRIAL_GAIN - 1, TRIAL_GAIN**2 - 1
    curve = ((twice - base) / far - (once - base) / near) / (far - near)
    slope = (once - base) / near - curve * near
    if curve <= 0:
        return 1.0 if base <= min(once, twice) else TRIAL_GAIN
    return round(min(MAX_GAIN, max(1.0, 1 - slope / (2 * curve))), 3)
