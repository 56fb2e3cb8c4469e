"""Expected loss of every group on every track, measured by the real model.

How it is attributed. For every track the whole cache is decoded and the continuation scored once: that gives KL,
change of NLL and top-1 of the track. Then, for a few tracks, one group at a time is replaced in an otherwise exact
cache: the KL of that run is the group's own. Coding noise of different groups is nearly independent, and KL is
quadratic in small noise, so these single losses nearly add up (measured on SmolLM2 with 3- and 4-bit caches: their sum
is 0.86 to 1.3 of the KL of the whole cache). Scaling them to the whole cache's KL makes the losses of a track add up to
what was measured. Every lossy track gets shares of its own, since codecs differ in where they hurt (one that keeps the
attention sinks exact spares the first group); a nearly lossless one takes those of the track with the nearest KL.

One forward pass is one measurement, so the passes are bounded: see `MAX_PASSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvabr.publish.score import Reference
from kvabr.types.catalog import Quality
from kvabr.types.kv import KVSpec

Decoder = Callable[[int, str, torch.Tensor], None]
"""Decodes ``(group, track, out)`` into a tensor [layer, K/V, head, token, dim] of the group's tokens."""

Progress = Callable[[int, int], None]
"""Told of every step: steps done, steps in all."""

MAX_PASSES = 192
"""Forward passes that the attribution may take beyond one per track: four tracks of 48 groups."""

LEAST_UNITS = 16
"""Units into which a long cache is cut at least, should there be so many tracks that some must share their shares."""

NOISE_FLOOR = 1e-4
"""KL below which a track's single groups are not run: they would cost passes, and no player tells them apart."""

_LEAST_SHARE = 0.01
"""Share of a track's loss that is spread evenly, so that no group is free just because one continuation ignored it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the model said about one asset."""

    quality: Mapping[str, Quality]
    """Per track: the whole cache played on it."""
    loss: Mapping[str, tuple[float, ...]]
    """Per track and group: expected loss, nats per token; a track's losses add up to its measured KL."""
    method: str
    """In words: how they were attributed."""


def measure_quality(
    reference: Reference,
    exact: torch.Tensor,
    spec: KVSpec,
    tracks: Sequence[str],
    decode: Decoder,
    *,
    max_passes: int = MAX_PASSES,
    progress: Progress = lambda _done, _all: None,
) -> Measured:
    """Measure whole tracks and single groups, and attribute the loss.

    Args:
        reference: scores of the exact cache.
        exact: that cache, [layer, K/V, head, token, dim]; read, never written.
        spec: its shape and groups.
        tracks: names of the tracks.
        decode: decodes one group of one track.
        max_passes: forward passes beyond one per track, see `MAX_PASSES`.
        progress: called after every forward pass.

    Returns:
        Qualities, losses, and the method in words.
    """
    work = exact.clone()
    tokens = int(exact.shape[-2])
    ranges = [spec.group_range(group, tokens) for group in range(spec.groups(tokens))]
    total = len(tracks) + (max_passes if len(ranges) > 1 else 0)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    quality = {}
    for track in tracks:
        for group, (first, last) in enumerate(ranges):
            decode(group, track, work[:, :, :, first:last])
        quality[track] = reference.measure(work)
        step()
    work.copy_(exact)

    units, shaped = _plan({track: quality[track].kl for track in tracks}, len(ranges), max_passes)
    total = len(tracks) + len(shaped) * len(units)
    shares: dict[str, list[float]] = {}
    for track in shaped:
        singles = []
        for unit in units:
            for group in unit:
                first, last = ranges[group]
                decode(group, track, work[:, :, :, first:last])
            singles.append(reference.measure(work).kl)
            begin, end = ranges[unit[0]][0], ranges[unit[-1]][1]
            work[:, :, :, begin:end] = exact[:, :, :, begin:end]
            step()
        shares[track] = _shares(singles, units, ranges)
    progress(total, total)

    even = [(last - first) / tokens for first, last in ranges]
    loss = {}
    for track in tracks:
        near = _nearest(quality, track, shaped)
        loss[track] = tuple(quality[track].kl * share for share in (shares[near] if near else even))
    return Measured(quality, loss, _in_words(len(reference.continuation), shaped, units))


def _plan(kl: Mapping[str, float], groups: int, max_passes: int) -> tuple[list[range], list[str]]:
    """Units of groups to perturb together, and the tracks on which to do it, within ``max_passes`` passes."""
    if groups == 1:
        return [range(1)], []
    lossy = max(1, sum(value > NOISE_FLOOR for value in kl.values()))
    units = _units(groups, max(LEAST_UNITS, max_passes // lossy))
    return units, _pick(kl, max(1, min(lossy, max_passes // len(units))))


def _units(groups: int, limit: int) -> list[range]:
    """At most ``limit`` runs of neighbouring groups.

    The first group (it holds the attention sinks) and the last ones (they are the nearest to what follows) bear most of
    the loss: each of these is a unit of its own, and the middle is cut into equal runs.
    """
    if groups <= limit:
        return [range(group, group + 1) for group in range(groups)]
    tail = limit // 4
    middle, runs = groups - 1 - tail, limit - 1 - tail
    cuts = [1 + middle * index // runs for index in range(runs + 1)]
    bounds = [0, *cuts, *range(groups - tail + 1, groups + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _pick(kl: Mapping[str, float], count: int) -> list[str]:
    """The tracks whose single groups are run: lossy ones, spread evenly from the most to the least lossy."""
    lossy = sorted((track for track in kl if kl[track] > NOISE_FLOOR), key=lambda track: -kl[track])
    lossy = lossy or [max(kl, key=lambda track: kl[track])]
    if count >= len(lossy):
        return lossy
    if count == 1:
        return lossy[:1]
    return [lossy[round(index * (len(lossy) - 1) / (count - 1))] for index in range(count)]


def _shares(singles: Sequence[float], units: Sequence[range], ranges: Sequence[tuple[int, int]]) -> list[float]:
    """Share of every group in the loss of a track: its unit's single loss, by tokens within a unit."""
    everything = sum(singles)
    tokens = ranges[-1][1]
    shares = []
    for unit, single in zip(units, singles, strict=True):
        size = ranges[unit[-1]][1] - ranges[unit[0]][0]
        for group in unit:
            first, last = ranges[group]
            measured = single / everything * (last - first) / size if everything > 0 else (last - first) / tokens
            shares.append((1 - _LEAST_SHARE) * measured + _LEAST_SHARE * (last - first) / tokens)
    return shares


def _nearest(quality: Mapping[str, Quality], track: str, shaped: Sequence[str]) -> str | None:
    """The track among ``shaped`` whose KL is nearest to that of ``track``, as a ratio."""
    wanted = math.log(max(quality[track].kl, 1e-30))
    return min(shaped, key=lambda other: abs(math.log(max(quality[other].kl, 1e-30)) - wanted), default=None)


def _in_words(continuation: int, shaped: Sequence[str], units: Sequence[range]) -> str:
    whole = (
        f"KL(exact || track) per token, mean over the {continuation} tokens that follow the prompt, measured by the "
        "model with the whole cache on one track"
    )
    if not shaped:
        return whole + "."
    width = max(map(len, units))
    unit = "one group" if width == 1 else f"one group (in the middle of the prompt, up to {width} neighbours)"
    return (
        f"{whole}; split over groups in proportion to the KL measured with {unit} at a time on the track and all "
        f"others exact, run for {', '.join(shaped)} and taken for every other track from the one of these with the "
        f"nearest KL; {_LEAST_SHARE:.0%} of it spread evenly."
    )
