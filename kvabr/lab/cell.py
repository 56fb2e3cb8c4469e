"""Play one trace of one cell with several policies; return one line of results per play."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvabr.lab.causes import Case, LossCurves, split
from kvabr.replay.clairvoyant import Bound, Clairvoyant
from kvabr.replay.experiment import Experiment, PlayOutcome, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.replay.trace import Trace
from kvabr.types.catalog import Catalog
from kvabr.types.cost import objective


@dataclass(frozen=True, slots=True)
class BoundedLink:
    """One start of one trace: the link and its bounds, shared by all policies."""

    start_s: float
    capacity: Capacity
    rtt_s: float
    bound: Bound
    """Bound of network and compute together, if there is an engine."""
    network: Bound
    """Bound of the network alone."""


class CellPlayer:
    """Play over one cell of a matrix."""

    def __init__(self, catalog: Catalog, options: ReplayOptions) -> None:
        self._catalog, self._options = catalog, options
        self.experiment = Experiment(catalog, options)
        self._curves = LossCurves(catalog)
        share = catalog.group_tokens(catalog.groups - 1) / catalog.spec.group_tokens
        self._tail_s = options.decode_scale * share * min(track.decode_s for track in catalog.tracks)
        self._network = None
        if options.cost is not None:
            self._network = Clairvoyant(catalog, None, options.mode, decode_scale=options.decode_scale)

    def link(self, trace: Trace, start_s: float) -> BoundedLink:
        """Return the link from one start of a trace, with its bounds."""
        capacity, rtt_s, bound = self.experiment.prepare(trace, start_s)
        network = bound if self._network is None else self._network.bound(capacity, self._options.deadline_s)
        return BoundedLink(start_s, capacity, rtt_s, bound, network)

    def play(
        self, trace: Trace, link: BoundedLink, policy: str, *, log: bool = False
    ) -> tuple[dict[str, Any], PlayOutcome]:
        """Play once.

        Returns:
            The line of results, and the whole outcome. ``regret`` is measured against the bound of network and compute,
            ``network_regret`` against the bound of the network alone; each is None if its bound is infeasible.
        """
        outcome = self.experiment.play_on(trace, link.start_s, policy, link.capacity, link.rtt_s, link.bound, log=log)
        line = dict(outcome.run)
        del line["groups"]
        line["rtt_s"] = link.rtt_s
        line["network_loss"] = _round(link.network.loss) if link.network.feasible else None
        line["network_regret"] = _round(self._regret(outcome, link.network))
        line["causes"] = self._causes(outcome, link)
        return line, outcome

    def _regret(self, outcome: PlayOutcome, bound: Bound) -> float | None:
        if not bound.feasible:
            return None
        deadline_s, ttft = self._options.deadline_s, outcome.run["ttft_s"]
        cost = objective(
            float(outcome.run["loss"]),
            self._options.config.give_up_after * deadline_s if ttft is None else ttft,
            deadline_s,
            met=outcome.run["met"],
            engine_s=0.0,
            time_price=0.0,
            gpu_price=0.0,
        )
        return max(0.0, cost - bound.loss)

    def _causes(self, outcome: PlayOutcome, link: BoundedLink) -> dict[str, float] | None:
        if not link.bound.feasible or outcome.use is None:
            return None
        case = Case(
            record=outcome.record,
            use=outcome.use,
            capacity=link.capacity,
            deadline_s=self._options.deadline_s,
            decode_tail_s=self._tail_s,
            loss=outcome.run["loss"],
            bound=link.bound.loss,
            regret=outcome.run["regret"],
        )
        return {cause: float(f"{value:.6g}") for cause, value in split(self._catalog, self._curves, case).items()}


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.9g}")
