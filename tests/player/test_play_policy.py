"""Stored groups come first: the best version, layers on top of their base; then the policy continues as usual."""

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean, Prior
from kvabr.abr.plugins import load_policy
from kvabr.player.play_policy import CacheFirst, cache_first
from kvabr.player.session import Session
from kvabr.player.session_types import Decode, FetchGroup, Recompute
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog


def playing(offer, kept, policy="anytime", **options):
    chosen = cache_first(load_policy(policy)(), offer, lambda _, track: kept.get(track, ()))
    return Session(Ladder(offer), 2.0, chosen, HarmonicMean(), **options), chosen


def run_at_hand(play, kept, now=0.01):
    """Deliver requested groups that are stored at once; return the other requests."""
    others, asked = [], []
    actions = play.actions()
    while actions:
        for action in actions:
            if isinstance(action, FetchGroup):
                asked.append((action.group, action.track))
                if action.group in kept.get(action.track, ()):
                    play.first_byte(action.request, now, "kept")
                    play.done(action.request, now, "kept")
                else:
                    others.append(action)
            elif isinstance(action, Decode):
                play.decoded(action.request, now)
        actions = play.actions()
    return asked, others


def test_the_best_of_what_is_at_hand_is_taken_and_nothing_of_it_twice():
    offer = catalog(6)
    kept = {"FP16": {0, 1}, "Int8": {1, 2}, "Int4": range(6)}
    play, policy = playing(offer, kept)
    assert isinstance(policy, CacheFirst)
    assert (policy.name, policy.paces, policy.abandons) == ("anytime", True, True)
    play.start(0.0)
    asked, others = run_at_hand(play, kept)
    assert asked[:6] == [(0, "FP16"), (1, "FP16"), (2, "Int8"), (3, "Int4"), (4, "Int4"), (5, "Int4")]
    assert not [fetch for fetch in others if fetch.group < 2]
    assert play.view.rate == 0.0  # none of it came over the link


def test_layers_at_hand_are_put_upon_their_base():
    offer = catalog(4, layered=True)
    kept = {"base": {0, 1, 2}, "layer-1": {0, 1, 3}, "layer-2": {0}}
    play, _ = playing(offer, kept)
    play.start(0.0)
    asked, others = run_at_hand(play, kept)
    assert asked[:5] == [(0, "base"), (0, "layer-1"), (0, "layer-2"), (1, "base"), (1, "layer-1")]
    for group, layers in ((0, ["base", "layer-1", "layer-2"]), (1, ["base", "layer-1"]), (2, ["base"])):
        assert [track for where, track in asked if where == group][: len(layers)] == layers
    # A layer without a stored base is not usable.
    assert next(fetch.track for fetch in others if fetch.group == 3) == "base"


@pytest.mark.parametrize("mode", ["hole", "suffix"])
def test_an_engine_leaves_what_is_at_hand(mode):
    """The link would take longer than the engine, but no group needs to cross it."""
    offer = catalog(8, layered=True)
    kept = {name: range(8) for name in ("base", "layer-1", "layer-2")}
    chosen = cache_first(load_policy("anytime")(), offer, lambda _, track: kept.get(track, ()))
    known = HarmonicMean()
    known.prime(Prior(1e6, 0.02))
    play = Session(Ladder(offer), 2.0, chosen, known, cost=PrefillCost(0.0, 0.3 / (8 * 128)), mode=mode)
    play.start(0.0)
    requests, computed = [], []
    actions = play.actions()
    while actions:  # nothing has been read from the store yet
        requests += [action.request for action in actions if isinstance(action, FetchGroup)]
        computed += [action for action in actions if isinstance(action, Recompute)]
        actions = play.actions()
    assert len(requests) == sum(map(len, kept.values()))
    assert sum(each.last - each.first for each in computed) <= 1  # what it has time for while others are decoded
    for request in list(play.view.in_flight):
        play.done(request, 0.002, "kept")
    assert play.view.in_flight.required_bytes == play.view.outstanding_bytes == 0


def test_an_engine_does_not_wait_for_a_store_that_brings_nothing():
    offer = catalog(8, layered=True)
    kept = {name: range(8) for name in ("base", "layer-1", "layer-2")}
    chosen = cache_first(load_policy("anytime")(), offer, lambda _, track: kept.get(track, ()))
    known = HarmonicMean()
    known.prime(Prior(1e6, 0.02))
    play = Session(Ladder(offer), 2.0, chosen, known, cost=PrefillCost(0.0, 0.3 / (8 * 128)))
    play.start(0.0)
    now, computed = 0.0, set()
    while not play.over:
        for action in play.actions():
            if isinstance(action, Recompute):
                computed.update(range(action.first, action.last))
                play.computed(action.first, action.last, now)
        now = play.next_timer() or now
        assert now < 0.5
        play.timer(now)
    assert computed == set(range(8))


def test_what_is_no_longer_at_hand_comes_over_the_link():
    offer = catalog(2)
    kept = {"FP16": {0, 1}}
    play, _ = playing(offer, kept)
    play.start(0.0)
    flying = play.view.in_flight
    assert [transfer.remaining for transfer in flying.values()] == [0, 0]
    size = flying[0].bytes
    play.progress(0, 1000, 0.1)
    assert (flying[0].remaining, flying.required_bytes) == (size - 1000,) * 2
    assert play.view.outstanding_bytes == size - 1000
    play.done(0, 0.2)
    play.done(1, 0.2, "kept")
    assert flying.required_bytes == play.view.outstanding_bytes == 0
