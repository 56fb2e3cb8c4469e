"""Chooses quantiser steps by the loss that they cost: `kvabr calibrate --target-kl`.

A relative step costs every model another loss, and every layer class of a model, too. The search codes the caches of
texts that the profile was not fitted to, and has the model say what that loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from kvabr.codec.analysis import Analysis
from kvabr.codec.columns import turned, turned_back
from kvabr.codec.fit import FitConfig
from kvabr.codec.native import coder
from kvabr.codec.quantiser import SINGLE, quantise
from kvabr.codec.transform import FARTHEST, FINE, Transform
from kvabr.publish.quality import Reference
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec

COARSEST, FINEST = 16.0, 1 / 64
"""Bounds of the factors that steps are multiplied with."""
_ROUNDS = 5
"""Measurements for each class alone; the factor is then known to a few percent."""
_MORE_ROUNDS = 4
"""Measurements of all classes together, at most."""
_MARGIN = 0.97
"""Steps aim at this much less than what would just meet the target: a loss is not quite a power of its step."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """A prompt that steps are tried on."""

    cache: tuple[torch.Tensor, ...]
    """The exact cache, a tensor per layer class, [layer, K/V, head, token, dim], of finite numbers within FP16."""
    reference: Reference
    """What the model says behind it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Factors of the steps, by layer class, and the loss that was measured with them."""

    factors: tuple[float, ...]
    kl: float
    """KL divergence of AC-5x, nats per token, mean over the samples."""


class _Class:
    """One layer class: what its coefficients become at a step, without the entropy coder, which loses nothing."""

    def __init__(self, transform: Transform, config: FitConfig, caches: Sequence[torch.Tensor]) -> None:
        self._transform, self._part = transform, transform.structure.spec
        self._caches = [turned(cache, self._part) for cache in caches]
        config = config.of(self._part)
        self._step, self._dead, self._sinks = config.steps[SINGLE], config.dead.get(SINGLE, 0.0), config.sinks
        analysis = Analysis(transform)
        self._coefficients = [analysis.analyse(cache, 0) for cache in self._caches]

    def coded(self, number: int, factor: float) -> torch.Tensor:
        """Return a cache as a player would have it."""
        step, cache, found = factor * self._step, self._caches[number], self._coefficients[number]
        index = quantise(found.rows, step, self._dead).clamp_(-FARTHEST, FARTHEST)
        aside = found.outlying | (found.reach > step)
        aside[: self._sinks] = True
        out = torch.empty_like(cache)
        coder.synthesise(self._transform, (index * FINE).short().numpy(), step, 0, out)
        out[:, :, :, aside] = cache[:, :, :, aside]
        return turned_back(out, self._part)


class StepSearch:
    """The search: each layer class by itself first, then all together."""

    def __init__(
        self,
        spec: KVSpec,
        transforms: Sequence[Transform],
        config: FitConfig,
        samples: Sequence[HeldOutText],
        progress: Progress = lambda _done, _all: None,
    ) -> None:
        """Take the transforms of all layer classes, in the order of `KVSpec.parts`, and samples, at least one."""
        self._samples, self._progress = samples, progress
        caches = list(zip(*(sample.cache for sample in samples), strict=True))
        self._classes = [_Class(made, config, own) for made, own in zip(transforms, caches, strict=True)]
        tokens = [sum(cache.shape[3] for cache in own) for own in caches]  # rows of a state
        sizes = [count * part.elements_per_token for count, part in zip(tokens, spec.parts, strict=True)]
        self._shares = [size / sum(sizes) for size in sizes]
        several = len(sizes) > 1
        self._done, self._all = 0, len(sizes) * _ROUNDS * several + _MORE_ROUNDS + (0 if several else _ROUNDS)

    def choose(self, target: float) -> Chosen:
        """Return the coarsest steps whose measured loss is at most ``target``, nats per token.

        Where there are several layer classes, each gets a share of the loss by its size: a loss grows with the square
        of a step, and the rate falls with its logarithm, so such shares take the fewest bits.

        Raises `UsageError` if even the finest steps lose more.
        """
        count = len(self._classes)
        factors = [1.0] * count
        if count > 1:
            for number, share in enumerate(self._shares):
                alone = [0.0] * count

                def loss(factor: float, alone: list[float] = alone, number: int = number) -> float:
                    return self._loss([*alone[:number], factor, *alone[number + 1 :]])

                factors[number] = self._reach(loss, target * share, 1.0, _ROUNDS)[0]
        scale, kl = self._reach(
            lambda scale: self._loss([scale * factor for factor in factors]),
            target,
            1.0,
            _MORE_ROUNDS if count > 1 else _MORE_ROUNDS + _ROUNDS,
        )
        if not kl <= target:
            raise UsageError(
                f"a KL of {target:g} cannot be met: at the finest steps that were tried, {scale * min(factors):.3g} of "
                f"the usual ones, AC-5x loses {kl:.3g} nats per token on {len(self._samples)} contexts; choose a "
                "larger target, or use Int8, FP8 or BF16"
            )
        self._progress(self._all, self._all)
        return Chosen(tuple(min(COARSEST, max(FINEST, scale * factor)) for factor in factors), kl)

    def _loss(self, factors: Sequence[float]) -> float:
        """Measure the loss with these factors; a factor of 0 leaves a class exact."""
        losses = []
        for number, sample in enumerate(self._samples):
            pairs = zip(self._classes, factors, sample.cache, strict=True)
            coded = tuple(
                each.coded(number, min(COARSEST, max(FINEST, factor))) if factor else exact
                for each, factor, exact in pairs
            )
            losses.append(sample.reference.measure(coded).kl)
        self._done += 1
        self._progress(min(self._done, self._all - 1), self._all)
        return fmean(losses)

    @staticmethod
    def _reach(loss: Callable[[float], float], target: float, first: float, rounds: int) -> tuple[float, float]:
        """Return the largest factor found whose loss is at most ``target``, with it; else the finest, with its loss.

        The next factor follows from the last as if the loss was a power of it, of 2 or what the last two say.
        """
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
            power = 2.0
            if last is not None and last[0] != factor and last[1] > 0:
                power = min(4.0, max(0.5, math.log(last[1] / kl) / math.log(last[0] / factor)))
            last = factor, kl
            ahead = factor * min(8.0, max(1 / 8, _MARGIN * (target / kl) ** (1 / power)))
            ahead = min(COARSEST, max(FINEST, ahead))
            if ahead == factor:
                break
            factor = ahead
        return best if best[0] else finest
