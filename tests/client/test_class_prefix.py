"""Plays of several layer classes: what a prefix needs of each is in place, or nothing; all but states get better."""

import math

import pytest
import torch

from kvabr.abr.estimators import LOW_SHARE, Prior
from kvabr.abr.policy import Decision, Policy
from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found
from kvabr.client.options import PlayOptions
from kvabr.client.prepare import tail_choices
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, UsageError
from tests.client.classes import HYBRID, INDEXED, SLIDING, WINDOWS, Computer, link, numbers, published
from tests.client.coarse import COARSE
from tests.client.virtual import virtual
from tests.memory_transport import Fault

TOKENS = list(range(150))
SPECS = {"sliding": SLIDING, "indexed": INDEXED, "windows": WINDOWS}
SLOW = PrefillCost.from_rate(1.0)
"""An engine that is of no help."""


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return {**SPECS, "hybrid": HYBRID}[request.param]


@pytest.fixture(scope="module")
def library(tmp_path_factory, spec):
    return published(tmp_path_factory.mktemp("classes"), spec, TOKENS)


async def prefix(
    library, spec, *, faults=None, rate=1e6, cut=None, deadline=2.0, cost=SLOW, policy="fixed:FP16", **more
):
    options = PlayOptions(policy=policy, patience=1.0)
    async with link(library, rate, faults=faults) as peer, AsyncClient(peer, model=spec, options=options) as client:
        found = await client.find(TOKENS, within_s=60)
        if cut is not None:
            found = Found(found.catalog.prefix(spec.groups(cut), end=cut), found.sha256)
        return await client.play_prefix(found, deadline=deadline, cost=cost, **more)


def check(played, spec):
    """Check that a prefix has what it needs, and what was published."""
    end, exact = played.first + played.tokens, numbers(spec, TOKENS)
    for kv, span, whole, only in zip(played.parts, played.spans, exact, spec.classes, strict=True):
        assert kv.shape[3] == span.tokens
        if not played.tokens:
            assert not span.tokens
            continue
        assert played.first <= span.first <= max(played.first, only.first_needed(end))
        assert span.first + span.tokens == end
        assert torch.equal(kv.float(), whole[:, :, :, span.first : end])
    assert len(played.units) == len(played.coverage)


@pytest.mark.parametrize("skip", [0, 1, 5, 8, 9])
@virtual
async def test_all_of_it(library, spec, skip):
    asked = []
    played = await prefix(library, spec, faults=lambda ask: asked.append((ask.track, ask.group)), skip=skip)
    check(played, spec)
    assert (played.first, played.tokens, played.requested, played.cut) == (
        16 * skip,
        150 - 16 * skip,
        150 - 16 * skip,
        None,
    )
    groups = [ask for ask in asked if ask[0].startswith("FP16")]
    assert len(set(groups)) == len(groups) == len(played.units)
    assert min(group for _, group in groups) >= skip
    assert played.loss == pytest.approx(1e-6 * len(groups))


@virtual
async def test_a_late_prefix_is_waited_for_while_an_engine_would_take_longer(library, spec):
    total = library.assets[0].catalog.to_play.track("FP16").total_bytes
    played = await prefix(library, spec, rate=total / 4)
    check(played, spec)
    assert played.seconds <= 4.1
    if spec is INDEXED:
        assert played.tokens >= 16


@virtual
async def test_an_engine_that_is_quick_is_left_the_rest_early(library, spec):
    """The 100 tokens behind the cache take a tenth of a second."""
    total = library.assets[0].catalog.to_play.track("FP16").total_bytes
    played = await prefix(library, spec, rate=total / 10, cost=PrefillCost.from_rate(1000.0), uncached=100)
    assert played.cut is not None
    assert played.seconds < 2.0 - 0.1


@virtual
async def test_a_peer_that_falls_silent(library, spec):
    played = await prefix(library, spec, faults=lambda ask: Fault(stall_after=0) if ask.group >= 2 else None)
    check(played, spec)
    assert played.tokens in (0, 32)
    assert played.seconds <= 2.1


@virtual
async def test_nonsense_is_refused(library, spec):
    with pytest.raises(UsageError, match="block must be at least 1"):
        await prefix(library, spec, block=0)
    with pytest.raises(UsageError, match="groups to skip must be"):
        await prefix(library, spec, skip=10)
    played = await prefix(library, spec)
    if len(spec.classes) > 1:
        with pytest.raises(FormatError, match="layer classes"):
            _ = played.kv


class Halfway(Policy):
    """Fetches everything, and leaves what is behind the middle to the engine."""

    def decide(self, view):
        if (first := view.first_missing()) is not None:
            return Decision.fetch(first, "FP16", "in order")
        if view.solid < view.groups:
            return Decision.wait("on its way")
        return Decision.recompute(view.groups // 2, "what they would bring out costs more")


@pytest.mark.parametrize("block", [1, 10])
@virtual
async def test_a_cut_in_front_of_what_is_in_place_is_where_an_engine_can_go_on(library, spec, block):
    played, catalog = await prefix(library, spec, policy=f"{__file__}:Halfway", block=block), library.assets[0].catalog
    check(played, spec)
    track, whole = catalog.to_play.track("FP16"), catalog.to_play
    assert played.tokens == whole.tokens_before(whole.cut(whole.groups // 2)) // block * block
    used = [index for index, unit in enumerate(whole.units) if unit in played.units]
    assert played.bytes_fetched == sum(track.bytes)
    assert played.bytes_fetched - played.bytes_wasted == sum(track.bytes[index] for index in used)


LONGER = list(range(160))
COST = PrefillCost.from_rate(100.0)
SHORTENED = {"sliding": SLIDING, "hybrid": HYBRID, "indexed": INDEXED}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return {name: published(tmp_path_factory.mktemp(name), spec, LONGER) for name, spec in SHORTENED.items()}


@pytest.fixture(scope="module")
def sliding(libraries):
    return libraries["sliding"].assets[0].catalog.to_play


def cheapest(catalog):
    return min(track.total_bytes for track in catalog.tracks)


def chosen(catalog, speed, left_s, *, skip=0, block=1):
    """Return the part to fetch of least cost."""
    options = PlayOptions(policy="anytime", gpu_price=1e-3)
    offers, costs = tail_choices(
        catalog, COST, options, speed, left_s, following=0, skip=skip, block=block, last_resorts=True
    )
    return offers[costs.index(min(costs))]


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 1.1])
def test_a_prefix_that_is_in_time_is_played(sliding, share, skip):
    speed, left_s = Prior(share * cheapest(sliding.suffix(skip)) / 2.0, 0.01), 2.0
    left = chosen(sliding, speed, left_s, skip=skip)
    assert left.catalog == sliding.with_tail(10 - left.tokens // 16, left.tokens).suffix(skip)

    def seconds(count, rate):
        play = sliding.prefix(count)
        return cheapest(play.suffix(skip)) / rate + COST.seconds(play.tokens, 160 - play.tokens)

    usual = {count: seconds(count, speed.rate) for count in range(skip + 1, 11)}
    if usual[10] <= left_s - 0.1:  # a link needs a moment to reach its rate
        assert left.tokens == 0
    elif min(seconds(count, LOW_SHARE * speed.rate) for count in usual) <= left_s - 0.1:
        assert usual[10 - left.tokens // 16] <= left_s


def test_all_is_played_where_nothing_is_known_or_an_engine_can_take_over_anywhere(libraries, sliding):
    assert chosen(sliding, Prior(0.0, 0.0), 1.0).tokens == 0
    assert chosen(libraries["indexed"].assets[0].catalog.to_play, Prior(1.0, 0.0), 1.0).tokens == 0
    hybrid = libraries["hybrid"].assets[0].catalog.to_play
    assert chosen(hybrid, Prior(1.0, 0.0), 1.0).tokens == 0  # one snapshot alone


def test_it_ends_with_a_block(sliding):
    slow = Prior(0.5 * cheapest(sliding) / 2.0, 0.0)
    for block in (8, 32, 48):
        left = chosen(sliding, slow, 2.0, block=block)
        assert left.tokens > 0
        assert left.catalog.tokens % block == 0


@virtual
async def test_a_prefix_after_a_slow_play_leaves_more_to_the_engine(libraries, sliding):
    options = PlayOptions(policy="anytime", gpu_price=0.1)
    async with (
        link(libraries["sliding"], rate=1e6) as peer,
        AsyncClient(peer, model=SLIDING, engine=Computer(SLIDING), options=options) as client,
    ):
        peer.peer = "origin.example:443"
        found = await client.find(LONGER)
        client._memory.history.record(peer.peer, cheapest(sliding) / 4.0, 0.02)
        played = await client.play_prefix(found, deadline=3.0, cost=COST)
    assert 0 < played.tokens < played.requested == 160
    assert played.cut == f"the engine computes the last {160 - played.tokens} tokens"
    for kv, span, whole in zip(played.parts, played.spans, numbers(SLIDING, LONGER), strict=True):
        assert span.first + span.tokens == played.tokens
        assert torch.allclose(kv.float(), whole[:, :, :, span.first : played.tokens], atol=1.5)


@pytest.mark.parametrize("policy", ["fixed:FP16", "anytime"])
@virtual
async def test_an_asset_is_played_whole_since_nothing_follows(libraries, sliding, policy):
    options = PlayOptions(prefill_cost=COST, policy=policy, gpu_price=1e-3)
    async with (
        link(libraries["sliding"], rate=1e6) as peer,
        AsyncClient(peer, model=SLIDING, engine=Computer(SLIDING), options=options) as client,
    ):
        peer.peer = "origin.example:443"
        found = await client.find(LONGER)
        client._memory.history.record(peer.peer, cheapest(sliding) / 4.0, 0.02)
        played = await client.play_asset(found.catalog.namespace, deadline=2.0)
    assert (played.tokens, played.tail) == (160, 0)


@pytest.mark.parametrize("spec", ["sliding", "hybrid", "windows"], indirect=True, scope="module")
@virtual
async def test_every_class_but_states_gets_better_in_use(library, spec):
    written = []

    def rewrite(first, last, write):
        written.append((first, last))
        write()
        return True

    options = PlayOptions(policy=COARSE, after=math.inf)
    async with link(library) as peer, AsyncClient(peer, model=spec, options=options) as client:
        played = await client.play(TOKENS, deadline=2.0)
        assert set(played.coverage) == {"Int8"}
        before, loss = [kv.clone() for kv in played.parts], played.loss
        played.upgrades.into(rewrite)
        await played.upgrades.wait()
        kinds = [spec.classes[played.catalog.unit(group).part].kind for group in range(played.catalog.groups)]
        assert played.upgrades.coverage == tuple("Int8" if kind == "state" else "FP16" for kind in kinds)
        assert played.upgrades.loss < loss
    units = [unit for unit, kind in zip(played.catalog.units, kinds, strict=True) if kind != "state"]
    assert sorted(written) == sorted((unit.first, unit.first + unit.tokens) for unit in units)
    parts = zip(played.parts, before, numbers(spec, TOKENS), played.spans, spec.classes, strict=True)
    for kv, was, exact, span, only in parts:
        if only.kind == "state":
            assert torch.equal(kv, was)
        else:
            assert torch.equal(kv.float(), exact[:, :, :, span.first :])
            assert not torch.equal(kv, was)
