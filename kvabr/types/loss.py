"""The expected loss of a cache that was played: what its groups lose on their tracks, and what recomputed ones inherit.

A recomputed group is exact if everything before it is exact. Behind lossy groups it inherits part of their error: 5 %
to 30 % of what it would cost on the tracks before it, whatever the track (SmolLM2-135M, 8 groups of three texts; 4, 3
and 2 bits, and the draft's seven levels). The model here is `INHERITED` times their weighted mean, in which near groups
weigh more, as the shape of a track's own losses tells. (21 recomputed groups behind 42 lossy ones of 8,064 tokens:
measured 0.00042; a plain mean predicts 0.0031, this model 0.0005.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    return _total(catalog, tracks, {})


def played_loss(catalog: Catalog, steps: Iterable[tuple[str, int, int | str]]) -> float:
    """Return the expected loss of a cache that was assembled in these steps, in nats per generated token.

    A recomputed group inherits the errors that the groups before it had at that time. Upgrading them later improves
    only them. Steps are as in `PlayRecord.steps`: ("fetch", group, track) and ("compute", first, last); a `FormatError`
    says which group they leave out.
    """
    tracks = [""] * catalog.groups
    behind: dict[int, Sequence[str]] = {}
    for kind, where, what in steps:
        last = what if isinstance(what, int) else where + 1
        if kind not in {"fetch", "compute"} or not 0 <= where < last <= len(tracks):
            raise FormatError(f"invalid step {(kind, where, what)!r} in a play of {catalog.groups} groups")
        for group in range(where, last):
            tracks[group] = what if isinstance(what, str) else RECOMPUTED
            behind[group] = tracks[:group]
    if "" in tracks:
        raise FormatError(f"group {tracks.index('')} is neither fetched nor computed")
    return _total(catalog, tracks, behind)


def _total(catalog: Catalog, tracks: Sequence[str], behind: Mapping[int, Sequence[str]]) -> float:
    """Sum the losses; ``behind`` maps computed groups to the tracks before them at that time."""
    total = 0.0
    for group, name in enumerate(tracks):
        if name != RECOMPUTED:
            total += catalog.track(name).loss[group]
        else:
            before = behind.get(group, tracks[:group])
            far = _as_far(catalog, group)
            total += INHERITED * sum(_handed_on(catalog, other, before, group, far) for other in sorted(set(before)))
    return total


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


def _handed_on(catalog: Catalog, name: str, before: Sequence[str], group: int, as_far: Sequence[int | None]) -> float:
    """Return the loss that a recomputed group would inherit in full from the groups before it on track ``name``."""
    if name == RECOMPUTED:
        return 0.0
    losses = catalog.track(name).loss
    nearness = [0.0 if far is None else losses[far] for far in as_far]
    everything = sum(nearness)
    if not everything:
        return 0.0
    share = sum(near for near, other in zip(nearness, before, strict=True) if other == name) / everything
    return losses[group] * share
