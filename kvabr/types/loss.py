"""The expected loss of a cache that was played: what its groups lose on their tracks, and what recomputed ones inherit.

A recomputed group is exact if everything before it is exact. Behind lossy groups it inherits part of their error: 5 %
to 30 % of what it would cost on the tracks before it, whatever the track (SmolLM2-135M, 8 groups of three texts; 4, 3
and 2 bits, and the draft's seven levels). The model here is `INHERITED` times their weighted mean, in which near groups
weigh more, as the shape of a track's own losses tells. (21 recomputed groups behind 42 lossy ones of 8,064 tokens:
measured 0.00042; a plain mean predicts 0.0031, this model 0.0005.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.errors import FormatError

INHERITED = 0.2
"""Share of the loss on the tracks before it that a recomputed group inherits."""


def predicted_loss(catalog: Catalog, tracks: Sequence[str]) -> float:
    """Return the expected loss of a cache whose group g was played on ``tracks[g]``, in nats per generated token.

    ``tracks`` names the highest track in place of each group, or `RECOMPUTED`.
    """
    if len(tracks) != catalog.groups:
        raise FormatError(f"{len(tracks)} tracks for an asset of {catalog.groups} groups")
    inherited: dict[int, float] = {}
    lossy = _LossyGroups(catalog)
    for group, name in enumerate(tracks):
        lossy.set(group, name)
        if name == RECOMPUTED:
            inherited[group] = lossy.inherited(group)
    return _total(catalog, tracks, inherited)


def played_loss(catalog: Catalog, steps: Iterable[tuple[str, int, int | str]]) -> float:
    """Return the expected loss of a cache that was assembled in these steps, in nats per generated token.

    A recomputed group inherits the errors that the groups before it had at that time. Upgrading them later improves
    only them. Steps are as in `PlayRecord.steps`: ("fetch", group, track) and ("compute", first, last); a `FormatError`
    says which group they leave out.
    """
    tracks = [""] * catalog.groups
    inherited: dict[int, float] = {}
    lossy = _LossyGroups(catalog)
    for kind, where, what in steps:
        last = what if isinstance(what, int) else where + 1
        if kind not in {"fetch", "compute"} or not 0 <= where < last <= len(tracks):
            raise FormatError(f"invalid step {(kind, where, what)!r} in a play of {catalog.groups} groups")
        for group in range(where, last):
            tracks[group] = what if isinstance(what, str) else RECOMPUTED
            lossy.set(group, tracks[group])
            if tracks[group] == RECOMPUTED:
                inherited[group] = lossy.inherited(group)
    if "" in tracks:
        raise FormatError(f"group {tracks.index('')} is neither fetched nor computed")
    return _total(catalog, tracks, inherited)


def _total(catalog: Catalog, tracks: Sequence[str], inherited: Mapping[int, float]) -> float:
    """Sum the losses; ``inherited`` maps computed groups to what they have of the groups before them."""
    return sum(
        inherited[group] if name == RECOMPUTED else catalog.track(name).loss[group] for group, name in enumerate(tracks)
    )


class _LossyGroups:
    """Which groups of a cache are on which track, while it is assembled.

    Groups on one track mostly lie side by side, so sums over runs of them take no longer for a longer prompt.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._on: dict[str, bytearray] = {}
        """Per track, whether each group is on it."""
        self._name: list[str] = [""] * catalog.groups
        self._sums: dict[str, list[float]] = {}
        """Per track, the losses of all groups before each, summed."""

    def set(self, group: int, name: str) -> None:
        """Put a group on a track."""
        before, self._name[group] = self._name[group], name
        if before in self._on:
            self._on[before][group] = 0
        if name != RECOMPUTED:
            self._on.setdefault(name, bytearray(self._catalog.groups))[group] = 1

    def inherited(self, group: int) -> float:
        """Return the loss that a recomputed group has of the groups before it, as they are now."""
        total = 0.0
        for name in sorted(self._on):
            if self._on[name].find(1, 0, group) >= 0:
                total += self._handed_on(name, group)
        return INHERITED * total

    def _handed_on(self, name: str, group: int) -> float:
        """Return the loss that a recomputed group would inherit in full from the groups before it on one track."""
        catalog, on = self._catalog, self._on[name]
        losses = catalog.track(name).loss
        if not catalog.every_token:
            as_far = _as_far(catalog, group)
            nearness = [0.0 if far is None else losses[far] for far in as_far]
            everything, share = sum(nearness), sum(near for near, here in zip(nearness, on, strict=False) if here)
        else:
            # The last groups of the prompt are as far from its end as those before this one are from it.
            sums = self._sums.get(name) or self._add_up(name, losses)
            shift = catalog.groups - group
            everything, share, begin = sums[-1] - sums[shift], 0.0, on.find(1, 0, group)
            while begin >= 0:
                end = on.find(0, begin, group)
                end = group if end < 0 else end
                share += sums[shift + end] - sums[shift + begin]
                begin = on.find(1, end, group)
        return losses[group] * share / everything if everything else 0.0

    def _add_up(self, name: str, losses: Sequence[float]) -> list[float]:
        self._sums[name] = list(accumulate(losses, initial=0.0))
        return self._sums[name]


def _as_far(catalog: Catalog, group: int) -> Sequence[int | None]:
    """Return, for each group before ``group``, the one that is as far from the end of the prompt as it is from that.

    None: there is none, as the group is of a window and too far away to be seen.
    """
    if catalog.every_token:
        return range(catalog.groups - group, catalog.groups)
    units = catalog.units
    places = {(unit.part, unit.chunk): index for index, unit in enumerate(units)}
    shift = len(catalog.chunks) - units[group].chunk
    return [places.get((unit.part, unit.chunk + shift)) for unit in units[:group]]
