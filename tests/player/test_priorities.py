"""Priorities of a play's requests: what is required, what is better, and what is worth most."""

from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr.policy import Decision, Policy
from kvabr.player.requests import DEARER, LEAST_URGENT, RequestPriorities, upgrade_priority
from kvabr.player.session_types import FetchGroup, PlayerConfig
from tests.player.sessions import bring, of, session

WORTH = st.floats(0.0, 10.0)
SIZES = st.integers(1, 1 << 40)


@given(WORTH, WORTH, SIZES)
def test_what_saves_more_with_the_same_bytes_is_more_urgent(less, more, nbytes):
    less, more = sorted((less, more))
    assert LEAST_URGENT <= upgrade_priority(more, nbytes) <= upgrade_priority(less, nbytes) <= 255


def test_the_cheapest_track_of_every_group_goes_before_others():
    given_ = RequestPriorities(4)
    dear = [given_.required(group, dearer=True) for group in (3, 0)]
    cheap = [given_.required(group, dearer=False) for group in (1, 2)]
    assert max(cheap) < DEARER <= min(dear)
    assert dear == sorted(dear)
    assert cheap == sorted(cheap)
    assert given_.required(3, dearer=True) == dear[0]
    assert given_.required(3, dearer=False) < cheap[0]  # it was wanted first
    assert max(dear) < LEAST_URGENT


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
    assert [fetch.priority >= DEARER for fetch in fetches] == [True, True, False, False]
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
