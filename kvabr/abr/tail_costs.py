"""The expected cost of a play with each possible tail, from the planner of plays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvabr.abr.belief import MIN_WAIT_S, Belief, LinkBelief
from kvabr.abr.ladder import Ladder
from kvabr.abr.planner import ComputePlanner
from kvabr.abr.tail import TailOffer
from kvabr.abr.time_planner import TimePlanner
from kvabr.abr.view import View
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.engine import EngineMode

_UNKNOWN_RATE_SHARE = 0.02
"""Fraction of the time left that a tail may take while the rate is unknown, since the network may deliver everything
soon."""


def tail_costs(
    offers: Sequence[TailOffer],
    left_s: float,
    *,
    rate: float = 0.0,
    ttfb_s: float = 0.0,
    cost: PrefillCost | None = None,
    mode: EngineMode = "hole",
    time_price: float,
    gpu_price: float,
    max_loss: float = math.inf,
    decoders: int = 1,
) -> list[float]:
    """Return the expected cost of a play with each offer, nats per generated token.

    A last resort costs as much more as a missed deadline.

    Args:
        offers: from `tail_offers`; the first has no tail.
        left_s: seconds to the deadline.
        rate: link rate in earlier plays, bytes per second; 0.0: unknown, and a tail may take only a little of the time
            left.
        ttfb_s: time to first byte in earlier plays, seconds; 0.0: unknown.
        cost: prefill cost, if the engine may also compute other parts of the prefix; None if it may not.
        mode: which parts of the prefix this engine can compute.
        time_price: price of a second before the first token, nats per generated token.
        gpu_price: price of a second of engine time, nats per generated token; infinite: no tail is computed.
        max_loss: maximum loss of the cache, nats per generated token.
        decoders: number of groups decoded in parallel.
    """
    left_s, link = max(MIN_WAIT_S, left_s), LinkBelief()
    costs, belief = [], None
    for offer in offers:
        unsure = rate <= 0 and (offer.last_resort or offer.engine_s > _UNKNOWN_RATE_SHARE * left_s)
        if offer.tokens and (unsure or not math.isfinite(gpu_price)):
            costs.append(math.inf)
            continue
        behind = mode == "suffix" or not offer.catalog.every_token
        from_here = None if cost is None else cost.after(offer.catalog.first_token)
        view = View(
            Ladder(offer.catalog), left_s, from_here, front_first=cost is not None and behind, time_price=time_price,
            gpu_price=gpu_price, max_loss=max_loss, decoders=decoders,
        )  # fmt: skip
        view.rate, view.prior_rate, view.ttfb_s = rate, rate, ttfb_s
        if belief is None:  # the same link for all offers
            link.update(view)
            belief = link.rates(view)
        after = (time_price + gpu_price) * offer.engine_s if offer.tokens else 0.0
        costs.append(_expected_cost(view, link, belief, offer.engine_s) + after + offer.last_resort * MISS_PENALTY)
    return costs


def _expected_cost(view: View, link: LinkBelief, belief: Belief, after_s: float) -> float:
    """Return the least expected cost of a play that has not begun, in nats per generated token."""
    times = TimePlanner(view)
    times.after_s = after_s
    times.sync(view)
    costs: npt.NDArray[np.float64]
    if view.cost is None:
        none, nothing = np.zeros(1, int), np.zeros(1)
        found = times.divide(view, belief.rates, none, none, nothing, nothing, ramp=belief.ramp)
        costs = np.array([float(each.objective[0]) for each in found])
    else:
        (way,) = ComputePlanner(view, times, link).ways(view, [0], belief.rates, belief.ramp)
        costs = way.costs.min(axis=1)
    return float(costs @ belief.weights)
