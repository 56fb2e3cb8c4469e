"""The end of what is cached is left to the engine's call for what follows, if that is worth it."""

from __future__ import annotations

from functools import partial

import pytest

from kvabr import AsyncClient, PlayOptions
from kvabr.client.shared_bandwidth import PeerHistory
from kvabr.types.cost import PrefillCost
from kvabr.types.events import PlayStarted
from tests.client import live
from tests.client.test_play import TOKENS, play
from tests.client.virtual import virtual
from tests.toymodel import ToyModel

PROMPT = (*TOKENS, 5, 6, 7)
FAST, SLOW = PrefillCost(0.3, 1e-6), PrefillCost(0.0, 0.3)


async def played(link, tokens=PROMPT, **how):
    options = {"policy": "fixed:Int4", "prefill_cost": FAST, "engine": ToyModel()} | how
    return await play(link, tokens, deadline=2.0, **options)


@virtual
async def test_the_tail_is_neither_fetched_nor_waited_for(origin):
    lines = []
    async with origin() as link:
        whole = await played(link, tail=0)
        found = await played(link, tail=40, log=lines.append)
    assert (whole.tokens, whole.tail) == (70, 0)
    assert (found.tokens, found.tail) == (32, 38)
    assert found.kv.shape[3] == 32
    assert found.coverage == ("Int4",) * 2
    assert found.record.bytes_fetched < whole.record.bytes_fetched
    assert found.loss < whole.loss
    assert found.met
    (start,) = [line for line in lines if isinstance(line, PlayStarted)]
    assert (start.groups, start.tail) == (2, 38 + 3)
    assert start.tail_s == pytest.approx(38e-6)


LONGEST = """
from kvabr.abr.policies.cheapfirst import CheapFirst

class Longest(CheapFirst):
    def choose_tail(self, offers, costs):
        return len(offers) - 1
"""


@virtual
async def test_the_engines_time_for_the_tail_is_set_aside(origin, tmp_path):
    (tmp_path / "longest.py").write_text(LONGEST)
    async with origin(rate=2e5) as link:
        policy = f"{tmp_path / 'longest.py'}:Longest"
        found = await played(link, policy=policy, tail=40, prefill_cost=PrefillCost(0.0, 0.02))
    assert found.tail == 38
    assert found.met
    assert found.ttft_s <= 2.0 - 0.02 * (38 + 3)


@virtual
async def test_of_a_cache_that_is_being_prefilled_the_last_groups_are_not_waited_for(producer, asset):
    how = {"policy": "anytime", "prefill_cost": FAST, "engine": ToyModel(), "question_tokens": 4, "time_price": 0.1}
    how |= {"gpu_price": 10.0}  # or all of it would be computed at once
    async with live.origin(producer) as link, live.working(producer, 1.0):
        found = await live.play(link, tail=40, **how)
    assert found.tail == 32
    assert found.tokens == 160 - 32
    assert 8.0 <= found.ttft_s < 8.5  # the eighth of ten groups, one a second
    assert live.right(found, asset)


@virtual
async def test_a_client_that_does_not_play_knows_what_others_have_heard(origin, short, tmp_path):
    """As the scheduler of an engine whose workers have processes of their own."""
    options = PlayOptions(time_price=0.0, gpu_price=0.0)
    async with origin() as link, AsyncClient(link, cache=tmp_path, options=options) as client:
        link.peer = "moqt://origin.example/"
        ask = partial(client.tail_of, short, deadline=10.0, cost=PrefillCost(0.0, 0.05), behind=3)
        assert await ask() == 0  # more than a little of the time left
        other = PeerHistory(tmp_path / "peers.json")
        other.heard(link.peer, short.track("Int4").total_bytes / 8.0, 0.02)
        other.save()
        assert await ask() > 0
