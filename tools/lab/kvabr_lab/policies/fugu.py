"""``fugu``: model predictive control on a distribution of transfer times (Yan et al., NSDI 2020: Puffer's Fugu).

Fugu predicts the distribution of transfer times for each size of the next chunks, and plans five chunks ahead for the
best expected quality minus a price on expected stalls, by value iteration over the buffer. Its predictor is a neural
network trained daily on the whole service. Here, the seconds per byte of the last transfers are equally likely, plus
one slower transfer that was never observed. The buffer is the planned groups' share of the remaining time, minus the
median time of transfers in flight; a plan stalls by the time that exceeds it. Switching has no price.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from statistics import median
from typing import ClassVar

from kvabr.abr.policy import Decision, FrontToBack
from kvabr.abr.view import View
from kvabr.types.parameters import Parameter

_HORIZON = 5
_CELLS = 32
"""Number of points in time for the plan's values, evenly spaced up to twice the available time."""


class Fugu(FrontToBack):
    """Plans five groups ahead on a distribution of transfer times."""

    name: ClassVar[str] = "fugu"
    estimator: ClassVar[str] = "harmonic"
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "history": Parameter(4.0, 64.0, 16.0, log=True),
        "stall": Parameter(1.0, 100.0, 10.0, log=True),
        "tail": Parameter(1.0, 8.0, 2.0, log=True),
    }

    def __init__(self, *, history: float = 16.0, stall: float = 10.0, tail: float = 2.0) -> None:
        """Set the length of the history and the prices.

        Args:
            history: Number of transfers in the distribution.
            stall: Price of lateness by one deadline, nats per token.
            tail: Slowdown of the unobserved transfer, relative to the slowest observed transfer.
        """
        self._stall, self._tail = stall, tail
        self._costs: deque[float] = deque(maxlen=round(history))

    def start(self, view: View) -> None:
        """Forget all transfers."""
        self._asked: dict[int, tuple[int, float]] = {}
        self._read = 0
        self._settled_s = view.now

    def choose(self, view: View, group: int) -> Decision:
        """Choose the first track of the plan."""
        self._watch(view)
        if self._costs:
            track, reason = self._plan(view)
        else:
            track, reason = view.ladder.cheapest, "no transfer has been seen yet"
        self._asked[group] = (view.bytes(group, track), view.now)
        return Decision.fetch(group, track, reason)

    def _watch(self, view: View) -> None:
        changed = dict.fromkeys(view.changes[self._read :])
        self._read = len(view.changes)
        ended = [group for group in changed if group in self._asked and group not in view.in_flight.groups]
        came = [self._asked[group] for group in ended if group not in view.missing_groups]
        for group in ended:
            del self._asked[group]
        if not came:
            return
        # The link carries one transfer after another, so each transfer had the link to itself since the previous end.
        begun_s = max(self._settled_s, min(asked_s for _, asked_s in came))
        if view.now > begun_s:
            self._costs.append((view.now - begun_s) / sum(size for size, _ in came))
        self._settled_s = view.now

    def _plan(self, view: View) -> tuple[str, str]:
        import numpy as np  # noqa: PLC0415  # only this policy needs it, and it loads slowly

        tracks = view.ladder.tracks
        missing = view.missing_groups
        ahead = list(islice(missing, _HORIZON))
        costs = np.array([*self._costs, self._tail * max(self._costs)])
        queue_s = view.outstanding_bytes * median(self._costs) + (0.0 if view.in_flight else view.ttfb_s)
        spare_s = view.time_left - queue_s - view.last_decode_s(view.ladder.cheapest)
        budget_s = max(0.0, spare_s) * len(ahead) / len(missing)
        price = self._stall / view.deadline_s
        times = np.linspace(0.0, 2.0 * max(budget_s, 1e-9), _CELLS)
        values = price * np.maximum(0.0, times - budget_s)
        for group in reversed(ahead):
            sizes = np.array([track.bytes[group] for track in tracks])
            losses = np.array([track.loss[group] for track in tracks])
            starts = times if group != ahead[0] else times[:1]
            ends = starts[:, None, None] + sizes[:, None] * costs
            # After the last point, every second of lateness has a price.
            later = np.interp(ends, times, values) + price * np.maximum(0.0, ends - times[-1])
            expected = losses + later.mean(axis=2)
            values = expected.min(axis=1)
        chosen = int(expected[0].argmin())
        return tracks[chosen].name, f"{budget_s:.2f} s for {len(ahead)} groups, {len(costs)} transfer times"
