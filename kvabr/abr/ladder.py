"""A catalog as an ABR policy wants it: which tracks are worth playing, and what each step up costs and saves.

Computed once per catalog and shared by every play of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvabr.types.catalog import Catalog, Track


@dataclass(frozen=True, slots=True)
class Option:
    """One way to have one group: its cost in bytes and its expected loss."""

    track: str
    """The track; for layers, the topmost one."""
    bytes: int
    """Bytes to have it from nothing, layers below included."""
    loss: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step along the lower convex hull of a group's options: ``saving`` nats for ``bytes`` more."""

    group: int
    to: str
    bytes: int
    saving: float

    @property
    def worth(self) -> float:
        """Loss saved per byte."""
        return self.saving / self.bytes


Options = tuple[tuple[Option, ...], ...]


class Frontier:
    """What bytes are worth when they are spent as well as possible, layers included."""

    def __init__(self, catalog: Catalog) -> None:
        steps = rank(every_option(catalog))
        self._bytes = list(accumulate(step.bytes for step in steps))
        self._worth = [step.worth for step in steps]

    def price(self, spare: float) -> float:
        """Nats per token that one byte more saves.

        Args:
            spare: bytes that there are beside the cheapest cache.

        Returns:
            Infinity if they are not even enough for that, 0.0 if all that could be saved is.
        """
        if spare < 0:
            return float("inf")
        index = bisect_left(self._bytes, spare)
        return self._worth[index] if index < len(self._worth) else 0.0


class Ladder:
    """The tracks of a catalog that are worth playing, cheapest first."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        alone = sorted(
            (track for track in catalog.tracks if track.refines is None),
            key=lambda track: (track.total_bytes, sum(track.loss)),
        )
        tracks: list[Track] = []
        for track in alone:
            # A track that costs more and loses no less is never worth asking for.
            if not tracks or sum(track.loss) < sum(tracks[-1].loss):
                tracks.append(track)
        self.tracks: tuple[Track, ...] = tuple(tracks)
        """Self-contained tracks on the Pareto front of bytes against loss, cheapest first."""
        self.names: tuple[str, ...] = tuple(track.name for track in tracks)
        self.cheapest: str = self.names[0]
        self.best: str = self.names[-1]
        self.options: Options = tuple(_hull(catalog, self.tracks, g) for g in range(catalog.groups))
        """Per group, the lower convex hull of its self-contained options, cheapest first."""
        self.steps: tuple[Step, ...] = rank(self.options)
        """Every step of every hull, most loss saved per byte first: the order in which a budget is best spent."""
        self.frontier: Frontier = Frontier(catalog)
        """What bytes are worth where layers are made use of."""

    def index(self, track: str) -> int:
        """Place of ``track`` among `tracks`."""
        return self.names.index(track)


def rank(options: Options) -> tuple[Step, ...]:
    """Every step along every group's hull, most loss saved per byte first."""
    steps = [
        Step(group, b.track, b.bytes - a.bytes, a.loss - b.loss)
        for group, hull in enumerate(options)
        for a, b in pairwise(hull)
    ]
    return tuple(sorted(steps, key=lambda step: -step.worth))


def every_option(catalog: Catalog) -> Options:
    """Per group, the lower convex hull of all its options, layers stacked on what they refine included."""
    return tuple(_hull(catalog, catalog.tracks, group) for group in range(catalog.groups))


def stack(catalog: Catalog, track: Track) -> tuple[Track, ...]:
    """The layers that ``track`` needs, base first, itself last."""
    layers = [track]
    while layers[-1].refines is not None:
        layers.append(catalog.track(layers[-1].refines))
    return tuple(reversed(layers))


def _hull(catalog: Catalog, tracks: Sequence[Track], group: int) -> tuple[Option, ...]:
    points = sorted(
        (sum(layer.bytes[group] for layer in stack(catalog, track)), track.loss[group], track.name) for track in tracks
    )
    hull: list[Option] = []
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
