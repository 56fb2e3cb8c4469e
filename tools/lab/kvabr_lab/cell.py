"""Plays one trace of a cell with several policies; returns one line of results per play."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvabr.replay.clairvoyant import Bound
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.replay.outcome import PlayOutcome
from kvabr.replay.trace import Trace
from kvabr.types.catalog import Catalog
from kvabr_lab.causes import Case, LossCurves, split


@dataclass(frozen=True, slots=True)
class BoundedLink:
    """One start of a trace: the link and its bounds."""

    start_s: float
    capacity: Capacity
    rtt_s: float
    bound: Bound
    """Bound of network and engine together, if there is an engine."""
    network: Bound
    """Bound of the network alone."""


class CellPlayer:
    """Plays traces with the options of one cell of a matrix."""

    def __init__(self, catalog: Catalog, options: ReplayOptions) -> None:
        self._options = options
        self.experiment = Experiment(catalog, options)
        self._curves: dict[int, LossCurves] = {}
        self._network = None if options.cost is None else self.experiment.whole.new_clairvoyant(None)

    def link(self, trace: Trace, start_s: float) -> BoundedLink:
        """Return the link for one start of a trace."""
        capacity, rtt_s, bound = self.experiment.prepare(trace, start_s)
        network = bound
        if self._network is not None:
            network = self.experiment.whole.bound(self._network, capacity, rtt_s)
        return BoundedLink(start_s, capacity, rtt_s, bound, network)

    def play(
        self, trace: Trace, link: BoundedLink, policy: str, *, log: bool = False
    ) -> tuple[dict[str, Any], PlayOutcome]:
        """Play once; return the line of results, and the whole outcome.

        ``network_regret`` refers to the bound of the network alone. A regret is None if its bound is infeasible.
        """
        outcome = self.experiment.play_on(trace, link.start_s, policy, link.capacity, link.rtt_s, link.bound, log=log)
        line = dict(outcome.run)
        del line["groups"]
        line["rtt_s"] = link.rtt_s
        line["network_loss"] = _round(link.network.least_loss) if link.network.feasible else None
        line["network_regret"] = line["regret"]
        if link.network is not link.bound:
            line["network_regret"] = _round(self._regret(outcome, link.network))
        line["causes"] = self._causes(outcome, link, self.experiment.with_tail(policy))
        return line, outcome

    def _regret(self, outcome: PlayOutcome, bound: Bound) -> float | None:
        return float(outcome.run["objective"]) - bound.objective if bound.feasible else None

    def _causes(self, outcome: PlayOutcome, link: BoundedLink, played: Experiment) -> dict[str, float] | None:
        if not link.bound.feasible or outcome.use is None:
            return None
        config, ended_s = self._options.config, outcome.record.delivered_s
        least = float(outcome.run["loss"])
        if math.isfinite(config.gpu_price):
            least += config.gpu_price * outcome.record.recompute_s
        if ended_s is not None:
            deadline_s, own = self._options.deadline_s, least
            least = played.clairvoyant.least_at(
                link.capacity, min(ended_s, deadline_s), gpu_price=config.gpu_price, first_byte_s=link.rtt_s
            )
            if ended_s <= deadline_s:
                least = min(least, own)  # by a rounding error, a play may end just before its last byte arrived
        case = Case(
            record=outcome.record,
            use=outcome.use,
            capacity=link.capacity,
            deadline_s=self._options.deadline_s,
            decode_tail_s=played.clairvoyant.tail_s,
            loss=outcome.run["loss"],
            least=least,
            bound=link.bound,
            regret=outcome.run["regret"],
            time_price=config.time_price,
            gpu_price=config.gpu_price,
        )
        catalog = played.catalog
        curves = self._curves.get(catalog.groups) or LossCurves(catalog)
        self._curves[catalog.groups] = curves
        return {cause: float(f"{value:.6g}") for cause, value in split(catalog, curves, case).items()}


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.9g}")
