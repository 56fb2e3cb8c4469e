"""Rivals that plan: over transfer times, from both ends, and by the least latency."""

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.player.session import Session
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError
from tests.abr.plain import steady, view
from tests.catalogs import catalog
from tests.replay.worlds import world


def test_fugu_over_a_steady_link_meets_the_deadline_on_what_it_carries():
    asset = catalog(48)
    record = steady("fugu", asset, 0.7 * asset.fp16_bytes / 4.0)
    assert record.met
    assert sum(group.track in {"FP8", "Int8"} for group in record.groups) > 24
    assert steady("fugu", asset, 0.25 * asset.fp16_bytes / 4.0).met


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


def test_cake_takes_the_cheapest_track_that_loses_little_enough():
    asset = catalog(8)

    def track(name):
        seen = Session(Ladder(asset), 4.0, policy := load_policy(name)(), HarmonicMean())
        seen.start(0.0)
        return policy._track

    assert track("cake") == "AC-5x"  # 0.0082 nats
    assert track("cake:loss=0.0075") == "Int4"
    assert track("cake:loss=0.001") == "Int8"
    assert track("cake:loss=1e-6") == "FP16"
    assert track("cake:FP8") == "FP8"
    with pytest.raises(PolicyError, match="no track 'FP9' to play alone; write cake:TRACK with one of FP16"):
        track("cake:FP9")


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
