"""Policies from video players: decisions worked out on paper, and plays over constant links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr.plugins import load_policy
from kvabr_lab.policies.video import BolaScores, project
from tests.abr.plain import bring, offer, steady, view
from tests.catalogs import catalog

# Ten groups in ten seconds: tracks of 1000, 2000 and 4000 bytes a second. BOLA's buffer levels are 1 s and 2.5 s, so
# gamma p is ln 4 / 1.5 and V is its inverse.
SCORES = BolaScores((1000.0, 2000.0, 4000.0), 1.0, 2.5)


@pytest.mark.parametrize(("level_s", "track"), [(0.0, 0), (1.0, 0), (1.4, 1), (2.0, 1), (2.1, 2), (2.5, 2), (9.0, 2)])
def test_bola_takes_more_the_longer_the_buffer(level_s, track):
    assert SCORES.choose(level_s) == track


def begun(name, rate):
    """Return a play with two groups in place after 0.4 s, 1.6 s ahead, and the policy's requests so far."""
    seen, policy = view(), load_policy(name)()
    seen.rate = rate
    policy.start(seen)
    asked = [policy.decide(seen).track]
    for group, now in ((0, 0.2), (1, 0.4)):
        bring(seen, group, "A", now)
        asked.append(policy.decide(seen).track)
    return seen, policy, asked


def test_bola_e_starts_by_throughput_and_does_not_go_beyond_it():
    seen, policy, asked = begun("bola-e", 2300.0)  # 0.9 of it carries B
    assert asked == ["B"] * 3
    bring(seen, 2, "B", 0.6)  # 2.4 s ahead: BOLA alone would take C
    assert SCORES.choose(2.4) == 2
    assert policy.decide(seen).track == "B"
    seen.rate = 4500.0  # 0.9 of it carries C
    assert policy.decide(seen).track == "C"


def test_bola_e_goes_on_from_where_it_started_by_a_placeholder_that_fades():
    seen, policy = view(), load_policy("bola-e")()
    seen.rate = 6000.0
    policy.start(seen)
    bring(seen, 0, "C", 0.0)  # one segment ahead: steady from now on, with 1.082 s of placeholder
    assert policy.decide(seen).track == "C"
    bring(seen, 1, "C", 0.9)  # 1.1 s ahead, 2.171 s with what is left of it
    assert policy.decide(seen).track == "C"
    bring(seen, 2, "C", 2.1)  # 0.9 s ahead, 1.960 s
    assert policy.decide(seen).track == "B"
    seen.now = 3.5  # behind the timeline: no placeholder any more
    assert policy.decide(seen).track == "A"
    assert policy._placeholder_s == 0.0


def test_dynamic_is_throughput_below_the_stable_buffer_and_bola_above_it_with_hysteresis():
    seen, policy, asked = begun("dynamic", 4500.0)
    assert asked == ["C"] * 3  # 1.6 s ahead, the stable buffer time is 2.0 s
    bring(seen, 2, "C", 0.6)
    assert "BOLA" in policy.decide(seen).reason  # 2.4 s
    seen.rate, seen.now = 1900.0, 1.3  # 1.7 s ahead: BOLA stays on, and takes B where the throughput carries A
    decision = policy.decide(seen)
    assert (decision.track, "BOLA" in decision.reason) == ("B", True)
    seen.now = 2.1  # 0.9 s: off
    assert policy.decide(seen).track == "A"
    seen.now = 1.3  # and not on again before 2.0 s
    decision = policy.decide(seen)
    assert (decision.track, "throughput" in decision.reason) == ("A", True)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_the_projection_is_the_nearest_point_of_the_simplex(values):
    point = project(values)
    assert sum(point) == pytest.approx(1.0)
    assert min(point) >= 0.0
    # At the nearest point as much was taken off each that is above 0, and no more off the others.
    kept = [value - coordinate for value, coordinate in zip(values, point, strict=True) if coordinate > 0]
    gone = [value for value, coordinate in zip(values, point, strict=True) if coordinate == 0]
    assert max(kept) == pytest.approx(min(kept), abs=1e-9)
    assert all(value <= max(kept) + 1e-9 for value in gone)


@pytest.mark.parametrize("name", ["bola-e", "dynamic", "l2a"])
@pytest.mark.parametrize(("share", "within"), [(1.3, {"FP16", "BF16", "Int8", "FP8"}), (0.32, {"Int4", "AC-5x"})])
def test_on_a_link_that_never_changes_the_track_is_one_that_it_carries(name, share, within):
    asset = catalog(48)
    record = steady(name, asset, share * asset.fp16_bytes / 4.0)
    assert record.met
    tracks = [group.track for group in record.groups]
    assert sum(track in within for track in tracks) > 0.7 * len(tracks), tracks


@pytest.mark.parametrize("name", ["bola-e", "dynamic", "l2a", "fugu", "robustmpc", "cake", "kvserve"])
def test_an_asset_of_one_track_is_played_on_it(name):
    record = steady(name, offer(4, (("A", 1000, 0.1, None),)), 4000.0)
    assert record.met
    assert {group.track for group in record.groups} == {"A"}
