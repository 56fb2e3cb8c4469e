"""Expected loss of every group on every track, measured by the real model.

For every track the whole cache is decoded and the continuation scored once: that gives KL, also of the first tokens,
change of NLL and top-1. The loss is `kvabr.types.tracks.Quality.loss`, which counts the first tokens more. Then, for a
few tracks, one group at a time is replaced in an otherwise exact cache: the loss of that run is the group's own, with
the same weights (by the KL over all tokens alone, the last groups would have too small a share, and caches whose end is
better twice the loss that they have). Coding noise of groups is nearly independent, and KL is quadratic in small noise,
so these nearly add up (SmolLM2: 3- and 4-bit caches to 0.75 to 1.3 of the loss of the whole cache, AC-L0 to half), and
are scaled to the track's loss. Lossy tracks get shares of their own, because codecs differ in where they hurt (one that
keeps the attention sinks exact spares the first group); a nearly lossless one takes those of the track with the nearest
KL. `kvabr.publish.tails` measures what is left behind a tail.

One forward pass is one measurement, bounded by `MAX_PASSES`. Finally a few mixed caches, as players end with, are
scored: the catalog lists how well their losses are predicted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise
from typing import TYPE_CHECKING

import torch

from kvabr.codec.group import clean, cut
from kvabr.publish.model import ScoringEngine, score_classes
from kvabr.types.catalog import RECOMPUTED, Catalog, Mix, Quality
from kvabr.types.errors import ModelError
from kvabr.types.kv import KVSpec
from kvabr.types.loss import predicted_loss
from kvabr.types.tails import TailLoss
from kvabr.types.units import Unit, needed, units_of

if TYPE_CHECKING:
    from kvabr.publish.tails import TailMeter

Decoder = Callable[[int, str, torch.Tensor], None]
"""Decodes ``(group, track, out)`` into a tensor [layer, K/V, head, token, dim] of the group's tokens."""
Cache = torch.Tensor | tuple[torch.Tensor, ...]
"""A cache, [layer, K/V, head, token, dim]; a tensor per layer class where there are several."""

MAX_PASSES = 192
"""Forward passes of the attribution beyond one per track: enough for four tracks of 48 groups."""

LEAST_UNITS = 16
"""Minimum number of units into which a long cache is cut, even if tracks must then share their shares."""

NOISE_FLOOR = 1e-4
"""KL below which a track's groups are not measured one by one: no player could tell them apart."""

_ATTRIBUTED = 64
"""Tokens of the continuation that single groups are measured on: the first ones bear most of the loss."""
_LEAST_SHARE = 0.01
"""Share of a track's loss that is spread evenly: a group is not free because one continuation ignored it."""


def compare(exact: torch.Tensor, other: torch.Tensor, tokens: Sequence[int]) -> Quality:
    """Return what a continuation loses between two runs.

    Args:
        exact: log-probabilities behind the exact cache, [token, vocabulary] float64.
        other: the same behind the cache to measure.
        tokens: the continuation; row i of both is the distribution of ``tokens[i + 1]``.

    Returns:
        Mean KL(exact || other) over all rows, and over the first of more than 8 and 32; top-1 agreement over all rows;
        the change of the negative log-likelihood over the rows whose next token is known.

    Raises:
        ModelError: either run has probabilities that are not finite.
    """
    # Row by row: distributions over a vocabulary take many megabytes, and fresh memory is slow.
    rows = [float(torch.dot(row.exp(), row - same)) for row, same in zip(exact, other, strict=True)]
    if not math.isfinite(sum(rows)):
        raise ModelError("the model's probabilities are NaN or infinite; its weights, or its caches, are damaged")
    following = torch.tensor(tokens[1:], dtype=torch.long)[:, None]
    gained = exact[:-1].gather(1, following) - other[:-1].gather(1, following)
    agree = (exact.numpy().argmax(axis=1) == other.numpy().argmax(axis=1)).mean()  # torch takes five times as long
    # A KL is never negative; rounding can take one of two equal runs an ulp below.
    kl8, kl32 = (max(0.0, sum(rows[:first]) / first) if len(rows) > first else None for first in (8, 32))
    return Quality(max(0.0, sum(rows) / len(rows)), float(gained.mean()), float(agree), kl8, kl32)


class Reference:
    """The exact cache's scores of a continuation, which other caches are measured against at a forward pass each."""

    def __init__(
        self,
        engine: ScoringEngine,
        exact: Cache | None,
        continuation: Sequence[int],
        *,
        before: torch.Tensor | None = None,
        asked: int = 0,
    ) -> None:
        """Score the ids of a continuation, at least two, behind the exact cache.

        With ``before``, [layer, K/V, head, token, dim], that comes before every cache. The first ``asked`` ids are a
        question: only what is said behind them is compared.

        Raises `ModelError` if the continuation is too short, or does not fit the model.
        """
        if len(continuation) < 2 + max(0, asked - 1):
            raise ModelError(f"measuring a loss takes a continuation of at least 2 tokens, not {len(continuation)}")
        self.engine, self.before, self.asked = engine, before, asked
        self.continuation = tuple(continuation)
        self._exact = self.score(exact)
        if asked > 1:
            self._exact = self._exact.clone()  # or the rows of the question would stay in memory

    def calibration(self) -> tuple[float, float]:
        """Return the NLL of the continuation behind the exact cache, and what the model expects it to be, its entropy.

        Both are means over the tokens but the first, in nats. Where they are equal, a small error changes the NLL about
        as much as the KL says. Where they are not, the NLL has a slope at the exact cache: errors may change it many
        times as much, in both directions.
        """
        rows = self._exact[:-1]
        following = self.continuation[max(1, self.asked) :]
        said = rows.gather(1, torch.tensor(following, dtype=torch.long)[:, None])
        expected = sum(float(torch.dot(row.exp(), row)) for row in rows) / len(rows)
        return -float(said.mean()), -expected

    def measure(self, kv: Cache | None, most: int | None = None) -> Quality:
        """Return what the continuation loses when ``kv`` replaces the exact cache; its first ``most`` tokens alone."""
        return self.compared(self.score(kv, most))

    def compared(self, scored: torch.Tensor, first: int = 0) -> Quality:
        """Return the loss from what `score` returned, over the tokens from number ``first`` on."""
        rows = slice(first, len(scored))
        return compare(self._exact[rows], scored[rows], self.continuation[max(0, self.asked - 1) :][rows])

    def score(self, kv: Cache | None, most: int | None = None) -> torch.Tensor:
        """Return log-probabilities behind a cache: of what follows the question, or the first id of the continuation.

        They are float64, [token, vocabulary], for the first ``most`` ids or all.
        """
        skipped = max(0, self.asked - 1)
        ids = self.continuation[: None if most is None else skipped + most]
        return score_classes(self.engine, placed(kv, self.before), ids)[skipped:]


def placed(kv: Cache | None, before: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """Return a cache as an engine takes it: a tensor per layer class, with what comes ``before`` it."""
    parts = (kv,) if isinstance(kv, torch.Tensor) else kv
    if before is not None and parts is not None:
        parts = (torch.cat((before, parts[0]), dim=3),)
    return parts


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured losses of one asset."""

    quality: Mapping[str, Quality]
    """By track: the whole cache on it."""
    loss: Mapping[str, tuple[float, ...]]
    """By track and group: expected loss, nats per token. A track's losses add up to its `Quality.loss`."""
    method: str
    """How they were attributed, in words."""
    tails: Mapping[str, tuple[TailLoss, ...]]
    """By track, see `kvabr.types.tracks.Track.tails`; empty if they were not measured."""


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
    """Measure whole tracks and single groups, and attribute the loss.

    Args:
        reference: scores of the exact cache.
        exact: that cache, a tensor per layer class, [layer, K/V, head, token, dim] of all tokens, or of all snapshots
            of a state; read, never written.
        spec: its shape and groups.
        tracks: names of the tracks.
        decode: decodes one group of one track.
        tokens: tokens of the prompt; None: as many as the first tensor has, which is then not a state's.
        max_passes: forward passes beyond one per track, see `MAX_PASSES`.
        meter: measures what is left behind tails; None: nothing does.
        progress: called after every measurement, with its stage (``measure``: whole tracks, ``tails``, ``groups``), and
            how many of the stage's measurements are done.

    Groups that the continuation cannot see lose nothing (`kvabr.types.units.needed`).
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
    for track in shaped:
        singles = []
        for unit in units:
            groups = [seen[index] for index in unit]
            work.put(track, groups)
            singles.append(reference.measure(work.cache, _ATTRIBUTED).loss)
            work.restore(groups)
            progress("groups", next(done), total)
        shares[track] = _shares(singles, units, sizes)

    even = [size / sum(sizes) for size in sizes]
    loss = {}
    for track in tracks:
        near = _nearest(quality, track, shaped)
        losses = dict(zip(seen, (whole[track] * share for share in (shares[near] if near else even)), strict=True))
        loss[track] = tuple(losses.get(group, 0.0) for group in range(len(work.units)))
    return Measured(quality, loss, _in_words(len(reference.continuation), shaped, units), tails)


class _Work:
    """A cache whose groups (units) are put on tracks, and made exact again."""

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
    """Compute tails on whole tracks, of which the meter has seen those that lose most, if any loses much."""

    def decoded(track: str) -> tuple[torch.Tensor, ...]:
        # A shorter prompt sees groups of a window that the whole one does not.
        work.put(track, range(len(work.units)))
        return work.cache

    if not meter.tracks:
        worst = max(losses, key=losses.__getitem__)
        meter.near(worst, decoded(worst), reference.score(work.cache))
    total, done = meter.caches, count(1)
    meter.far(decoded, lambda: progress("tails", next(done), total))
    return meter.tails(losses)


def sample_mixes(catalog: Catalog, seed: int = 0) -> list[list[str]]:
    """Return seeded assignments of tracks to groups, like those that plays end with. A layer counts as a track.

    They are two random ones; a good beginning with a cheap rest; and runs of groups that were recomputed: at the end,
    in the middle, at the beginning, and scattered over a cheap cache.
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
        if len(set(mix)) == 1:  # one track alone is no mix
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
    """Assemble each mixed cache, recomputing groups behind those in place, and score it.

    A mix has one track per group, or `RECOMPUTED`. The catalog predicts its loss, the reference's engine recomputes.
    """
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
                # A cache of 16 bits may hold infinities; the exact one is measured without them as well.
                work[:, :, :, begin:end] = clean(engine.prefill(prompt[begin:end], work[:, :, :, :begin]))[0]
            else:
                for group in groups:
                    first, last = spec.group_range(group, catalog.tokens)
                    decode(group, name, work[:, :, :, first:last])
        out.append(Mix(tuple(mix), predicted_loss(catalog, mix), reference.measure(work).loss))
        progress(number + 1, len(mixes))
    return out


def _plan(kl: Mapping[str, float], groups: int, max_passes: int) -> tuple[list[range], list[str]]:
    """Return units of groups to replace together, and tracks to do it for, within ``max_passes`` forward passes."""
    if groups == 1:
        return [range(1)], []
    lossy = max(1, sum(value > NOISE_FLOOR for value in kl.values()))
    units = _units(groups, max(LEAST_UNITS, max_passes // lossy))
    return units, _pick(kl, max(1, min(lossy, max_passes // len(units))))


def _units(groups: int, limit: int) -> list[range]:
    """Return at most ``limit`` runs of neighbouring groups.

    The first group (it holds the attention sinks) and the last ones (they are the nearest to what follows) bear most of
    the loss: each is a unit of its own, and the middle is cut into equal runs.
    """
    if groups <= limit:
        return [range(group, group + 1) for group in range(groups)]
    tail = limit // 4
    middle, runs = groups - 1 - tail, limit - 1 - tail
    cuts = [1 + middle * index // runs for index in range(runs + 1)]
    bounds = [0, *cuts, *range(groups - tail + 1, groups + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _pick(kl: Mapping[str, float], most: int) -> list[str]:
    """Return the tracks whose groups are measured one by one: evenly spread from the most to the least lossy."""
    lossy = sorted((track for track in kl if kl[track] > NOISE_FLOOR), key=lambda track: -kl[track])
    return evenly(lossy or [max(kl, key=lambda track: kl[track])], most)


def evenly(ordered: Sequence[str], most: int) -> list[str]:
    """Return at most so many of some names in order, with the first and the last, evenly spaced."""
    if most >= len(ordered) or most == 1:
        return list(ordered[:most])
    return [ordered[round(index * (len(ordered) - 1) / (most - 1))] for index in range(most)]


def _shares(singles: Sequence[float], units: Sequence[range], sizes: Sequence[int]) -> list[float]:
    """Return every group's share in the loss of a track: its unit's loss, split by size within the unit."""
    everything, whole = sum(singles), sum(sizes)
    shares = []
    for unit, single in zip(units, singles, strict=True):
        size = sum(sizes[group] for group in unit)
        for group in unit:
            measured = single / everything * sizes[group] / size if everything > 0 else sizes[group] / whole
            shares.append((1 - _LEAST_SHARE) * measured + _LEAST_SHARE * sizes[group] / whole)
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
        f"track from the one of these with the nearest KL; {_LEAST_SHARE:.0%} of it spread evenly."
    )
