"""How much of a prefix is left to the call that computes the question."""

import math
from dataclasses import replace

import pytest

from kvabr.abr.policies.anytime import Anytime
from kvabr.abr.tail import TailOffer, tail_offers
from kvabr.abr.tail_costs import tail_costs
from kvabr.data import default_catalog
from kvabr.player.play_policy import choose_tail
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError, UsageError
from kvabr.types.tails import TailLoss

TAILS = (TailLoss(16, 0.5), TailLoss(128, 0.2), TailLoss(512, 0.06))
GPU = PrefillCost(0.018, 2e-5)
SLOW = PrefillCost(0.0, 1.0)


@pytest.fixture
def catalog() -> Catalog:
    catalog = default_catalog()
    return replace(catalog, tracks=tuple(replace(track, tails=TAILS) for track in catalog.tracks))


def prices(**more: float) -> dict[str, float]:
    return {"time_price": 1e-3, "gpu_price": 1e-3} | more


def test_offers_are_whole_groups_up_to_the_limit(catalog):
    offers = tail_offers(catalog, GPU, following=20)
    last = catalog.group_tokens(catalog.groups - 1)
    assert [offer.tokens for offer in offers] == [0, last, last + 128, last + 256, last + 384][: len(offers)]
    assert offers[-1].tokens <= 512
    for left_out, offer in enumerate(offers):
        assert offer.catalog.groups == catalog.groups - left_out
        assert offer.catalog.tail == 20 + offer.tokens
        assert offer.engine_s == pytest.approx(2e-5 * offer.tokens)
        assert offer.catalog.tokens + offer.tokens == catalog.tokens
    assert [offer.tokens for offer in tail_offers(catalog, GPU, following=20, limit=last)] == [0, last]
    assert [offer.tokens for offer in tail_offers(catalog, GPU, following=0)] == [0]  # there is no call for it
    many = tail_offers(catalog, GPU, following=20, limit=1 << 20)
    assert (len(many) <= 9, many[-1].catalog.groups <= 2) == (True, True)


def test_one_group_is_fetched_at_least_and_what_is_skipped_is_not(catalog):
    few = catalog.prefix(3)
    assert [offer.catalog.groups for offer in tail_offers(few, GPU, following=1)] == [3, 2, 1]
    assert [offer.catalog.groups for offer in tail_offers(few, GPU, following=1, skip=1)] == [2, 1]
    assert all(offer.catalog.offset == 1 for offer in tail_offers(few, GPU, following=1, skip=1))
    with pytest.raises(UsageError, match="groups to skip must be"):
        tail_offers(few, GPU, following=1, skip=3)


@pytest.mark.parametrize("arguments", [{"following": -1}, {"following": 1, "limit": -1}, {"following": 1 << 40}])
def test_absurd_tails_are_refused(catalog, arguments):
    with pytest.raises(UsageError, match="must have 0 to"):
        tail_offers(catalog, GPU, **arguments)


def test_a_fast_engine_computes_much_and_a_slow_one_nothing(catalog):
    for cost, wanted in ((GPU, 5), (SLOW, 1)):
        offers = tail_offers(catalog, cost, following=20)
        chosen = choose_tail("anytime", offers, tail_costs(offers, 2.0, rate=1e6, **prices()))
        assert offers.index(chosen) + 1 == (len(offers) if wanted == 5 else 1)


def test_what_an_engine_may_never_do(catalog):
    offers = tail_offers(catalog, GPU, following=20)
    assert choose_tail("anytime", offers, tail_costs(offers, 2.0, **prices(gpu_price=math.inf))).tokens == 0
    late = [replace(offer, engine_s=10.0 * index) for index, offer in enumerate(offers)]
    assert choose_tail("anytime", late, tail_costs(late, 2.0, **prices())).tokens == 0


def test_costs_are_finite_whatever_the_time(catalog):
    offers = tail_offers(catalog, GPU, following=20)
    for left_s in (-5.0, 0.0, 1e-9, 1e6):
        costs = tail_costs(offers, left_s, **prices())
        assert math.isfinite(costs[0])
        assert not any(math.isnan(cost) for cost in costs)


@pytest.mark.parametrize("cost", [None, SLOW, GPU])
def test_a_tail_that_is_late_is_never_cheaper_than_one_in_time(catalog, cost):
    """Also one that alone takes longer than the deadline, and leaves little to fetch."""
    slow = PrefillCost.from_rate(1000.0)
    offers, left_s = tail_offers(catalog, slow, following=20, limit=1 << 20), 0.3
    base = min(track.total_bytes for track in catalog.tracks)
    costs = tail_costs(offers, left_s, rate=base / (0.6 * left_s), ttfb_s=0.01, cost=cost, **prices())
    assert costs.index(min(costs)) == 0
    late = [cost for offer, cost in zip(offers, costs, strict=True) if offer.engine_s > left_s]
    assert min(late) > 0.5


def test_the_front_costs_what_it_costs_after_the_tokens_that_the_engine_has(catalog):
    near, far = PrefillCost(0.0, 1e-5), PrefillCost(0.0, 1e-5, before_s=1e-3)
    offers = tail_offers(catalog, near, following=20, skip=8)
    slow = {"rate": 1e4, "ttfb_s": 0.01} | prices()
    cheap, dear = (tail_costs(offers, 8.0, cost=cost, **slow) for cost in (near, far))
    for one, other in zip(cheap, dear, strict=True):
        assert other - one > 0.9 * 8 * 128 * 1e-3 * 2e-3  # both prices of the time for what is in place


class Longest(Anytime):
    answer: object = None

    def choose_tail(self, offers: list[TailOffer], costs: list[float]) -> object:
        assert len(offers) == len(costs)
        return len(offers) - 1 if self.answer is None else self.answer


@pytest.mark.parametrize("answer", [None, -1, 99, "all", 1.0, True])
def test_a_policy_chooses_for_itself(catalog, answer, monkeypatch):
    monkeypatch.setattr(Longest, "answer", answer)
    offers = tail_offers(catalog, SLOW, following=20)
    name = f"{__file__}:Longest"
    monkeypatch.setattr("kvabr.player.play_policy.load_policy", lambda _name: Longest)
    if answer is None:
        assert choose_tail(name, offers, tail_costs(offers, 2.0, **prices())) is offers[-1]
        return
    with pytest.raises(PolicyError, match="must choose a tail"):
        choose_tail(name, offers, tail_costs(offers, 2.0, **prices()))


@pytest.mark.parametrize(("block", "tails"), [(16, [128, 256, 384, 512]), (256, [256, 512]), (384, [384])])
def test_a_tail_begins_where_a_block_of_the_engine_does(catalog, block, tails):
    offers = tail_offers(catalog.prefix(60), GPU, following=20, block=block)
    assert [offer.tokens for offer in offers[1:]] == [tail for tail in tails if not (60 * 128 - tail) % block]
