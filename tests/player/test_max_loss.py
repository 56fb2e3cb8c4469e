"""A bound on the loss of what is delivered: simulated, with and without an engine."""

import math

import pytest

from kvabr.player.session_types import Deliver, FetchGroup, PlayerConfig, Recompute
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from tests.catalogs import catalog
from tests.player.sessions import bring, of, session
from tests.replay.worlds import world, worlds

OFFER = catalog(16, layered=True)
ENGINE = PrefillCost(0.02, 0.5 / OFFER.tokens)


def played(load, max_loss, cost=None, *, mode="hole", prefix=False, policy="anytime"):
    """Play over a link that carries a share of the exact cache by the deadline of two seconds."""
    link = world("flat", [load * OFFER.fp16_bytes / 2.0])
    options = ReplayOptions(2.0, 0.02, None, cost, mode, prefix=prefix, config=PlayerConfig(max_loss=max_loss))
    return Experiment(OFFER, options).play(link, 0.0, policy).run


@pytest.mark.parametrize("max_loss", [-1.0, math.nan])
def test_a_bound_that_makes_no_sense_is_refused(max_loss):
    with pytest.raises(UsageError):
        PlayerConfig(max_loss=max_loss)


def test_a_slow_link_misses_the_deadline_rather_than_the_bound():
    free, bound = played(0.1, math.inf), played(0.1, 0.001)
    assert free["met"]
    assert free["loss"] > 0.001 >= bound["loss"]
    assert not bound["met"]
    assert bound["ttft_s"] > 2.0


@pytest.mark.parametrize(("mode", "prefix"), [("hole", False), ("suffix", False), ("suffix", True)])
@pytest.mark.parametrize("max_loss", [0.0, 0.001, 0.01])
def test_an_engine_computes_what_would_lose_too_much(mode, prefix, max_loss):
    run = played(0.05, max_loss, ENGINE, mode=mode, prefix=prefix)
    assert run["met"]
    assert run["loss"] <= max_loss


LINKS = [world for world in worlds() if world.name != "test/dies"]


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
@pytest.mark.parametrize(("mode", "prefix"), [("hole", False), ("suffix", True)])
@pytest.mark.parametrize("max_loss", [0.001, 0.01])
@pytest.mark.parametrize("engine_s", [0.3, 30.0])
def test_no_play_promises_more_on_any_link(link, mode, prefix, max_loss, engine_s):
    """``engine_s``: seconds to compute everything."""
    options = ReplayOptions(
        2.0, 0.02, None, PrefillCost(0.02, engine_s / OFFER.tokens), mode, prefix=prefix,
        config=PlayerConfig(max_loss=max_loss),
    )  # fmt: skip
    for load in (0.03, 0.3, 3.0):
        scaled = link.scaled(load * OFFER.fp16_bytes / 2.0 / link.mean_rate)
        run = Experiment(OFFER, options).play(scaled, 0.0, "anytime").run
        assert run["loss"] <= max_loss


def test_a_policy_that_cannot_do_better_is_given_up_or_has_everything_computed():
    assert played(10.0, 1e-4, policy="fixed:Int4")["ttft_s"] is None
    run = played(10.0, 1e-4, ENGINE, policy="fixed:Int4")
    assert run["loss"] == 0.0
    assert run["ttft_s"] is not None


@pytest.mark.parametrize(("max_loss", "policy"), [(math.inf, "cheapfirst"), (1e-4, "fixed:Int4")])
def test_without_a_source_a_complete_cache_above_it_waits_for_the_engine(max_loss, policy):
    cost = PrefillCost.from_rate(200.0)
    config = PlayerConfig(max_loss=max_loss, time_price=1e-9)
    play = session(policy=policy, cost=cost, deadline=100.0, config=config)
    play.start(0.0)
    play.unreachable("the peer is away", 0.01)
    assert not play.over  # incomplete: the peer may return
    actions, now = play.actions(), 0.02
    while not play.groups.complete and (fetches := of(actions, FetchGroup)):
        actions = [action for fetch in fetches for action in bring(play, fetch, now)]
        now += 0.01
    assert play.groups.complete
    assert not play.over
    play.unreachable("the peer is away", now)
    if max_loss == math.inf:
        assert of(play.actions(), Deliver)
        return
    assert not play.over
    play.cut_off("the peer is away", now + 1.0)
    calls = of([*actions, *play.actions()], Recompute)
    while calls:
        now += 2.0
        play.computed(calls[0].first, calls[0].last, now)
        actions = play.actions()
        calls = of(actions, Recompute)
    assert of(actions, Deliver)
    assert {record.track for record in play.record.groups} == {"recomputed"}
