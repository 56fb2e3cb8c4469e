"""Rivals that plan: over transfer times, from both ends, and by the least latency."""

import pytest

from kvabr.abr.plugins import load_policy
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.types.cost import PrefillCost
from kvabr_lab.policies.video import BolaScores
from tests.abr.plain import bring, offer, steady, view
from tests.catalogs import catalog
from tests.replay.worlds import world


def test_cake_computes_from_the_front_while_it_loads_from_the_back():
    asset = catalog(16)
    cost = PrefillCost(0.0, 4.0 / (16 * 128))  # a quarter of a second a group
    experiment = Experiment(asset, ReplayOptions(4.0, 0.02, 0.55, cost))
    run = experiment.play(world("steady", [1e6]), 0.0, "cake:FP16").run
    sources = [group["source"] for group in run["groups"]]
    meet = sources.index("fetched")
    assert sources == ["recomputed"] * meet + ["fetched"] * (16 - meet)
    # The link brings 0.55 x 0.948 of the cache in 4 s, the engine all of it: they meet after 2.6 s.
    assert 9 <= meet <= 11
    assert run["ttft_s"] == pytest.approx(4.0 / (1 + 0.55 * 0.948), abs=0.3)
    assert {group["track"] for group in run["groups"]} == {"recomputed", "FP16"}
    asked = [group["requested_s"] for group in run["groups"][meet:]]
    assert asked == sorted(asked, reverse=True)


@pytest.mark.parametrize(
    ("loss", "track"), [("0.01", "AC-5x"), ("0.0075", "Int4"), ("0.001", "Int8"), ("1e-6", "FP16")]
)
def test_cake_takes_the_cheapest_track_that_loses_little_enough(loss, track):
    assert {group.track for group in steady(f"cake:loss={loss}", catalog(8), 2e7).groups} == {track}


PROFILES = (("A", 1000, 0.01, None), ("B", 2000, 0.001, None), ("C", 4000, 0.0001, None), ("D", 8000, 0.0, None))


def served(rate, decode_s, accepted="kvserve:loss=0.05", deadline=100.0):
    """Return the track for the first of ten groups; decoding one takes as long as `decode_s` says."""
    seen = view(4, deadline, PROFILES, decode_seconds=decode_s.__getitem__)
    seen.rate = rate
    return load_policy(accepted)().choose(seen, 0).track


def test_kvserve_takes_the_least_latency_of_link_and_decoder():
    free = dict.fromkeys("ABCD", 0.0)
    assert served(1000.0, free) == "A"
    # A second of decoding: A 1 + 1, B 2 + 0.1, C 4, D 8 at 1,000 bytes a second.
    slow = {"A": 1.0, "B": 0.1, "C": 0.0, "D": 0.0}
    assert served(1000.0, slow) == "A"
    assert served(2000.0, slow) == "B"
    # At 100,000 no smaller track is worth its decoding: A 1.01, B 0.12, C 0.04 and D 0.08 seconds a group.
    assert served(1e5, slow) == "C"
    assert served(1e5, {"A": 1.0, "B": 0.1, "C": 0.05, "D": 0.0}) == "D"


def test_kvserve_keeps_to_the_accepted_loss_and_the_deadline():
    free = dict.fromkeys("ABCD", 0.0)
    assert served(1000.0, free, "kvserve:loss=0.005") == "B"  # the four groups of A lose 0.04
    assert served(1000.0, free, "kvserve:loss=0.0001") == "D"
    late = {"A": 0.0, "B": 0.0, "C": 0.0, "D": 0.0}
    assert served(10.0, late, deadline=1.0) == "A"  # nothing meets it: the fastest
    assert served(0.0, free) == "A"


def test_robustmpc_over_a_steady_link_wastes_nothing_and_beats_mpc():
    asset = catalog(48, layered=True)
    rate = 0.3 * asset.fp16_bytes / 4.0
    layered, plain = steady("robustmpc", asset, rate), steady("mpc", asset, rate)
    assert layered.met
    assert layered.bytes_wasted == 0
    assert sum(group.track in {"layer-1", "layer-2"} for group in layered.groups) > 30

    def loss(record):
        return sum(asset.track(group.track).loss[group.group] for group in record.groups)

    assert loss(layered) < 0.5 * loss(plain)


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


@pytest.mark.parametrize("name", ["bola-e", "dynamic", "fugu", "l2a"])
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
