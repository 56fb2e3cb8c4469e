"""Expected loss of every group on every track, measured with the model.

For every track, the continuation is scored after the whole decoded cache. The loss is `Quality.loss`, which gives more
weight to the first tokens: the plain KL over all tokens would underrate the last groups, and double the loss of caches
with a better end. For a few tracks, one group at a time is then replaced in the exact cache. Coding noise is nearly
independent across groups, and KL is quadratic in small noise, so these losses nearly add up (SmolLM2: to 0.75 to 1.3 of
the whole cache's loss for 3 and 4 bits, to half for AC-L0); they are scaled to the track's loss. For other tracks, the
loss is divided among groups like that of the track with the nearest KL. `kvabr.publish.tails` measures the loss after a
tail.

Finally, a few caches of mixed tracks, like those that plays produce, are scored; the catalog lists their predicted and
measured losses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise

import torch

from kvabr.codec.group import cut
from kvabr.publish.reference import Reference, evenly
from kvabr.publish.tails import TailMeter
from kvabr.types.catalog import RECOMPUTED, Catalog, Mix, Quality
from kvabr.types.kv import KVSpec
from kvabr.types.loss import predicted_loss
from kvabr.types.tails import TailLoss
from kvabr.types.units import Unit, needed, units_of

Decoder = Callable[[int, str, torch.Tensor], None]
"""Decodes ``(group, track, out)`` into a tensor [layer, K/V, head, token, dim] of the group's tokens."""

MAX_PASSES = 192
"""Maximum forward passes to attribute losses to groups, beyond one per track."""

MIN_UNITS = 16

NOISE_FLOOR = 1e-4
"""Groups of a track with a KL below this are not measured one by one."""

_ATTRIBUTED = 64
"""Number of tokens scored for single groups: the first tokens have most of the loss."""
_MIN_SHARE = 0.01
"""Fraction of a loss that is spread evenly."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured losses of one asset."""

    quality: Mapping[str, Quality]
    loss: Mapping[str, tuple[float, ...]]
    """Loss by track and group, nats per token; a track's losses sum to `Quality.loss`."""
    method: str
    tails: Mapping[str, tuple[TailLoss, ...]]
    asked: tuple[float, ...]


def measure_quality(
    reference: Reference,
    exact: tuple[torch.Tensor, ...],
    spec: KVSpec,
    tracks: Sequence[str],
    decode: Decoder,
    *,
    tokens: int | None = None,
    max_passes: int = MAX_PASSES,
    meter: TailMeter | None = None,
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _all: None,
) -> Measured:
    """Measure whole tracks and single groups, and attribute losses to groups; groups outside attention get 0.

    ``exact`` is the cache of ``reference``, one tensor per layer class, [layer, K/V, head, token, dim] of all tokens,
    or all snapshots of a state; not modified. ``tokens``, the length of the prompt, is required if the first layer
    class is a state. ``progress`` receives a stage (``measure`` for whole tracks, ``tails``, ``groups``), its finished
    measurements, and their total.
    """
    tokens = int(exact[0].shape[-2]) if tokens is None else tokens
    work = _Work(exact, spec, units_of(spec, tokens), decode)
    seen = needed(spec, work.units, tokens)
    sizes = [work.units[group].tokens * spec.parts[work.units[group].part].elements_per_token for group in seen]
    quality = {}
    for number, track in enumerate(tracks, 1):
        work.put(track, seen)
        scored = reference.score(work.cache)
        quality[track] = reference.compared(scored)
        if meter is not None and quality[track].kl > NOISE_FLOOR:
            meter.near(track, work.cache, scored)
        progress("measure", number, len(tracks))
    whole = {track: one.loss for track, one in quality.items()}
    tails = {} if meter is None else _measured_tails(meter, reference, work, whole, progress)
    work.restore(range(len(work.units)))

    units, shaped = _plan({track: quality[track].kl for track in tracks}, len(seen), max_passes)
    total, done = len(shaped) * len(units), count(1)
    shares: dict[str, list[float]] = {}
    asked: list[float] = []
    for track in shaped:
        singles = []
        for unit in units:
            groups = [seen[index] for index in unit]
            work.put(track, groups)
            singles.append([reference.measure(work.cache, _ATTRIBUTED).loss])
            if meter is not None and track == shaped[0]:
                singles[-1] += meter.single(work.cache)
            work.restore(groups)
            progress("groups", next(done), total)
        shares[track], *behind = (_shares(losses, units, sizes) for losses in zip(*singles, strict=True))
        if behind:
            asked = behind[0]

    def of_units(values: Sequence[float]) -> tuple[float, ...]:
        given = dict(zip(seen, values, strict=True))
        return tuple(given.get(group, 0.0) for group in range(len(work.units)))

    even = [size / sum(sizes) for size in sizes]
    loss = {}
    for track in tracks:
        near = _nearest(quality, track, shaped)
        loss[track] = of_units([whole[track] * share for share in (shares[near] if near else even)])
    words = _in_words(len(reference.continuation), shaped, units)
    return Measured(quality, loss, words, tails, of_units(asked) if asked else ())


class _Work:
    def __init__(self, exact: tuple[torch.Tensor, ...], spec: KVSpec, units: Sequence[Unit], decode: Decoder) -> None:
        self._exact, self._spec, self._decode, self.units = exact, spec, decode, units
        self.cache = tuple(part.clone() for part in exact)

    def put(self, track: str, groups: Iterable[int]) -> None:
        for group in groups:
            self._decode(group, track, cut(self.cache, self.units[group], self._spec))

    def restore(self, groups: Iterable[int]) -> None:
        for group in groups:
            unit = self.units[group]
            cut(self.cache, unit, self._spec).copy_(cut(self._exact, unit, self._spec))


def _measured_tails(
    meter: TailMeter,
    reference: Reference,
    work: _Work,
    losses: Mapping[str, float],
    progress: Callable[[str, int, int], None],
) -> dict[str, tuple[TailLoss, ...]]:

    def decoded(track: str) -> tuple[torch.Tensor, ...]:
        # With a window, a shorter prompt sees more groups.
        work.put(track, range(len(work.units)))
        return work.cache

    if not meter.tracks:
        worst = max(losses, key=losses.__getitem__)
        meter.near(worst, decoded(worst), reference.score(work.cache))
    total, done = meter.caches, count(1)
    meter.far(decoded, lambda: progress("tails", next(done), total))
    return meter.tails(losses)


def sample_mixes(catalog: Catalog, seed: int = 0) -> list[list[str]]:
    """Return seeded assignments of tracks to groups like those at the end of plays.

    Two assignments are random, one has better tracks at the beginning, and others have recomputed runs in several
    places.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    groups = catalog.groups
    by_size = sorted(catalog.tracks, key=lambda track: track.total_bytes)
    names = [track.name for track in by_size]
    lossy = sorted(names, key=lambda name: -sum(catalog.track(name).loss))[: max(2, len(names) // 2)]
    cheap = names[0]
    best = min(names, key=lambda name: sum(catalog.track(name).loss))
    third = max(1, groups // 3)

    def scattered(choice: Sequence[str]) -> list[str]:
        mix = [rng.choice(choice) for _ in range(groups)]
        if len(set(mix)) == 1:
            mix[rng.randrange(groups)] = next((name for name in choice if name != mix[0]), mix[0])
        return mix

    hole = scattered(lossy)
    hole[third : 2 * third] = [RECOMPUTED] * len(hole[third : 2 * third])
    mixes = [
        scattered(names),
        scattered(lossy),
        [best] * third + [cheap] * (groups - third),
        scattered(lossy)[: groups - third] + [RECOMPUTED] * third,
        hole,
        [RECOMPUTED] * third + scattered(lossy)[: groups - third],
        [cheap, *scattered((cheap, cheap, RECOMPUTED))[1:]],
    ]
    return [list(mix) for mix in dict.fromkeys(map(tuple, mixes)) if len(set(mix)) > 1]


def measure_mixes(
    catalog: Catalog,
    mixes: Sequence[Sequence[str]],
    reference: Reference,
    prompt: Sequence[int],
    decode: Decoder,
    *,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Mix]:
    """Assemble and score each mixed cache, which has one track per group, or `RECOMPUTED`."""
    spec = catalog.spec
    engine = reference.engine
    work = torch.empty(spec.shape(catalog.tokens), dtype=engine.prefill(prompt[:1]).dtype)
    out = []
    for number, mix in enumerate(mixes):
        for name, run in groupby(range(catalog.groups), key=lambda group, mix=mix: mix[group]):  # type: ignore[misc]
            groups = list(run)
            begin = spec.group_range(groups[0], catalog.tokens)[0]
            end = spec.group_range(groups[-1], catalog.tokens)[1]
            if name == RECOMPUTED:
                work[:, :, :, begin:end] = engine.prefill(prompt[begin:end], work[:, :, :, :begin])
            else:
                for group in groups:
                    first, last = spec.group_range(group, catalog.tokens)
                    decode(group, name, work[:, :, :, first:last])
        out.append(Mix(tuple(mix), predicted_loss(catalog, mix), reference.measure(work).loss))
        progress(number + 1, len(mixes))
    return out


def _plan(kl: Mapping[str, float], groups: int, max_passes: int) -> tuple[list[range], list[str]]:
    if groups == 1:
        return [range(1)], []
    lossy = max(1, sum(value > NOISE_FLOOR for value in kl.values()))
    units = _units(groups, max(MIN_UNITS, max_passes // lossy))
    return units, _pick(kl, max(1, min(lossy, max_passes // len(units))))


def _units(groups: int, limit: int) -> list[range]:
    if groups <= limit:
        return [range(group, group + 1) for group in range(groups)]
    tail = limit // 4
    middle, runs = groups - 1 - tail, limit - 1 - tail
    cuts = [1 + middle * index // runs for index in range(runs + 1)]
    bounds = [0, *cuts, *range(groups - tail + 1, groups + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _pick(kl: Mapping[str, float], max_tracks: int) -> list[str]:
    lossy = sorted((track for track in kl if kl[track] > NOISE_FLOOR), key=lambda track: -kl[track])
    return evenly(lossy or [max(kl, key=lambda track: kl[track])], max_tracks)


def _shares(singles: Sequence[float], units: Sequence[range], sizes: Sequence[int]) -> list[float]:
    everything, whole = sum(singles), sum(sizes)
    shares = []
    for unit, single in zip(units, singles, strict=True):
        size = sum(sizes[group] for group in unit)
        for group in unit:
            measured = single / everything * sizes[group] / size if everything > 0 else sizes[group] / whole
            shares.append((1 - _MIN_SHARE) * measured + _MIN_SHARE * sizes[group] / whole)
    return shares


def _nearest(quality: Mapping[str, Quality], track: str, shaped: Sequence[str]) -> str | None:
    wanted = math.log(max(quality[track].kl, 1e-30))
    return min(shaped, key=lambda other: abs(math.log(max(quality[other].kl, 1e-30)) - wanted), default=None)


def _in_words(continuation: int, shaped: Sequence[str], units: Sequence[range]) -> str:
    early = [str(first) for first in (8, 32) if continuation > first]
    spans = f"{', '.join(early)} and {continuation}" if early else str(continuation)
    whole = (
        f"KL(exact || track) per token, mean over the first {spans} tokens that follow the prompt"
        f"{', and over these means' if early else ''}, measured by the model with the whole cache on one track"
    )
    if not shaped:
        return whole + "."
    width = max(map(len, units))
    unit = "one group" if width == 1 else f"one group (in the middle of the prompt, up to {width} neighbours)"
    return (
        f"{whole}; split over groups in proportion to the same mean over up to {_ATTRIBUTED} tokens, measured with "
        f"{unit} at a time on the track and all others exact, run for {', '.join(shaped)} and taken for every other "
        f"track from the one of these with the nearest KL; {_MIN_SHARE:.0%} of it spread evenly."
    )
