"""The clairvoyant bound against linear and integer programs; `tests/replay/test_exhaustive.py` tries every schedule."""

import random
from dataclasses import replace

import numpy as np
import pytest

from kvabr.abr.ladder import stack
from kvabr.replay.clairvoyant import Clairvoyant
from kvabr.replay.frontier import WHOLE, Frontier
from kvabr.replay.link import Capacity
from kvabr.replay.trace import Trace
from kvabr_lab.causes import LossCurves
from tests.catalogs import catalog
from tests.lab.small import offer

FREE = {"time_price": 0.0, "gpu_price": 0.0}


@pytest.mark.parametrize(("share", "feasible"), [(0.88, True), (0.92, False)])
def test_a_cache_that_arrives_too_late_to_be_decoded_is_not_feasible(share, feasible):
    """A dear track that decodes at once does not help where the link carries the cheapest tracks alone."""
    small = offer(layered=False)
    wide, base = small.tracks
    small = replace(small, tracks=(replace(wide, decode_s=0.0), replace(base, decode_s=0.1)))
    capacity = Capacity(Trace("flat", "t", (0.0,), (base.total_bytes / share,), 1.0))
    assert Clairvoyant(small, None, "hole").best(capacity, 1.0, **FREE).feasible == feasible


def program(whole):
    """Losses, bytes, and the constraint that every group has one option."""
    options = [(track.loss[g], sum(layer.bytes[g] for layer in stack(whole, track)), g)
               for g in range(whole.groups) for track in whole.tracks]  # fmt: skip
    losses = np.array([loss for loss, _, _ in options])
    sizes = np.array([float(size) for _, size, _ in options])
    one = np.array([[float(g == group) for _, _, g in options] for group in range(whole.groups)])
    return losses, sizes, one


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("share", [0.07, 0.12, 0.2, 0.33, 0.6])
def test_network_bound_is_the_linear_program_and_one_step_below_the_integer_one(share, layered):
    from scipy import optimize

    whole = catalog(12, short=40, decode=0.0, layered=layered)
    losses, sizes, one = program(whole)
    nbytes = share * whole.fp16_bytes
    bound = Clairvoyant(whole, None, "hole").best(Capacity(Trace("flat", "t", (0.0,), (nbytes,), 1.0)), 1.0, **FREE)
    relaxed = optimize.linprog(
        losses, A_ub=sizes[None], b_ub=[nbytes], A_eq=one, b_eq=np.ones(whole.groups), bounds=(0, 1)
    )
    assert bound.feasible == (relaxed.status == 0)
    if not bound.feasible:
        return
    assert bound.loss == pytest.approx(relaxed.fun, rel=1e-6, abs=1e-12)
    assert LossCurves(whole).of(range(whole.groups)).at(nbytes) == pytest.approx(relaxed.fun, rel=1e-6, abs=1e-12)
    ones = np.ones(whole.groups)
    budget = optimize.LinearConstraint(np.vstack([sizes[None], one]), np.r_[0.0, ones], np.r_[nbytes, ones])
    exact = optimize.milp(losses, integrality=np.ones_like(losses), bounds=optimize.Bounds(0, 1), constraints=budget)
    assert exact.status == 0
    assert bound.loss <= exact.fun + 1e-9
    largest = max(track.loss[group] for track in whole.tracks for group in range(whole.groups))
    assert exact.fun - bound.loss <= largest


@pytest.mark.parametrize("decode", [0.3, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_frontier_is_the_linear_program_with_two_resources(seed, decode):
    from scipy import optimize

    whole = offer(8, seed, decode=decode, short=40)
    frontier = Frontier(whole)
    losses, sizes, decodes = (table.ravel() for table in (frontier.losses, frontier.sizes, frontier.decodes))
    one = np.kron(np.eye(8), np.ones(len(whole.tracks)))
    dice, found = random.Random(seed), 0
    for _ in range(40):
        nbytes = frontier.least_bytes.sum() * dice.uniform(0.9, 5.0)
        seconds = frontier.decodes.min(axis=1).sum() * dice.uniform(0.9, 3.0)
        exact = optimize.linprog(
            losses, A_ub=np.stack([sizes, decodes]), b_ub=[nbytes, seconds], A_eq=one, b_eq=np.ones(8), bounds=(0, 1)
        )
        (bound,) = frontier.loss(WHOLE, np.array([nbytes]), np.array([seconds]))
        if exact.status == 0:
            found += 1
            assert 0.99 * exact.fun <= bound <= exact.fun * (1 + 1e-9)
    assert found > 10
