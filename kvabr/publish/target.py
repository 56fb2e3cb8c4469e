"""Chooses quantiser steps and gains by the loss that they cost: `kvabr calibrate --target-kl` and `--gain`.

A relative step costs every model another loss, and every layer class of a model, too. The search codes the caches of
texts that the profile was not fitted to, and has the model say what that loses.

A coarse quantiser rounds much of a value to zero, and what is left is too small: a model that averages over such values
hears the context too weakly. Multiplying decoded values, about their mean, by a little more than 1 mends that, costs no
bits and no time (`kvabr.codec.transform.Transform.scale`), and helps the first tokens most. Keys must not be scaled:
noise in them grows, too, and moves attention.
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
"""Bounds of the factors that steps are multiplied with."""
_ROUNDS = 3
"""Measurements of each kind of coefficients alone."""
_MORE_ROUNDS = 6
"""Measurements of all together, at most."""
_MARGIN = 0.97
"""Steps aim at this much less than what would just meet the target: a loss is not quite a power of its step."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Target:
    """What a calibration aims at."""

    kl: float
    """KL divergence, nats per token."""
    track: str = SINGLE
    """The track that loses it; of a layer, together with those below."""


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """A prompt that steps are tried on."""

    cache: tuple[torch.Tensor, ...]
    """The exact cache, a tensor per layer class, [layer, K/V, head, token, dim], of finite numbers within FP16."""
    reference: Reference
    """What the model says behind it."""


Factors = tuple[tuple[float, ...], ...]
"""What to multiply steps with, by layer class: of its keys, and of its values; one number if these are not apart."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Factors of the steps, and the loss that was measured with them."""

    factors: Factors
    kl: float
    """KL divergence of the target's track, nats per token, mean over the samples."""


class CodedClass:
    """One layer class: what its coefficients become at a step, without the entropy coder, which loses nothing."""

    kinds: int
    """2 if keys and values are apart, else 1."""

    def __init__(self, transform: Transform, config: FitConfig, track: str, caches: Sequence[torch.Tensor]) -> None:
        self._transform, self._part = transform, transform.structure.spec
        self._caches = [turned(cache, self._part) for cache in caches]
        config = config.of(self._part)
        # A layer with those below has the values of a single layer with its step.
        self._step, self._dead, self._sinks = config.steps[track], config.dead.get(track, 0.0), config.sinks
        analysis = Analysis(transform)
        self._coefficients = [analysis.analyse(cache, 0).here() for cache in self._caches]
        structure = transform.structure
        self.kinds = structure.halves
        self._kind = torch.zeros(structure.rows, dtype=torch.long)
        for number, stack in enumerate(structure.stacks):
            self._kind[slice(*structure.first_rows[number : number + 2])] = stack.kind
        power = torch.cat([(each.rows * ~each.outlying).square() for each in self._coefficients], dim=1).mean(dim=1)
        self._tokens = sum(cache.shape[3] for cache in self._caches)  # columns of a state
        self._power = [power[self._kind == kind] for kind in range(self.kinds)]

    def coded(self, number: int, factors: Sequence[float], gains: tuple[float, ...] = ()) -> torch.Tensor:
        """Return a cache as a player would have it, with steps times ``factors`` and gains of the decoder."""
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
        """Return about how many bits a kind takes more, in all samples, if its step is half as long: its live rows."""
        power = self._power[kind]
        return self._tokens * float((power / (power + (factor * self._step / 2) ** 2)).sum())


class StepSearch:
    """The search: first the keys, and the values, of each layer class by themselves, then all together."""

    def __init__(
        self,
        transforms: Sequence[Transform],
        config: FitConfig,
        samples: Sequence[HeldOutText],
        target: Target,
        progress: Progress = lambda _done, _all: None,
    ) -> None:
        """Take the transforms of all layer classes, in the order of `KVSpec.parts`, and samples, at least one."""
        self._samples, self._target, self._progress = samples, target, progress
        caches = zip(*(sample.cache for sample in samples), strict=True)
        pairs = zip(transforms, caches, strict=True)
        self._classes = [CodedClass(made, config, target.track, own) for made, own in pairs]
        self._units = [(number, kind) for number, each in enumerate(self._classes) for kind in range(each.kinds)]
        self._done, self._all = 0, (len(self._units) * _ROUNDS if len(self._units) > 1 else 0) + _MORE_ROUNDS

    def choose(self) -> Chosen:
        """Return the coarsest steps whose measured loss meets the target.

        Where there are several layer classes, or keys and values apart, each gets a share of the loss: as much as it
        takes bits to have a shorter step. Moving loss from one to another then saves nothing.

        Raises `UsageError` if even the finest steps lose more.
        """
        target = self._target.kl
        balance = self._balanced()
        scale, kl = self._reach(lambda scale: self._loss(_times(balance, scale)), target, 1.0, _MORE_ROUNDS)
        factors = _times(balance, scale)
        if not kl <= target:
            raise UsageError(
                f"a KL of {target:g} cannot be met: at the finest steps that were tried, {min(map(min, factors)):.3g} "
                f"of the usual ones, {self._target.track} loses {kl:.3g} nats per token on {len(self._samples)} "
                "contexts; choose a larger target, or use Int8, FP8 or BF16"
            )
        self._progress(self._all, self._all)
        return Chosen(factors, kl)

    def _balanced(self) -> Factors:
        """Return factors with which every unit loses its share of the target while all others are exact."""
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
        """Return factors by class, 0 for those that are not given."""
        return tuple(
            tuple(factors.get((number, kind), 0.0) for kind in range(each.kinds))
            for number, each in enumerate(self._classes)
        )

    def _loss(self, factors: Factors) -> float:
        """Measure the loss with these factors; a factor of 0 leaves the keys, or values, of a class exact."""
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
        """Return the largest factor found whose loss is at most ``target``, with it; else the finest, with its loss."""
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
    """Return the factor that loses ``wanted`` if the loss is a power of it, of 2 or what this and the last one say."""
    power = 2.0
    if last is not None and last[0] != factor and min(last[1], kl) > 0:
        power = min(4.0, max(0.5, math.log(last[1] / kl) / math.log(last[0] / factor)))
    ahead: float = factor * min(8.0, max(1 / 8, (wanted / max(kl, 1e-12)) ** (1 / power)))
    return min(COARSEST, max(FINEST, ahead))


def _times(factors: Factors, scale: float) -> Factors:
    return tuple(tuple(min(COARSEST, max(FINEST, scale * factor)) for factor in own) for own in factors)


TRACK = LAYERS[0]
"""The track whose gains are chosen: at finer steps they gain nothing."""
TRIED = 1.1
"""The gain that is measured for each stack; with the loss without it and its square, a parabola has its minimum."""
MOST = 1.25
_WORTH = 0.01
"""Share of the loss that gains must save, to be kept."""

Gains = tuple[tuple[float, ...], ...]
"""By layer class and stack."""


def measurements(transforms: Sequence[Transform]) -> int:
    """Return how often `choose_gains` measures a loss."""
    return 2 + 2 * sum(len(_stacks(transform)) for transform in transforms)


def choose_gains(
    transforms: Sequence[Transform],
    configs: Sequence[FitConfig],
    samples: Sequence[HeldOutText],
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> tuple[Gains, float]:
    """Return the gains of every layer class, empty ones if they save too little, and the share of the loss they save.

    Each stack of values is measured with all others as they are; then all together.

    Args:
        transforms: of all layer classes, in the order of `KVSpec.parts`.
        configs: of the same; the steps count.
        samples: texts that the profile was not fitted to, at least one.
        progress: called after every measurement.
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
            once, twice = (loss(_changed(none, index, stack, gain)) for gain in (TRIED, TRIED**2))
            best[index][stack] = least(base, once, twice)
    chosen = tuple(map(tuple, best))
    after = loss(chosen)
    if not after < (1 - _WORTH) * base:
        return ((),) * len(transforms), 0.0
    return tuple(own if any(gain != 1 for gain in own) else () for own in chosen), 1 - after / base


def _stacks(transform: Transform) -> list[int]:
    """Return the stacks of values, where these are apart from keys."""
    structure = transform.structure
    return [number for number, stack in enumerate(structure.stacks) if stack.kind == 1]


def _changed(gains: Gains, index: int, stack: int, gain: float) -> Gains:
    out = [list(own) for own in gains]
    out[index][stack] = gain
    return tuple(map(tuple, out))


def least(base: float, once: float, twice: float) -> float:
    """Return the gain of least loss, from 1 to `MOST`: of a parabola through those at 1, `TRIED` and its square."""
    near, far = TRIED - 1, TRIED**2 - 1
    curve = ((twice - base) / far - (once - base) / near) / (far - near)
    slope = (once - base) / near - curve * near
    if curve <= 0:
        return 1.0 if base <= min(once, twice) else TRIED
    return round(min(MOST, max(1.0, 1 - slope / (2 * curve))), 3)
