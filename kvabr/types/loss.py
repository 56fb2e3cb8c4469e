"""The expected loss of a played cache: losses of groups on their tracks, and losses that recomputed groups inherit.

A recomputed group is exact if all earlier groups are exact. After lossy groups it inherits 5 % to 30 % of the loss that
it would have on their tracks (SmolLM2-135M, 8 groups of three texts; 4, 3 and 2 bits, and the draft's seven levels).
The model is `INHERITED` times the weighted mean of that loss; near groups have more weight, as in the distribution of
the track's losses. (21 recomputed groups after 42 lossy ones, 8,064 tokens: measured 0.00042, predicted without tails
0.0005.)

Groups recomputed at the end are a tail. If the catalog has the losses that remain after tails (`kvabr.types.tails`),
these are used for the groups before the tail; they include the loss that the tail inherits.

Decisions use the sum of the groups' losses. For a cache of mixed tracks, the promised loss is lower (`promised_loss`),
since a few groups on a coarse track lose less than their share of the loss with all groups on that track.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.errors import FormatError
from kvabr.types.tails import even_share, losses_with_tail, share_points

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INHERITED = 0.2
"""Fraction of its loss on the tracks of earlier groups that a recomputed group inherits."""
ALONE = 0.3
"""Fraction of a group's loss that is independent of other groups; the rest depends on groups that are as coarse
(SmolLM2-135M; see `promised_loss`).
"""


def predicted_loss(catalog: Catalog, tracks: Sequence[str]) -> float:
    """Return the expected loss of a cache with group g on ``tracks[g]``, in nats per generated token.

    ``tracks`` has each group's highest track, or `RECOMPUTED`.
    """
    if len(tracks) != catalog.groups:
        raise FormatError(f"tracks must name one for each of {catalog.groups} groups, got {len(tracks)}")
    inherited: dict[int, float] = {}
    lossy = _LossyGroups(catalog)
    for group, name in enumerate(tracks[: _tail(catalog, tracks)]):
        lossy.set(group, name)
        if name == RECOMPUTED:
            inherited[group] = lossy.inherited(group)
    return _total(catalog, tracks, inherited)


def played_loss(catalog: Catalog, steps: Iterable[tuple[str, int, int | str]]) -> float:
    """Return the expected loss of a cache assembled in these steps, in nats per generated token.

    A recomputed group inherits the errors that earlier groups have at that time. Steps are as in `PlayRecord.steps`:
    ("fetch", group, track) and ("compute", first, last). Raise `FormatError` for an invalid step, or a group without
    steps.
    """
    tracks = [""] * catalog.groups
    inherited: dict[int, float] = {}
    fresh: list[int] = []
    """Computed groups after which no group was fetched."""
    outdated: set[int] = set()
    """Other computed groups; earlier groups may have improved since they were computed."""
    lossy = _LossyGroups(catalog)
    for kind, where, what in steps:
        last = what if isinstance(what, int) else where + 1
        if kind not in {"fetch", "compute"} or not 0 <= where < last <= len(tracks):
            raise FormatError(f"steps must fetch or compute groups below {catalog.groups}, got {(kind, where, what)!r}")
        if kind == "fetch":
            outdated.update(fresh)
            fresh.clear()
        for group in range(where, last):
            tracks[group] = what if isinstance(what, str) else RECOMPUTED
            lossy.set(group, tracks[group])
            if tracks[group] == RECOMPUTED:
                inherited[group] = lossy.inherited(group)
                fresh.append(group)
    if "" in tracks:
        raise FormatError(f"group {tracks.index('')} is neither fetched nor computed")
    total, tail = _total(catalog, tracks, inherited), _tail(catalog, tracks)
    # The measured loss after a tail assumes that the tail was computed on the current groups.
    late = sorted(group for group in outdated if group >= tail and tracks[group] == RECOMPUTED)
    return total + sum(max(0.0, inherited[group] - lossy.inherited(group)) for group in late)


def _tail(catalog: Catalog, tracks: Sequence[str]) -> int:
    end = len(tracks)
    while end and tracks[end - 1] == RECOMPUTED:
        end -= 1
    known = catalog.even and all(catalog.track(name).tails for name in set(tracks[:end]) - {RECOMPUTED})
    return end if end and known else len(tracks)


def _total(catalog: Catalog, tracks: Sequence[str], inherited: Mapping[int, float]) -> float:
    tail = _tail(catalog, tracks)
    losses = _losses(catalog, set(tracks) - {RECOMPUTED}, tail, len(tracks))
    return sum(
        inherited[group] if name == RECOMPUTED else losses[name][group] for group, name in enumerate(tracks[:tail])
    )


def _losses(catalog: Catalog, names: Iterable[str], tail: int, groups: int) -> dict[str, Sequence[float]]:
    tracks = [catalog.track(name) for name in names]
    if tail == groups:
        return {track.name: track.loss for track in tracks}
    behind, size = catalog.tokens - catalog.tokens_before(tail), catalog.spec.group_tokens
    return {track.name: losses_with_tail(track.loss, track.tails, tail, behind, size) for track in tracks}


def promised_loss(catalog: Catalog, tracks: Sequence[str], added: float) -> float:
    """Return the loss to promise for a cache, or for its first groups, if the groups' losses add up to ``added``.

    A group loses more if other groups are as coarse. Let W be the total loss of a track beyond that of the next finer
    track, and s the share of W in groups on this track or a coarser one. These groups lose W (`ALONE` s + (1 - `ALONE`)
    s^2) instead of W s. So a cache on one track loses the sum, an exact cache 0, and a lower loss in a group never
    increases the promise. If the units are not all groups of one prompt, the sum is returned, as this case is not
    measured.

    ``catalog`` has the losses that remain after any tail; for ``tracks`` see `predicted_loss`; ``added`` is a result of
    `predicted_loss` or `played_loss`.
    """
    import numpy as np  # noqa: PLC0415  # slow to load

    tail = _tail(catalog, tracks)
    if not catalog.even or len(set(tracks[:tail])) < 2:
        return added
    losses = _losses(catalog, catalog.by_name, tail, len(tracks))
    levels = sorted(losses, key=lambda name: -sum(losses[name][:tail]))
    place = {name: number for number, name in enumerate(levels)}
    on = np.array([place.get(name, len(levels)) for name in tracks[:tail]])
    lost = np.array([losses[name][:tail] for name in levels])
    # A finer track may lose more in single groups. So limit a step to the excess of any coarser track over any finer
    # track.
    most = np.append(np.maximum.accumulate(lost[::-1])[::-1][1:], np.zeros((1, tail)), axis=0)
    more = np.maximum(0.0, np.minimum.accumulate(lost) - most)
    own, whole = np.where(on <= np.arange(len(levels))[:, None], more, 0.0).sum(axis=1), more.sum(axis=1)
    rest = 1.0 - np.divide(own, whole, out=np.ones(len(levels)), where=whole > 0)
    return max(0.0, added - (1.0 - ALONE) * float(own @ rest))


def factors_if_rest_computed(catalog: Catalog, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return factors and addends for groups' losses if the engine computes all groups after the first n.

    Index n of both arrays is from 0 to all groups; the first n groups are on one track. For catalogs with tails see
    `losses_with_tail`; without tails, the addends are the loss that computed groups inherit.
    """
    import numpy as np  # noqa: PLC0415  # slow to load

    track, size = catalog.track(name), catalog.spec.group_tokens
    sums: npt.NDArray[np.float64] = np.append(0.0, np.cumsum(track.loss))
    factors = np.ones(sums.shape)
    if not (catalog.even and track.tails):
        return factors, inherited_if_rest_computed(catalog, name) / np.maximum(1, np.arange(len(sums)))
    behind = catalog.tokens - np.array([catalog.tokens_before(count) for count in range(catalog.groups + 1)])
    left = sums[-1] * np.exp(np.interp(np.log1p(behind), *share_points(track.tails)))
    longest = track.tails[-1].tokens
    far, farther = (
        float(sums[max(1, catalog.groups - longest // size)]),
        sums[np.maximum(1, catalog.groups - behind // size)],
    )
    if far > 0:
        left = np.where(behind > longest, left * farther / far, left)
    np.divide(left, sums, out=factors, where=sums > 0)
    even = np.array([even_share(tokens) for tokens in behind.tolist()])
    return (1.0 - even) * factors, even * factors * sums / np.maximum(1, np.arange(len(sums)))


def inherited_if_rest_computed(catalog: Catalog, name: str) -> npt.NDArray[np.float64]:
    """Return the loss that all groups after the first n inherit if those n are on one track, for n from 0 to all.

    It is 0.0 if groups do not attend to all earlier groups, as the loss is then unknown.
    """
    import numpy as np  # noqa: PLC0415  # slow to load

    losses = np.array(catalog.track(name).loss)
    if not catalog.every_token:
        return np.zeros(len(losses) + 1)
    near, size = np.append(0.0, np.cumsum(losses[::-1])), 2 * len(losses) + 2
    each = np.divide(losses, near[:-1], out=np.zeros(len(losses)), where=near[:-1] > 0)
    # In one correlation, subtract the part that is inherited from groups after the first n.
    kept = np.fft.irfft(np.fft.rfft(each, size) * np.fft.rfft(near, size).conj(), size)[: len(near)]
    every = np.append(np.cumsum((each * near[:-1])[::-1])[::-1], 0.0)
    found: npt.NDArray[np.float64] = INHERITED * np.maximum(0.0, every - kept)
    return found


def inherited_later(losses: npt.NDArray[np.float64], on: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the loss that each group after the first n, at least 1, inherits if it is computed.

    Args:
        losses: loss of every group of the prompt, by track and group.
        on: True for each of the first n groups that is on a track, by track and group; the others count as exact.
    """
    import numpy as np  # noqa: PLC0415  # slow to load

    groups, first = losses.shape[1], on.shape[1]
    size = groups + first
    near = losses[:, ::-1].cumsum(axis=1)[:, first - 1 : groups - 1]
    correlated = np.fft.irfft(np.fft.rfft(losses, size) * np.fft.rfft(on, size).conj(), size)
    nearness = np.maximum(0.0, correlated[:, groups - first : 0 : -1])
    shares = np.divide(nearness, near, out=np.zeros(near.shape), where=near > 0)
    found: npt.NDArray[np.float64] = INHERITED * (losses[:, first:] * shares).sum(axis=0)
    return found


class _LossyGroups:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._on: dict[str, npt.NDArray[np.float64]] = {}
        self._name: list[str] = [""] * catalog.groups
        self._losses: dict[str, npt.NDArray[np.float64]] = {}

    def set(self, group: int, name: str) -> None:
        before, self._name[group] = self._name[group], name
        if before in self._on:
            self._on[before][group] = 0.0
        if name != RECOMPUTED:
            if name not in self._on:
                import numpy as np  # noqa: PLC0415  # slow to load

                self._on[name] = np.zeros(self._catalog.groups)
                self._losses[name] = np.array([*self._catalog.track(name).loss, 0.0])
            self._on[name][group] = 1.0

    def inherited(self, group: int) -> float:
        """Return the loss that a recomputed group inherits from the current earlier groups."""
        total = 0.0
        for name in sorted(self._on):
            total += self._handed_on(name, group)
        return INHERITED * total

    def _handed_on(self, name: str, group: int) -> float:
        losses, on = self._losses[name], self._on[name][:group]
        if not on.any():
            return 0.0
        # Weights are the losses of the last groups, which are as far from the end of the prompt as earlier groups are
        # from this one.
        catalog = self._catalog
        nearness = losses[-1 - group : -1] if catalog.every_token else losses[_as_far(catalog, group)]
        everything = float(nearness.sum())
        return float(losses[group]) * float(nearness @ on) / everything if everything else 0.0


def _as_far(catalog: Catalog, group: int) -> list[int]:
    """Map each group at a distance d before ``group`` to the group at distance d before the prompt's end.

    A group outside the attention window is mapped to -1 (the last position, with loss 0.0).
    """
    units = catalog.units
    places = {(unit.part, unit.chunk): index for index, unit in enumerate(units)}
    shift = len(catalog.chunks) - units[group].chunk
    return [places.get((unit.part, unit.chunk + shift), -1) for unit in units[:group]]
