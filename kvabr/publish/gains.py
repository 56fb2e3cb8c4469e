"""Chooses gains of decoded values by the loss that they save: `kvabr calibrate --gain`.

A coarse quantiser rounds much of a value to zero, and what is left is too small: a model that averages over such values
hears the context too weakly. Multiplying decoded values, about their mean, by a little more than 1 mends that, costs no
bits and no time (`kvabr.codec.transform.Transform.scale`), and helps the first tokens most. Keys must not be scaled:
noise in them grows, too, and moves attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from kvabr.codec.fit import FitConfig
from kvabr.codec.transform import Transform
from kvabr.publish.target import CodedClass, HeldOutText
from kvabr.types.naming import LAYERS

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
