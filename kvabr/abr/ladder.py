"""The ladder of a catalog: which tracks are worth playing, and what each step up costs and saves.

It is computed once per catalog and shared by every play of it. `spend` and `knapsack` choose one option per group
within a budget of bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

from kvabr.types.catalog import Catalog, Track


@dataclass(frozen=True, slots=True)
class Option:
    """One way to obtain one group: its bytes and its expected loss."""

    track: str
    """The track; with layers, the topmost one."""
    bytes: int
    """Bytes from nothing, including the layers below."""
    loss: float


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One step along the lower convex hull of a group's options: ``bytes`` more for ``saving`` nats less."""

    group: int
    to: str
    bytes: int
    saving: float

    @property
    def worth(self) -> float:
        """Loss saved per byte."""
        return self.saving / self.bytes


Options = tuple[tuple[Option, ...], ...]


class Ladder:
    """The tracks of a catalog that are worth playing, cheapest first."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        tracks: list[Track] = []
        for track in sorted(catalog.tracks, key=lambda track: (track.total_bytes, sum(track.loss))):
            # A track that costs more and loses no less is never worth requesting.
            if track.refines is None and (not tracks or sum(track.loss) < sum(tracks[-1].loss)):
                tracks.append(track)
        self.tracks: tuple[Track, ...] = tuple(tracks)
        """Self-contained tracks on the Pareto front of bytes against loss, cheapest first."""
        self.names: tuple[str, ...] = tuple(track.name for track in tracks)
        self.cheapest: str = self.names[0]
        self.options: Options = _hulls(catalog, self.tracks)
        """Lower convex hull of each group's self-contained options, cheapest first."""
        self.steps: tuple[LadderStep, ...] = rank(self.options)
        """All steps of all hulls, most loss saved per byte first: the best order to spend a budget in."""
        self.stacks: dict[str, tuple[str, ...]] = {
            track.name: tuple(layer.name for layer in stack(catalog, track)) for track in catalog.tracks
        }
        """Names of the layers that each track needs, base first, itself last."""
        above: dict[str, list[Track]] = {}
        for track in catalog.tracks:
            if track.refines is not None:
                above.setdefault(track.refines, []).append(track)
        self.above: dict[str, tuple[Track, ...]] = {name: tuple(layers) for name, layers in above.items()}
        """The layers that refine each track; tracks without any are left out."""
        self.layered: Options = every_option(catalog)
        """Lower convex hull of all options of each group, layers stacked on what they refine included."""
        self.layered_steps: tuple[LadderStep, ...] = rank(self.layered)
        """All steps of these hulls, most loss saved per byte first."""
        self._spent = list(accumulate(step.bytes for step in self.layered_steps))

    def price(self, spare: float) -> float:
        """Return the nats per token that one more byte saves if all are spent as well as possible, layers included.

        Infinity if ``spare``, the bytes beyond the cheapest cache, is negative; 0.0 if nothing is left to save.
        """
        if spare < 0:
            return float("inf")
        index = bisect_left(self._spent, spare)
        return self.layered_steps[index].worth if index < len(self._spent) else 0.0


def rank(options: Options) -> tuple[LadderStep, ...]:
    """Return all steps along all groups' hulls, most loss saved per byte first."""
    steps = (
        LadderStep(group, b.track, b.bytes - a.bytes, a.loss - b.loss)
        for group, hull in enumerate(options)
        for a, b in pairwise(hull)
    )
    return tuple(sorted(steps, key=lambda step: -step.worth))


def every_option(catalog: Catalog) -> Options:
    """Return the lower convex hull of each group's options, including layers stacked on what they refine."""
    return _hulls(catalog, catalog.tracks)


def spend(options: Options, steps: Iterable[LadderStep], groups: Collection[int], first: int, budget: float) -> str:
    """Return the track that group ``first`` gets when ``budget`` bytes are spent greedily on several ``groups``.

    Every group starts with the cheapest of its options. Steps, most loss saved per byte first, are taken as long as
    they fit; a group whose next step does not fit gets no more.
    """
    left = budget - sum(options[group][0].bytes for group in groups)
    track = options[first][0].track
    stopped: set[int] = set()
    for step in steps:
        if step.group not in groups or step.group in stopped:
            continue
        if step.bytes <= left:
            left -= step.bytes
            if step.group == first:
                track = step.to
        else:
            stopped.add(step.group)
            if step.group == first or len(stopped) == len(groups):
                break
    return track


def stack(catalog: Catalog, track: Track) -> tuple[Track, ...]:
    """Return the layers that ``track`` needs, base first, itself last."""
    layers = [track]
    while layers[-1].refines is not None:
        layers.append(catalog.track(layers[-1].refines))
    return tuple(reversed(layers))


def _hulls(catalog: Catalog, tracks: Sequence[Track]) -> Options:
    stacks = [(track, stack(catalog, track)) for track in tracks]
    return tuple(
        _hull((sum(layer.bytes[group] for layer in layers), track.loss[group], track.name) for track, layers in stacks)
        for group in range(catalog.groups)
    )


def _hull(choices: Iterable[tuple[int, float, str]]) -> tuple[Option, ...]:
    points, hull = sorted(choices), list[Option]()
    for nbytes, loss, name in points:
        if hull and loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _worth(hull[-2], nbytes, loss) >= _worth(hull[-2], hull[-1].bytes, hull[-1].loss):
            hull.pop()
        if hull and nbytes == hull[-1].bytes:
            hull.pop()
        hull.append(Option(name, nbytes, loss))
    return tuple(hull)


def _worth(start: Option, nbytes: int, loss: float) -> float:
    return (start.loss - loss) / (nbytes - start.bytes) if nbytes > start.bytes else float("inf")


_CELLS = 1 << 17
"""Total cells of the grid over all groups: fewer groups get a finer grid."""
_MOST_CELLS, _LEAST_CELLS = 8192, 1024


class Choice(NamedTuple):
    """One option of one group."""

    bytes: int
    loss: float
    """Nats per generated token, or any other quantity whose sum is minimised."""


def knapsack(groups: Sequence[Sequence[Choice]], budget: float, *, exact: bool = True) -> list[int] | None:
    """Return the index of the option to take for each group, or None if not even the smallest options fit.

    The better of two results: greedily, by the step that saves most loss per byte among those that still fit; and, if
    ``exact`` (several times slower), by dynamic programming over the bytes, rounded up to a grid, with the rounding gap
    spent greedily, which finds combinations that fill the last bytes.
    """
    least = [choices.index(min(choices)) for choices in groups]
    if sum(choices[index].bytes for choices, index in zip(groups, least, strict=True)) > budget:
        return None
    found = _filled(groups, list(least), budget)
    other = _programmed(groups, budget) if exact else None
    if other is not None:
        other = _filled(groups, other, budget)
        if _loss(groups, other) < _loss(groups, found):
            return other
    return found


def _loss(groups: Sequence[Sequence[Choice]], picks: Sequence[int]) -> float:
    return sum(choices[index].loss for choices, index in zip(groups, picks, strict=True))


def _filled(groups: Sequence[Sequence[Choice]], picks: list[int], budget: float) -> list[int]:
    """Take the step that saves most per byte as long as any step fits."""
    left = budget - sum(choices[index].bytes for choices, index in zip(groups, picks, strict=True))
    heap: list[tuple[float, int, int]] = []

    def offer(group: int) -> None:
        now = groups[group][picks[group]]
        steps = [
            (-saving / more if more > 0 else float("-inf"), group, index)
            for index, choice in enumerate(groups[group])
            if (saving := now.loss - choice.loss) > 0 and (more := choice.bytes - now.bytes) <= left
        ]
        if steps:
            heappush(heap, min(steps))

    for group in range(len(groups)):
        offer(group)
    while heap:
        _, group, index = heappop(heap)
        more = groups[group][index].bytes - groups[group][picks[group]].bytes
        if more <= left:
            left -= more
            picks[group] = index
        offer(group)
    return picks


def _programmed(groups: Sequence[Sequence[Choice]], budget: float) -> list[int] | None:
    """Return the best options on the rounded grid; None if even the smallest do not fit after rounding."""
    import numpy as np  # noqa: PLC0415  # loads slowly, and most plays never need it

    cells = max(_LEAST_CELLS, min(_MOST_CELLS, _CELLS // max(1, len(groups))))
    if budget < 1:
        return None  # nothing of any size fits, and the grid would have no resolution
    unit = budget / cells
    value = np.zeros(cells + 1)
    picked = np.zeros((len(groups), cells + 1), dtype=np.int16)
    for group, choices in enumerate(groups):
        best = np.full(cells + 1, np.inf)
        for index, choice in enumerate(choices):
            size = int(np.ceil(choice.bytes / unit))
            if size > cells:
                continue
            with_it = value[: cells + 1 - size] + choice.loss
            better = with_it < best[size:]
            best[size:][better] = with_it[better]
            picked[group, size:][better] = index
        value = best
    if not np.isfinite(value[cells]):
        return None
    picks, cell = [0] * len(groups), cells
    for group in range(len(groups) - 1, -1, -1):
        picks[group] = int(picked[group, cell])
        cell -= int(np.ceil(groups[group][picks[group]].bytes / unit))
    return picks
