"""The policy that plans over layers: ``robustmpc``."""

from kvabr.abr.plugins import load_policy
from tests.abr.plain import bring, fly, steady, view
from tests.catalogs import catalog

LAYERS = (("A", 1000, 0.1, None), ("C", 4000, 0.001, None), ("A1", 1000, 0.02, "A"), ("A2", 1000, 0.004, "A1"))


def planned(lower, name="robustmpc"):
    seen, policy = view(tracks=LAYERS), load_policy(name)()
    policy.start(seen)
    seen.rate = seen.lower_bound = lower
    return seen, policy


def test_robustmpc_plans_stacks_of_layers_within_the_share_of_five_groups():
    seen, policy = planned(2000.0)  # 10,000 bytes for five groups: one layer more for each
    decision = policy.decide(seen)
    assert (decision.kind, decision.group, decision.track) == ("fetch", 0, "A")
    assert policy._owed[0][1] == ("A1",)
    seen, policy = planned(3000.0)
    policy.decide(seen)
    assert policy._owed[0][1] == ("A1", "A2")
    seen, policy = planned(1100.0)  # 5,500 bytes: the base of all five, and no layer fits
    policy.decide(seen)
    assert 0 not in policy._owed


def test_robustmpc_asks_for_a_layer_once_what_it_refines_is_in_place():
    seen, policy = planned(3000.0)
    policy.decide(seen)
    fly(seen, 0, "A")
    assert policy.decide(seen).group == 1
    fly(seen, 1, "A")
    seen.in_flight.pop(0)
    seen.outstanding_bytes -= 1000
    bring(seen, 0, "A", 0.4)
    decision = policy.decide(seen)
    assert (decision.kind, decision.group, decision.track) == ("upgrade", 0, "A1")


def test_robustmpc_lets_a_layer_be_that_would_not_arrive_any_more():
    seen, policy = planned(3000.0)
    policy.decide(seen)
    bring(seen, 0, "A", 0.4)
    seen.lower_bound = 980.0  # 9,408 bytes: the base of the nine others, and 408
    assert policy.decide(seen).kind == "fetch"
    assert 0 not in policy._owed


def test_robustmpc_spends_what_is_left_on_layers_and_says_when_there_is_nothing():
    seen, policy = planned(1000.0)
    for group in range(10):
        bring(seen, group, "A" if group == 7 else "A1", 1.0)
    decision = policy.decide(seen)
    assert (decision.kind, decision.group, decision.track) == ("upgrade", 7, "A1")  # saves five times as much
    seen.lower_bound = 0.0
    assert policy.decide(seen).kind == "wait"


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


def test_robustmpc_plays_an_asset_whose_layers_need_not_be_there():
    record = steady("robustmpc", catalog(16), 2e6)
    assert record.met
