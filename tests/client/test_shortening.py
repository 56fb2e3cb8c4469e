"""How much of a cache with windows or states is fetched when the engine computes the rest."""

from __future__ import annotations

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.play import shortened
from kvabr.client.shared_bandwidth import KnownLink
from kvabr.types.cost import PrefillCost
from tests.client.classes import HYBRID, INDEXED, SLIDING, Computer, link, numbers, published
from tests.client.virtual import virtual

TOKENS = list(range(160))
COST = PrefillCost.from_rate(100.0)
SPECS = {"sliding": SLIDING, "hybrid": HYBRID, "indexed": INDEXED}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return {name: published(tmp_path_factory.mktemp(name), spec, TOKENS) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def sliding(libraries):
    return libraries["sliding"].assets[0].catalog.to_play


def cheapest(catalog):
    return min(track.total_bytes for track in catalog.tracks)


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 1.1])
def test_the_longest_prefix_that_is_in_time_is_played(sliding, share, skip):
    """Or the one that is soonest; what the engine computes behind it counts."""
    speed, left_s = KnownLink(share * cheapest(sliding.suffix(skip)) / 2.0, 0.0), 2.0
    found = shortened(sliding, COST, speed, left_s, skip=skip, behind=0)

    def seconds(count):
        play = sliding.prefix(count)
        return cheapest(play.suffix(skip)) / speed.rate + COST.seconds(play.tokens, 160 - play.tokens)

    took = {count: seconds(count) for count in range(skip + 1, 11)}
    in_time = [count for count, each in took.items() if each <= left_s]
    wanted = max(in_time) if in_time else min(took, key=lambda count: (took[count], -count))
    assert found.tokens == 16 * wanted
    assert found == sliding.prefix(wanted)


def test_all_is_played_where_nothing_is_known_or_an_engine_can_take_over_anywhere(libraries, sliding):
    assert shortened(sliding, COST, KnownLink(0.0, 0.0), 1.0, skip=0, behind=0) is sliding
    indexed = libraries["indexed"].assets[0].catalog.to_play
    assert shortened(indexed, COST, KnownLink(1.0, 0.0), 1.0, skip=0, behind=0) is indexed
    hybrid = libraries["hybrid"].assets[0].catalog.to_play
    assert shortened(hybrid, COST, KnownLink(1.0, 0.0), 1.0, skip=0, behind=0) is hybrid  # one snapshot alone


def test_it_ends_with_a_block(sliding):
    slow = KnownLink(0.5 * cheapest(sliding) / 2.0, 0.0)
    for block in (8, 24, 48):
        found = shortened(sliding, COST, slow, 0.0, skip=0, behind=0, block=block)
        end = found.tokens // block * block
        assert found == sliding.prefix(len(found.chunks), end)


@pytest.mark.parametrize("prefix", [False, True])
@virtual
async def test_a_play_after_a_slow_one_leaves_more_to_the_engine(libraries, sliding, prefix):
    engine, rate = Computer(SLIDING), 0.5 * cheapest(sliding) / 2.0
    options = PlayOptions(prefill_cost=COST, policy="anytime", gpu_price=1.0)
    async with link(libraries["sliding"], rate=1e6) as peer:
        peer.peer = "origin.example:443"
        async with AsyncClient(peer, model=SLIDING, engine=engine, options=options) as client:
            found = await client.find(TOKENS)
            client._history.heard(peer.peer, rate, 0.02)
            if prefix:
                played = await client.play_prefix(found, deadline=2.0, cost=COST)
                assert played.wanted == 160
                assert played.cut == "the rest is sooner computed than fetched"
            else:
                played = await client.play(TOKENS, deadline=2.0)
                assert played.met
    assert 0 < played.tokens < 160
    assert not engine.calls
    for kv, span, whole in zip(played.parts, played.spans, numbers(SLIDING, TOKENS), strict=True):
        assert span.first + span.tokens == played.tokens
        assert torch.allclose(kv.float(), whole[:, :, :, span.first : played.tokens], atol=1.5)
