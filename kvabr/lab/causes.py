"""Why a play is not as good as the clairvoyant's: its regret, split so that the parts add up.

A regret is a loss above the bound's, plus a penalty if the play was late. Both are walked down a ladder of plays that
are each a little better than the one before; what a rung saves is charged to its cause.

The loss of a play that spent its bytes on certain tracks goes down in these steps, f(x) being the least loss that x
bytes can buy (`kvabr.lab.causes`), C what the link carries by the deadline, and no step going below the bound:

1. ``order``: the bytes in place, U, could have bought f(U). Choices that cannot be taken back: tracks that are not
   layers, an engine's order, a sequence of upgrades that was not the best.
2. ``decode``: bytes that had arrived and were not decoded when the play ended.
3. ``wasted``: bytes of abandoned, failed and replaced transfers, and what cancelled ones still took from the link.
4. ``too_high``: bytes of requests that were under way when the play ended. It asked for more than came.
5. ``idle``: what the link could have carried while requests were out and none was served yet: round trips.
6. ``too_low``: all else that the link could have carried by the deadline: the play asked for nothing, or had ended,
   since it thought that nothing more would arrive in time (or wanted nothing more).
7. ``compute``: with an engine, what is left to the bound of network and compute. Other groups, or more of them, should
   have been recomputed. Zero without one.

The penalty for lateness, P(t), goes down by the time at which the cache would have been complete:

1. ``compute`` or ``decode``: from the end to the last byte, by what came last into its place.
2. ``idle``: to when a link that never idled would have brought all that was fetched.
3. ``wasted``: to when it would have brought what was of use.
4. ``too_high``: the rest: the bytes of use were more than the link carried by the deadline. What these bytes bought
   beyond the bound is taken off again.

A play that was given up has no cache: all its regret is ``gave_up``. ``residual`` is what no rule explains: where the
sum is below zero (a late play may have a better cache than any could have by the deadline) regret is cut off at zero.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvabr.abr.ladder import Options, Step, every_option, rank
from kvabr.player.record import PlayRecord
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import LinkUse
from kvabr.replay.stage import MISS_PENALTY
from kvabr.types.catalog import Catalog

CAUSES = ("too_high", "too_low", "order", "idle", "wasted", "decode", "compute", "gave_up", "residual")
"""Every cause, in the order in which people ask for them."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of one play that is over."""

    record: PlayRecord
    use: LinkUse
    capacity: Capacity
    deadline_s: float
    """The deadline, which the player was told as it is."""
    decode_tail_s: float
    """Seconds of decoding after which even the quickest last group is in place: the bound leaves them out."""
    loss: float
    bound: float
    """The clairvoyant's loss; finite."""
    regret: float


def split(catalog: Catalog, curves: LossCurves, case: Case) -> dict[str, float]:
    """The regret of one feasible play by cause; the values add up to it but for rounding.

    Args:
        catalog: what was played.
        curves: the catalog's.
        case: the play.
    """
    out = dict.fromkeys(CAUSES, 0.0)
    if case.record.delivered_s is None:
        out["gave_up"] = case.regret
        return out
    useful = sum(group.bytes for group in case.record.groups)
    _split_loss(catalog, curves, case, float(useful), out)
    if case.record.delivered_s > case.deadline_s:
        _split_penalty(case, float(useful), out)
    out["residual"] = case.regret - sum(out.values())
    return out


def _split_loss(catalog: Catalog, curves: LossCurves, case: Case, useful: float, out: dict[str, float]) -> None:
    record, use = case.record, case.use
    fetched = [group for group in record.groups if group.source != "recomputed"]
    curve = curves.of([group.group for group in fetched])
    own = sum(catalog.by_name[group.track].loss[group.group] for group in fetched if group.track)
    carried = case.capacity.between(0.0, max(0.0, case.deadline_s - case.decode_tail_s))
    carried = max(carried, float(curve.least_bytes))
    # With an engine the bound may be far below what bytes alone buy: then bytes are counted to their own end.
    floor = case.bound if len(fetched) == catalog.groups and case.bound >= curve.at(carried) else curve.at(carried)
    level = curve.at(useful)
    out["order"] += own - level
    if level < floor:
        # Better than any cache could be by the deadline: bought with lateness.
        out["too_high" if useful > carried else "decode"] += level - floor
        level = floor
    wasted = record.bytes_wasted + use.ghost_bytes
    spent = max(0.0, wasted - use.undecoded_bytes - use.cut_told_bytes)
    place = useful
    for cause, nbytes in (
        ("decode", float(use.undecoded_bytes)), ("wasted", spent), ("too_high", use.cut_bytes),
        ("idle", use.waiting_bytes), ("too_low", float("inf")),
    ):  # fmt: skip
        place = min(carried, place + nbytes)
        lower = max(floor, curve.at(max(place, useful)))
        out[cause] += max(0.0, level - lower)
        level = min(level, lower)
    out["compute"] += (case.loss - own) + (level - case.bound)


def _split_penalty(case: Case, useful: float, out: dict[str, float]) -> None:
    record, deadline_s = case.record, case.deadline_s

    def penalty(t: float) -> float:
        return MISS_PENALTY + (t - deadline_s) / deadline_s if t > deadline_s else 0.0

    end = record.delivered_s or 0.0
    last = max(record.groups, key=lambda group: group.ready_s or 0.0)
    arrived = max((group.done_s for group in record.groups if group.done_s is not None), default=0.0)
    fetched = useful + record.bytes_wasted + case.use.ghost_bytes
    busy = min(arrived, case.capacity.when(0.0, fetched) if fetched > 0 else 0.0)
    needed = min(busy, case.capacity.when(0.0, useful) if useful > 0 else 0.0)
    out["compute" if last.source == "recomputed" else "decode"] += penalty(end) - penalty(arrived)
    out["idle"] += penalty(arrived) - penalty(busy)
    out["wasted"] += penalty(busy) - penalty(needed)
    out["too_high"] += penalty(needed)


def totals(parts: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of each cause over plays; all zero over none."""
    return {cause: sum(part[cause] for part in parts) / len(parts) if parts else 0.0 for cause in CAUSES}


class LossCurve:
    """Least loss of a set of groups as a function of bytes: convex, falling, piecewise linear.

    It is the linear relaxation of the multiple-choice knapsack over every option of every group, layers included: no
    whole-group choice of so many bytes loses less.
    """

    def __init__(self, options: Options, steps: Collection[Step], groups: Collection[int]) -> None:
        """Lay the curve.

        Args:
            options: every group's hull, cheapest first.
            steps: the steps of all hulls, most loss saved per byte first.
            groups: those that count.
        """
        self.least_bytes = sum(options[group][0].bytes for group in groups)
        """Bytes of every group at its cheapest: with fewer there is no cache."""
        self._bytes = [self.least_bytes]
        self._loss = [sum(options[group][0].loss for group in groups)]
        for step in steps:
            if step.group in groups:
                self._bytes.append(self._bytes[-1] + step.bytes)
                self._loss.append(self._loss[-1] - step.saving)

    def at(self, nbytes: float) -> float:
        """Least loss within ``nbytes``, nats per token; with fewer than `least_bytes`, the loss at those."""
        index = bisect_right(self._bytes, nbytes) - 1
        if index < 0:
            return self._loss[0]
        if index + 1 == len(self._bytes):
            return max(0.0, self._loss[-1])
        share = (nbytes - self._bytes[index]) / (self._bytes[index + 1] - self._bytes[index])
        return max(0.0, self._loss[index] - share * (self._loss[index] - self._loss[index + 1]))


class LossCurves:
    """The curves of one catalog, worked out when they are asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self._options = every_option(catalog)
        self._steps = rank(self._options)
        self._whole = LossCurve(self._options, self._steps, range(catalog.groups))

    def of(self, groups: Collection[int]) -> LossCurve:
        """The curve of these groups."""
        if len(groups) == len(self._options):
            return self._whole
        return LossCurve(self._options, self._steps, frozenset(groups))
