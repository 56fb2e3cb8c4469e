"""Splits a play's regret into causes that add up to it.

Regret is the cost of a play minus the clairvoyant bound. The cost is loss, time, engine time, and a penalty for
lateness. A sequence of hypothetical plays, each slightly better than the previous one, reduces the regret; each saving
is assigned to a cause.

The loss is reduced first, at the end E of the play (at most the deadline). f(x) is the minimum loss for x bytes
(`LossCurve`), C the link's bytes by E; no step goes below the minimum of any schedule by E:

1. ``order``: with the bytes in place, U, a loss of f(U) was possible. Reasons are irrevocable choices: tracks that are
  not layers, the engine's order, a suboptimal sequence of upgrades.
2. ``decode``: bytes received but not decoded by the end.
3. ``wasted``: bytes of abandoned, failed and replaced transfers, and of cancelled ones that still used the link.
4. ``too_high``: bytes of requests in flight at the end.
5. ``idle``: bytes that the link could have carried during round trips.
6. ``too_low``: all other link bytes by E, because the play requested no data.
7. ``compute``: the rest, and the play's engine time: other groups, or another number of them, should have been
   recomputed. Zero without an engine.

The rest is due to the choice of E:

8. ``too_low`` if the play ended too early: further data was worth its time.
9. ``waited`` if it ended too late: the last data was not worth its time.

The cost of lateness, including time, is reduced by the time at which the cache would have been complete:

1. ``compute`` or ``decode``: from the end to the last byte, by the source of the group that was ready last.
2. ``idle``: to the time at which a link without idle time would have delivered all fetched bytes.
3. ``wasted``: to the time at which it would have delivered the useful bytes.
4. ``too_high``: the rest, as the useful bytes exceeded the link's bytes by the deadline, minus the loss that these
   bytes saved compared to the best cache by the deadline.

All regret of an abandoned play is ``gave_up``. ``residual`` is rounding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvabr.abr.ladder import LadderStep, Options, every_option, rank
from kvabr.player.session_types import PlayRecord
from kvabr.replay.clairvoyant import Bound
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import LinkUse
from kvabr.types.catalog import Catalog
from kvabr.types.cost import MISS_PENALTY

CAUSES = ("too_high", "too_low", "waited", "order", "idle", "wasted", "decode", "compute", "gave_up", "residual")


@dataclass(frozen=True, slots=True)
class Case:
    """A finished play."""

    record: PlayRecord
    use: LinkUse
    capacity: Capacity
    deadline_s: float
    decode_tail_s: float
    """Minimum decode time of the last group, seconds; the bound does not include it."""
    loss: float
    least: float
    """Minimum of loss plus price of engine time over all schedules that end with this play (if late: at the deadline).
    """
    bound: Bound
    """Bound of the play, which must be feasible."""
    regret: float
    time_price: float
    """Price of a second before the first token, nats per token."""
    gpu_price: float
    """Price of a second of engine time, nats per token; infinite counts as 0."""


def split(catalog: Catalog, curves: LossCurves, case: Case) -> dict[str, float]:
    """Return the regret of one feasible play by cause; except for rounding, the values add up to it."""
    out = dict.fromkeys(CAUSES, 0.0)
    if case.record.delivered_s is None:
        out["gave_up"] = case.regret
        return out
    useful = sum(group.bytes for group in case.record.groups)
    _split_loss(catalog, curves, case, float(useful), out)
    ended_s = min(case.record.delivered_s, case.deadline_s)
    out["too_low" if ended_s < case.bound.end_s else "waited"] += (
        case.least + case.time_price * ended_s - case.bound.objective
    )
    if case.record.delivered_s > case.deadline_s:
        _split_penalty(case, float(useful), out)
    out["residual"] = case.regret - sum(out.values())
    return out


def _split_loss(catalog: Catalog, curves: LossCurves, case: Case, useful: float, out: dict[str, float]) -> None:
    record, use = case.record, case.use
    fetched = [group for group in record.groups if group.source != "recomputed"]
    curve = curves.of([group.group for group in fetched])
    own = sum(catalog.by_name[group.track].loss[group.group] for group in fetched if group.track)
    ended_s = min(case.deadline_s, record.delivered_s or 0.0)
    carried = case.capacity.between(0.0, max(0.0, ended_s - case.decode_tail_s))
    carried = max(carried, float(curve.least_bytes))
    # With an engine the minimum may be far below the loss for any bytes; then bytes count only down to f(C).
    floor = case.least if len(fetched) == catalog.groups and case.least >= curve.at(carried) else curve.at(carried)
    level = curve.at(useful)
    if useful <= carried and level < floor <= own:
        level = floor  # the relaxation is slightly better than any schedule
    out["order"] += own - level
    if level < floor:
        # The cache is better than any cache by the deadline: lateness bought quality.
        out["too_high" if useful > carried else "decode"] += level - floor
        level = floor
    wasted = record.bytes_wasted + use.ghost_bytes
    lost = max(0.0, wasted - record.bytes_undecoded - use.cut_reported_bytes)
    place = useful
    for cause, nbytes in (
        ("decode", float(record.bytes_undecoded)), ("wasted", lost), ("too_high", use.cut_bytes),
        ("idle", use.waiting_bytes), ("too_low", float("inf")),
    ):  # fmt: skip
        place = min(carried, place + nbytes)
        lower = max(floor, curve.at(max(place, useful)))
        out[cause] += max(0.0, level - lower)
        level = min(level, lower)
    spent = case.gpu_price * record.recompute_s if math.isfinite(case.gpu_price) else 0.0
    out["compute"] += (case.loss - own) + (level - case.least) + spent


def _split_penalty(case: Case, useful: float, out: dict[str, float]) -> None:
    record, deadline_s = case.record, case.deadline_s

    def penalty(t: float) -> float:
        late_s = t - deadline_s
        return MISS_PENALTY + late_s / deadline_s + case.time_price * late_s if late_s > 0 else 0.0

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
    """Return the mean of each cause over plays; zeros without plays."""
    return {cause: sum(part[cause] for part in parts) / len(parts) if parts else 0.0 for cause in CAUSES}


class LossCurve:
    """Minimum loss of a set of groups as a function of bytes: convex, falling, piecewise linear.

    This is the linear relaxation of a multiple-choice knapsack over every option of every group, including layers. No
    choice of whole groups with the same bytes has a lower loss.
    """

    def __init__(self, options: Options, steps: Collection[LadderStep], groups: Collection[int]) -> None:
        """Build the curve of ``groups``.

        ``options`` are each group's convex hull, cheapest first; ``steps`` are those of all hulls, by loss saved per
        byte.
        """
        self.least_bytes = sum(options[group][0].bytes for group in groups)
        """Bytes of the smallest cache: all groups on their cheapest options."""
        self._bytes = [self.least_bytes]
        self._loss = [sum(options[group][0].loss for group in groups)]
        for step in steps:
            if step.group in groups:
                self._bytes.append(self._bytes[-1] + step.bytes)
                self._loss.append(self._loss[-1] - step.saving)

    def at(self, nbytes: float) -> float:
        """Return the minimum loss for ``nbytes``, nats per token; below `least_bytes`, the loss at `least_bytes`."""
        index = bisect_right(self._bytes, nbytes) - 1
        if index < 0:
            return self._loss[0]
        if index + 1 == len(self._bytes):
            return max(0.0, self._loss[-1])
        share = (nbytes - self._bytes[index]) / (self._bytes[index + 1] - self._bytes[index])
        return max(0.0, self._loss[index] - share * (self._loss[index] - self._loss[index + 1]))


class LossCurves:
    """The loss curves of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._options = every_option(catalog)
        self._steps = rank(self._options)
        self._whole = LossCurve(self._options, self._steps, range(catalog.groups))

    def of(self, groups: Collection[int]) -> LossCurve:
        if len(groups) == len(self._options):
            return self._whole
        return LossCurve(self._options, self._steps, frozenset(groups))
