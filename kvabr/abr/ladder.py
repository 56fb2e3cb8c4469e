"""The ladder of a catalog: its useful tracks, and the cost and saving of each step up.

It is computed once per catalog, on first use, and shared by all plays. `spend` chooses one option per group within a
budget of bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from kvabr.types.catalog import Catalog, Track


@dataclass(frozen=True, slots=True)
class Option:
    """One way to obtain a group: a track, and the layers below it."""

    track: str
    """The track; the top one if there are layers."""
    bytes: int
    """Total bytes, including the layers below."""
    loss: float


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One step on the lower convex hull of a group's options: ``bytes`` more, and ``saving`` nats less loss."""

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
    """The useful tracks of a catalog, cheapest first."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        tracks: list[Track] = []
        for track in sorted(catalog.tracks, key=lambda track: (track.total_bytes, track.total_loss)):
            # A larger track with the same loss or more is useless.
            if track.refines is None and (not tracks or track.total_loss < tracks[-1].total_loss):
                tracks.append(track)
        self.tracks: tuple[Track, ...] = tuple(tracks)
        """Self-contained tracks on the Pareto front of bytes against loss, cheapest first."""
        self.names: tuple[str, ...] = tuple(track.name for track in tracks)
        self.cheapest: str = self.names[0]
        self.stacks: dict[str, tuple[str, ...]] = {
            track.name: tuple(layer.name for layer in stack(catalog, track)) for track in catalog.tracks
        }
        """Names of the layers that each track needs, base first, itself last."""
        above: dict[str, list[Track]] = {}
        for track in catalog.tracks:
            if track.refines is not None:
                above.setdefault(track.refines, []).append(track)
        self.above: dict[str, tuple[Track, ...]] = {name: tuple(layers) for name, layers in above.items()}
        """The layers that refine each track; tracks without layers are absent."""

    @cached_property
    def options(self) -> Options:
        """Lower convex hull of each group's self-contained options, cheapest first."""
        return _hulls(self.catalog, self.tracks)

    @cached_property
    def steps(self) -> tuple[LadderStep, ...]:
        """All steps of all hulls, most loss saved per byte first: the best order to spend a budget in."""
        return rank(self.options)

    @cached_property
    def layered(self) -> Options:
        """Lower convex hull of all options of each group, including layers."""
        return every_option(self.catalog)

    @cached_property
    def layered_steps(self) -> tuple[LadderStep, ...]:
        """All steps of `layered`, most loss saved per byte first."""
        return rank(self.layered)


def rank(options: Options) -> tuple[LadderStep, ...]:
    """Return all steps along all groups' hulls, most loss saved per byte first."""
    steps = (
        LadderStep(group, b.track, b.bytes - a.bytes, a.loss - b.loss)
        for group, hull in enumerate(options)
        for a, b in pairwise(hull)
    )
    return tuple(sorted(steps, key=lambda step: -step.worth))


def every_option(catalog: Catalog) -> Options:
    """Return the lower convex hull of each group's options, including layers."""
    return _hulls(catalog, catalog.tracks)


def spend(options: Options, steps: Iterable[LadderStep], groups: Collection[int], budget: float) -> dict[int, str]:
    """Return the track of each of ``groups`` after spending ``budget`` bytes greedily.

    Every group starts with its cheapest option. Steps are taken in order, most loss saved per byte first, if they fit;
    a group stops at its first step that does not fit.
    """
    left = budget - sum(options[group][0].bytes for group in groups)
    tracks = {group: options[group][0].track for group in groups}
    stopped: set[int] = set()
    for step in steps:
        if step.group not in groups or step.group in stopped:
            continue
        if step.bytes <= left:
            left -= step.bytes
            tracks[step.group] = step.to
        else:
            stopped.add(step.group)
            if len(stopped) == len(groups):
                break
    return tracks


def stack(catalog: Catalog, track: Track) -> tuple[Track, ...]:
    """Return the layers that ``track`` needs, base first, itself last."""
    layers = [track]
    while layers[-1].refines is not None:
        layers.append(catalog.track(layers[-1].refines))
    return tuple(reversed(layers))


def _hulls(catalog: Catalog, tracks: Sequence[Track]) -> Options:
    stacks = [(track, stack(catalog, track)) for track in tracks]
    return tuple(_options(group, stacks) for group in range(catalog.groups))


def _options(group: int, stacks: Sequence[tuple[Track, tuple[Track, ...]]]) -> tuple[Option, ...]:
    """Return the lower convex hull of a group's options; ``stacks``: tracks, each with the layers that it needs."""
    return _hull(
        (sum(layer.bytes[group] for layer in layers), track.loss[group], track.name) for track, layers in stacks
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
