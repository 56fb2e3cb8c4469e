"""The planner recomputes little, in time, and only where it helps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr import Ladder, Transfer, View
from kvabr.abr.recompute_planner import Rest
from kvabr.abr.view import GroupSet
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog

CATALOG = catalog(10, decode=0.0)
CHEAP = CATALOG.track("AC-5x").bytes
WHOLE = sum(CHEAP)


def view(rate, *, now=0.0, deadline=1.0, in_flight=()):
    made = View(Ladder(CATALOG), deadline, cost=PrefillCost(0.0, 1e-3))
    made.now, made.rate, made.lower_bound = now, rate, rate
    for request, group in enumerate(in_flight):
        made.in_flight[request] = Transfer(request, group, "AC-5x", CHEAP[group], upgrade=False, requested_s=0.0)
        made.outstanding_bytes += CHEAP[group]
    return made


def plan(seen, cost, mode, absent, engine_free_s, *, dead=False):
    return Rest(seen, cost, GroupSet(seen.groups, absent), engine_free_s, dead=dead).plan(mode)


def per_group(seconds):
    return PrefillCost(0.0, seconds / 128)


@pytest.mark.parametrize("mode", ["hole", "suffix"])
def test_nothing_is_left_to_the_engine_while_the_network_makes_it(mode):
    assert plan(view(1.1 * WHOLE), per_group(0.01), mode, range(10), 0.0) is None
    assert plan(view(1.0), per_group(0.01), mode, (), 0.0) is None


@pytest.mark.parametrize("mode", ["hole", "suffix"])
def test_the_slower_the_network_the_more_is_left_to_the_engine(mode):
    counts = []
    for share in (0.9, 0.7, 0.5, 0.3, 0.0):
        found = plan(view(share * WHOLE), per_group(0.02), mode, range(10), 0.0)
        counts.append(found.last - found.first)
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 10


def test_a_hole_starts_behind_what_is_in_flight():
    found = plan(view(0.6 * WHOLE, in_flight=(0, 1)), per_group(0.02), "hole", range(10), 0.0)
    assert found.first == 2
    assert 3 < found.last <= 8


def test_a_suffix_reaches_to_the_end_even_over_groups_in_place():
    found = plan(view(0.1 * WHOLE), per_group(0.02), "suffix", [2, 3, 7], 0.0)
    assert found.last == 10
    assert found.first in {2, 3, 7}


@pytest.mark.parametrize("mode", ["hole", "suffix"])
def test_an_engine_slower_than_the_network_is_not_asked(mode):
    assert plan(view(0.5 * WHOLE), per_group(10.0), mode, range(10), 0.0) is None


@given(st.floats(0, 2), st.floats(1e-4, 1.0), st.sampled_from(["hole", "suffix"]), st.floats(0, 3), st.data())
def test_a_plan_is_always_some_of_the_absent_groups_and_sooner_than_none(share, seconds, mode, now, data):
    absent = sorted(data.draw(st.sets(st.integers(0, 9), min_size=1)))
    found = plan(view(share * WHOLE, now=now), per_group(seconds), mode, absent, 0.0)
    if found is None:
        return
    assert found.first in absent
    assert "recompute" in found.reason
    if mode == "hole":
        assert all(group in absent for group in range(found.first, found.last))
    else:
        assert found.last == 10
