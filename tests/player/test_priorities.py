"""Priorities of a play's requests: what is required, what is better, and what is worth most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr import Ladder, Transfer
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.policy import Decision, Policy
from kvabr.player.goals.whole import WholeAim
from kvabr.player.requests import (
    DEARER_PRIORITY,
    UPGRADE_PRIORITY,
    RequestPriorities,
    choose_hopeless,
    choose_late,
    upgrade_priority,
)
from kvabr.player.session import Session
from kvabr.player.session_types import FetchGroup, PlayerConfig
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from tests.abr.plain import bring as bring_up_to
from tests.abr.plain import fly, view
from tests.catalogs import catalog
from tests.player.sessions import bring, of, session
from tests.replay.worlds import world

WORTH = st.floats(0.0, 10.0)
SIZES = st.integers(1, 1 << 40)


@given(WORTH, WORTH, SIZES)
def test_what_saves_more_with_the_same_bytes_is_more_urgent(less, more, nbytes):
    less, more = sorted((less, more))
    assert UPGRADE_PRIORITY <= upgrade_priority(more, nbytes) <= upgrade_priority(less, nbytes) <= 255


def test_the_cheapest_track_of_every_group_goes_before_others():
    given_ = RequestPriorities(4)
    dear = [given_.required(group, dearer=True) for group in (3, 0)]
    cheap = [given_.required(group, dearer=False) for group in (1, 2)]
    assert max(cheap) < DEARER_PRIORITY <= min(dear)
    assert dear == sorted(dear)
    assert cheap == sorted(cheap)
    assert given_.required(3, dearer=True) == dear[0]
    assert given_.required(3, dearer=False) < cheap[0]  # it was wanted first
    assert max(dear) < UPGRADE_PRIORITY


def test_an_upgrade_overtakes_an_older_one_under_way_only_if_it_saves_far_more():
    given_ = RequestPriorities(4)
    first = given_.upgrade(0, 1e-6, 1000, set())
    assert given_.upgrade(1, 1e-4, 1000, {0}) == first
    assert given_.upgrade(2, 1e-4, 1000, {0, 1}) == first
    assert given_.upgrade(3, 1e-3, 1000, {0, 1, 2}) == upgrade_priority(1e-3, 1000) < first
    assert given_.upgrade(4, 1e-5, 1000, set()) == upgrade_priority(1e-5, 1000) < first


class Mixed(Policy):
    """Two groups on FP16, the others on the cheapest track, then Int8 for all."""

    def decide(self, view):
        group = view.first_missing()
        if group is not None:
            return Decision.fetch(group, "FP16" if group < 2 else view.ladder.cheapest, "test")
        left = [group for group in view.settled if view.track_of[group] == view.ladder.cheapest]
        return Decision.upgrade(left[0], "Int8", "test") if left else Decision.wait("test")


def test_a_session_gives_its_requests_these_priorities():
    play = session(4, Mixed(), config=PlayerConfig(first_requests=4, min_requests=4))
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    assert [fetch.priority >= DEARER_PRIORITY for fetch in fetches] == [True, True, False, False]
    asked = [fetch for base in fetches for fetch in of(bring(play, base, 0.01), FetchGroup)]
    catalog = play.view.catalog
    for fetch in asked:
        saved = catalog.track("AC-5x").loss[fetch.group] - catalog.track("Int8").loss[fetch.group]
        assert fetch.priority == upgrade_priority(saved, fetch.bytes)
    assert asked


def test_an_engine_that_needs_the_first_groups_gets_them_first_on_any_track():
    from kvabr.types.cost import PrefillCost

    play = session(
        4, Mixed(), config=PlayerConfig(first_requests=4, min_requests=4), cost=PrefillCost(0.0, 1.0), mode="suffix"
    )
    play.start(0.0)
    priorities = [fetch.priority for fetch in of(play.actions(), FetchGroup)]
    assert len(priorities) == 4
    assert priorities == sorted(priorities)


def overloaded(times_left, *, deadline=10.0, now=0.0, rate=1000.0):
    """A play whose ten groups, all in flight on C, take a multiple of the time left."""
    seen = view(10, deadline)
    seen.now, seen.rate = now, 40_000 / (times_left * (deadline - now))
    for group in range(10):
        fly(seen, group, "C").priority = 0
    return seen


def test_one_is_abandoned_only_if_that_helps():
    seen = overloaded(2.0)
    cheapest = seen.ladder.tracks[0]
    transfer, reason = choose_late(seen, lambda _: cheapest)
    assert (transfer.track, transfer.group) == ("C", 0)
    assert "switching to A frees 3 kB" in reason
    assert choose_late(seen, lambda _: seen.catalog.track("C")) is None  # nothing is cheaper
    seen.ttfb_s = 100.0  # asking again takes longer than what is saved
    assert choose_late(seen, lambda _: cheapest) is None


LAYERED = (("A", 1000, 0.1, None), ("C", 4000, 0.001, None), ("A1", 1000, 0.02, "A"))


def replacing(rate, *, now=1.0):
    """A play whose only group is in place on A, while C is in flight to replace it."""
    seen = view(1, 10.0, LAYERED)
    bring_up_to(seen, 0, "A", now)
    seen.settled.discard(0)
    seen.rate = seen.lower_bound = rate
    seen.in_flight[0] = Transfer(0, 0, "C", 4000, upgrade=True, requested_s=now, priority=200)
    seen.outstanding_bytes = 4000
    return seen


def test_an_upgrade_that_cannot_end_in_time_is_dropped_if_a_smaller_one_can():
    seen = replacing(200.0)
    transfer, reason = choose_hopeless(seen, lambda _: "A")
    assert transfer.track == "C"
    assert "takes 20.00 s, with 9.00 s left; A1 would be in time" in reason
    assert choose_hopeless(replacing(500.0), lambda _: "A") is None  # it is in time itself
    assert choose_hopeless(replacing(100.0), lambda _: "A") is None  # nothing else is, either
    assert choose_hopeless(replacing(0.0), lambda _: "A") is None
    assert choose_hopeless(seen, lambda _: "A1") is None  # there is nothing smaller to add
    seen.unavailable = {(0, "A1")}
    assert choose_hopeless(seen, lambda _: "A") is None


class Greedy(Policy):
    """Wants the largest track of a group first, and only then the next layer."""

    tried = False

    def decide(self, view):
        if (group := view.first_missing()) is not None:
            return Decision.fetch(group, "base", "first")
        if 0 in view.settled and view.track_of[0] == "base":
            track, self.tried = ("layer-1" if self.tried else "FP16"), True
            return Decision.upgrade(0, track, "more")
        return Decision.wait("that is all")


@pytest.mark.parametrize("drops", [True, False])
def test_a_play_does_not_end_on_the_base_for_the_sake_of_what_cannot_come(drops, monkeypatch):
    monkeypatch.setattr(WholeAim, "drops_upgrades", drops)
    offer = catalog(1, layered=True)
    play = Session(Ladder(offer), 2.0, Greedy(), HarmonicMean())
    link = Capacity(world("slow", [offer.track("base").bytes[0] * 4.0]), 0.0, 0.02, slow_start=False)
    record = Simulator(play, offer, link, rtt_s=0.02).run()
    assert record.met
    assert record.groups[0].track == ("layer-1" if drops else "base")
