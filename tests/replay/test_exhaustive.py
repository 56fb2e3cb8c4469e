"""The clairvoyant bound against every schedule of small plays: none is below it, and it is near the best of them.

A schedule says what the link brings of each group and in which order, what is decoded when it is there, and what the
engine computes. All choices are tried: tracks, orders, groups to compute, and, for an engine that computes a tail,
which groups are upgraded while it does.
"""

import heapq
import math
import random
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, permutations, product
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr.ladder import stack
from kvabr.replay.clairvoyant import Bound, Clairvoyant
from kvabr.replay.link import Capacity, JointCapacity
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost, objective
from tests.catalogs import catalog
from tests.examples import examples
from tests.replay.worlds import world

MODES = ("none", "hole", "suffix")
COMPUTED = None


@dataclass(frozen=True)
class Instance:
    """One small play; its deadline is one second."""

    offer: Catalog
    link: Capacity
    rtt_s: float
    cost: PrefillCost | None
    mode: str
    scale: float
    decoders: int
    time_price: float
    gpu_price: float
    max_loss: float = math.inf

    @cached_property
    def options(self):
        """By track: bytes, seconds of decoding, and loss of each group."""
        share = [self.offer.group_tokens(g) / self.offer.spec.group_tokens for g in range(self.offer.groups)]
        found = []
        for track in self.offer.tracks:
            sizes = [sum(layer.bytes[g] for layer in stack(self.offer, track)) for g in range(self.offer.groups)]
            found.append((sizes, [self.scale * track.decode_s * one for one in share], track.loss))
        return found

    def bound(self) -> Bound:
        made = Clairvoyant(
            self.offer, self.cost, self.mode, decode_scale=self.scale, decoders=self.decoders, max_loss=self.max_loss
        )
        prices = {"time_price": self.time_price, "gpu_price": self.gpu_price}
        return made.best(self.link, 1.0, **prices, first_byte_s=self.rtt_s)

    def decoded(self, jobs, begun=(0, ())):
        """Return when each of (bytes, seconds of decoding) is in place, brought in this order, and what is left."""
        nbytes, free = begun[0], list(begun[1]) or [0.0] * self.decoders
        ends = []
        for more, seconds in jobs:
            nbytes += more
            ends.append(max(self.link.when(self.rtt_s, nbytes), heapq.heappop(free)) + seconds)
            heapq.heappush(free, ends[-1])
        return ends, (nbytes, tuple(free))

    def seconds(self, first, last):
        size = self.offer.spec.group_tokens
        return self.cost.seconds(first * size, min(last * size, self.offer.tokens) - first * size)

    def value(self, loss, end_s, engine_s=0.0):
        prices = {"time_price": self.time_price, "gpu_price": self.gpu_price}
        return objective(loss, end_s, 1.0, met=end_s <= 1.0, engine_s=engine_s, **prices)

    def schedules(self):
        """Yield the loss, the end and the engine's seconds of every schedule."""
        groups, options = range(self.offer.groups), self.options
        choices = [*range(len(options)), *([COMPUTED] if self.mode == "hole" else [])]
        for chosen in product(choices, repeat=len(groups)):
            fetched = [g for g in groups if chosen[g] is not COMPUTED]
            loss = sum(options[chosen[g]][2][g] for g in fetched)
            kinds = groupby(groups, [one is COMPUTED for one in chosen].__getitem__)
            runs = [list(run) for computed, run in kinds if computed]
            for order in permutations(fetched):
                ends, _ = self.decoded([(options[chosen[g]][0][g], options[chosen[g]][1][g]) for g in order])
                ready = dict(zip(order, ends, strict=True))
                free_s = engine_s = 0.0
                for run in runs:
                    takes_s = self.seconds(run[0], run[-1] + 1)
                    free_s = max([free_s, *(ready[g] for g in fetched if g < run[0])]) + takes_s
                    engine_s += takes_s
                yield loss, max([free_s, *ends]), engine_s
        if self.mode == "suffix":
            yield 0.0, self.seconds(0, len(groups)), self.seconds(0, len(groups))
            for cut in groups[1:]:
                yield from self.tails(cut)

    def tails(self, cut):
        """Yield the schedules in which the engine computes everything from ``cut`` on."""
        options, takes_s = self.options, self.seconds(cut, self.offer.groups)
        pairs = list(product(range(len(options)), repeat=2))
        for chosen in product(pairs, repeat=cut):
            loss = sum(options[final][2][g] for g, (_, final) in enumerate(chosen))
            later = [g for g, (first, final) in enumerate(chosen) if first != final]
            for order, upgrades in product(permutations(range(cut)), permutations(later)):
                jobs = [(options[chosen[g][0]][0][g], options[chosen[g][0]][1][g]) for g in order]
                ends, begun = self.decoded(jobs)
                more, _ = self.decoded([self.upgrade(g, *chosen[g]) for g in upgrades], begun)
                yield loss, max([max(ends) + takes_s, *more]), takes_s

    def upgrade(self, group, first, final):
        """Return the bytes and the seconds of an upgrade from one track to another."""
        sizes, seconds, _ = self.options[final]
        below = [track.name for track in stack(self.offer, self.offer.tracks[final])]
        nested = self.offer.tracks[first].name in below
        return sizes[group] - (self.options[first][0][group] if nested else 0), seconds[group]


LADDERS = (
    ("base", "layer-1"),
    ("base", "layer-1", "layer-2"),
    ("base", "Int8"),
    ("AC-5x", "Int8"),
    ("base", "layer-1", "FP16"),
)


def instance(dice, mode, *, tracks=None, scale=None):
    names = tracks or dice.choice(LADDERS)
    groups = dice.choice([2, 3, 4] if len(names) < 3 else [2, 3])
    whole = catalog(groups, short=dice.choice([0, 40, 120]), layered=True)
    # Real groups of one track differ in size.
    grain = [dice.uniform(0.8, 1.25) for _ in range(groups)]
    kept = tuple(
        replace(track, bytes=tuple(int(size * more) for size, more in zip(track.bytes, grain, strict=True)))
        for track in whole.tracks
        if track.name in names
    )
    offer = replace(whole, tracks=kept, mixes=())
    rtt_s = dice.choice([0.0, 0.05, 0.2])
    rates = [dice.choice([0.0, 0.3, 1.0, 3.0]) + 0.01 for _ in range(40)]
    trace = world("drawn", rates, dice.choice([0.02, 0.1]))
    load = math.exp(dice.uniform(math.log(0.05), math.log(3.0)))
    trace = trace.scaled(load * offer.fp16_bytes / trace.mean_rate)
    link = Capacity(trace, dice.uniform(0.0, 2.0), rtt_s, slow_start=dice.random() < 0.5)
    cost = None
    if mode != "none":
        size, takes_s = offer.tokens, dice.uniform(0.3, 4.0)
        attention = dice.choice([0.0, 0.3]) * takes_s / size**2
        constant, before, floor = (
            dice.choice([0.0, low, high]) for low, high in ((0.01, 0.1), (1e-4, 1e-3), (0.1, 0.5))
        )
        cost = PrefillCost(constant, takes_s / size, attention, before, floor)
    return Instance(
        offer, link, rtt_s, cost, "hole" if mode == "none" else mode,
        dice.choice([0.0, 1.0, 20.0, 100.0]) if scale is None else scale, dice.choice([1, 2]),
        dice.choice([0.0, 1e-3, 0.03, 1.0]), dice.choice([0.0, 1e-3, 0.1]),
    )  # fmt: skip


def best(play, mode):
    """Return the least objective of all schedules, and whether any meets the deadline."""
    if mode == "none":
        play = replace(play, mode="none")
    found = [(play.value(*schedule), schedule[1]) for schedule in play.schedules() if schedule[0] <= play.max_loss]
    return min(value for value, _ in found), min(end for _, end in found)


@pytest.mark.slow
@examples(200)
@given(st.sampled_from(MODES), st.integers(0, 10**9))
def test_no_schedule_is_below_the_bound(mode, seed):
    play = instance(dice := random.Random(seed), mode)
    best_tracks = [min(losses) for losses in zip(*(track.loss for track in play.offer.tracks), strict=True)]
    play = replace(play, max_loss=dice.choice([math.inf, 1.0, 1.3, 10.0]) * sum(best_tracks) + 1e-9)
    bound, (least, fastest_s) = play.bound(), best(play, mode)
    if bound.feasible:
        assert least >= bound.objective - 1e-6 * max(1.0, least)
    else:
        assert fastest_s > 1.0 - 1e-9


def cheapest(offer, links, rtt_s, time_price):
    """Return the least objective of all ways to bring an asset over two links, nothing of which takes decoding."""
    least = math.inf
    choices = list(product(range(2), range(len(offer.tracks))))
    for chosen in product(choices, repeat=offer.groups):
        sizes = [0, 0]
        for group, (link, track) in enumerate(chosen):
            sizes[link] += sum(layer.bytes[group] for layer in stack(offer, offer.tracks[track]))
        ends_s = max(link.when(rtt_s, size) for link, size in zip(links, sizes, strict=True) if size)
        lost = sum(offer.tracks[track].loss[group] for group, (_, track) in enumerate(chosen))
        prices = {"engine_s": 0.0, "gpu_price": 0.0, "time_price": time_price}
        least = min(least, objective(lost, ends_s, 1.0, met=ends_s <= 1.0, **prices))
    return least


@examples(100)
@given(st.integers(0, 10**9))
def test_no_use_of_two_links_is_below_the_bound(seed):
    dice = random.Random(seed)
    one, other = (instance(dice, "none", tracks=("base", "layer-1", "Int8"), scale=0.0) for _ in range(2))
    offer, rtt_s, time_price = one.offer, one.rtt_s, one.time_price
    links = (one.link, other.link)
    bound = Clairvoyant(offer, None, "hole", decode_scale=0.0).best(
        JointCapacity(links), 1.0, time_price=time_price, gpu_price=0.0, first_byte_s=rtt_s
    )
    least = cheapest(offer, links, rtt_s, time_price)
    if bound.feasible:
        assert least >= bound.objective - 1e-6 * max(1.0, least)
        assert bound.objective >= bound.least_loss - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_best_schedule_is_near_the_bound(mode):
    """The bound may split a group between two tracks, and of a few groups one is much."""
    gaps = []
    for seed in range(100):
        play = instance(random.Random(f"{mode} {seed}"), mode)
        bound, (least, fastest_s) = play.bound(), best(play, mode)
        if fastest_s < 0.9:
            gaps.append((least - bound.objective) / max(least, 1e-9))
    assert len(gaps) > 50
    assert median(gaps) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_where_there_is_nothing_to_choose_the_bound_ends_when_the_best_schedule_does(mode):
    """With one track and instant decoding, only the order, the engine and the link decide."""
    ratios = []
    for seed in range(120):
        play = instance(random.Random(f"alone {mode} {seed}"), mode, tracks=("Int8",), scale=0.0)
        flat = replace(play.offer.tracks[0], loss=(0.0,) * play.offer.groups)
        play = replace(play, offer=replace(play.offer, tracks=(flat,)), time_price=1.0, gpu_price=0.0)
        bound, (least, fastest_s) = play.bound(), best(play, mode)
        if bound.feasible:
            assert least >= bound.objective - 1e-6, seed
            ratios.append(bound.objective / least if fastest_s <= 1.0 else 0.0)
        else:
            assert fastest_s > 1.0 - 1e-9, seed
    ratios.sort()
    assert len(ratios) > 30
    assert median(ratios) > 0.99
    assert ratios[len(ratios) // 10] > 0.98


def test_a_short_last_group_is_cheapest_to_compute():
    """The bound once took the first groups for the cheapest, and was above the optimum where the last one is short."""
    offer = catalog(3, short=120, decode=0.0)
    kept = tuple(replace(track, loss=(0.0, 0.0, 1.0)) for track in offer.tracks if track.name == "AC-5x")
    offer = replace(offer, tracks=kept, mixes=())
    link = Capacity(world("flat", [20.0 * offer.fp16_bytes]), slow_start=False)
    cost = PrefillCost(0.0, 0.5 / 128)
    bound = Clairvoyant(offer, cost, "hole").best(link, 1.0, time_price=0.0, gpu_price=1.0)
    assert bound.objective == pytest.approx(0.5 * 8 / 128, rel=1e-3)


def test_nothing_arrives_in_the_first_round_trip_of_a_warm_connection():
    offer = catalog(2, decode=0.0)
    link = Capacity(world("flat", [offer.track("AC-5x").total_bytes / 0.5]), 0.0, 0.6, slow_start=False)
    made = Clairvoyant(offer, None, "hole")
    assert made.best(link, 1.0, time_price=0.0, gpu_price=0.0).feasible
    assert not made.best(link, 1.0, time_price=0.0, gpu_price=0.0, first_byte_s=0.6).feasible


def test_what_is_computed_behind_a_fetched_group_waits_for_it():
    """To compute two large groups, the first small one must be there, and it comes late: better compute that, too."""
    offer = catalog(4, decode=0.0)
    (track,) = (track for track in offer.tracks if track.name == "AC-5x")
    sizes = (1000, 10_000, 10_000, 10_000)
    offer = replace(offer, tracks=(replace(track, bytes=sizes),), mixes=())
    trace = world("late", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 21_000.0 / 0.1, 0.0, 0.0], 0.1)
    cost = PrefillCost(0.0, 0.3 / 128)
    made = Clairvoyant(offer, cost, "hole")
    link = Capacity(trace, slow_start=False)
    found = made.best(link, 1.0, time_price=1.0, gpu_price=0.0)
    assert found.feasible
    assert found.objective >= 0.79
