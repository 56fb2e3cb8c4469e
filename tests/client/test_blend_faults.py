"""Engines and selectors that fail while tokens of passages are chosen or computed: the cache is whole, and in time."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from kvabr.types.events import TokensDone, TokensFailed
from tests.client.playing import connection, play
from tests.client.test_play_blend import FUSION, ONE, ORDERED, OTHER, QUESTION, SYSTEM
from tests.client.virtual import Hang, virtual
from tests.toymodel import ToyBlendModel, toy_passage

PARTS = (SYSTEM, ORDERED, ONE, OTHER, QUESTION)
QUICK = {"prefill_cost": PrefillCost(0.0, 3e-5), "gpu_price": 100.0}
"""An engine that has time for the publisher's order while the rest comes."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("passages")
    toy_passage(root / "one", ONE.ids, fusion=FUSION)
    toy_passage(root / "other", OTHER.ids, fusion=FUSION)
    toy_passage(root / "ordered", ORDERED.ids, fusion=((0.0, 0.09), (0.15, 0.01)), order=bytes([*range(200, 240)]))
    return PublishedAssets(root)


def slow(library):
    return connection(library, 2e4)


class Faulty(ToyBlendModel):
    """Does what ``how`` says in the nth recompute, counted from 0."""

    def __init__(self, how, nth):
        super().__init__()
        self.how, self.nth, self.calls = how, nth, 0

    def recompute(self, *arguments, **options):
        number, self.calls = self.calls, self.calls + 1
        made = super().recompute(*arguments, **options)
        return self.how(made) if number == self.nth else made


def raising(_):
    raise RuntimeError("out of memory")


WRONG = {
    "raises": raising,
    "NaN": lambda made: made * float("nan"),
    "a layer too few": lambda made: made[1:],
    "a token too few": lambda made: made[:, :, :, 1:],
    "another head size": lambda made: made[..., 1:],
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("nth", [0, 1], ids=["ahead", "at the end"])
@pytest.mark.parametrize("how", WRONG.values(), ids=WRONG.keys())
def test_a_cache_is_whole_after_a_fault_of_the_engine(library, how, nth):
    @virtual
    async def check():
        events, engine = [], Faulty(how, nth)
        async with slow(library) as link:
            played = await play(link, parts=PARTS, share=0.1, deadline=20.0, engine=engine, log=events.append, **QUICK)
        assert engine.calls > nth
        assert bool(torch.isfinite(played.kv).all())
        assert played.met
        assert sum(isinstance(event, TokensFailed) for event in events) == 1
        assert played.record.blend.share == 0.0
        assert len(played.computed_again) == (6 if nth else 0)

    check()


@virtual
async def test_of_an_engine_that_hangs_the_joined_cache_is_handed_over_by_the_deadline(library):
    with Hang() as hang:

        def hanging(made):
            hang.wait()
            return made

        async with slow(library) as link:
            played = await asyncio.wait_for(
                play(link, parts=PARTS, share=0.1, deadline=20.0, engine=Faulty(hanging, 1), **QUICK), 60.0
            )
            kept = played.kv.clone()
        assert len(played.computed_again) == 6
        assert played.met
        assert played.record.blend.share == 0.0
    for thread in [thread for thread in threading.enumerate() if thread.name == "kvabr-engine"]:
        await asyncio.to_thread(thread.join, 300.0)
    assert torch.equal(played.kv, kept)


@virtual
async def test_what_an_engine_returns_after_the_play_has_ended_changes_nothing(library):
    """The play's patience ends between the last look at it and the write."""
    from kvabr.player.assembler import Assembler, Placement

    taken = []

    class Late(Assembler):
        def put_tokens(self, at, computed):
            taken.append(self.take().clone())
            assert super().put_tokens(at, computed) is Placement.LATE
            taken.append(self.take())
            return Placement.LATE

    async with slow(library) as link:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvabr.client.play.Assembler", Late)
            played = await play(link, parts=PARTS, share=0.1, deadline=20.0, engine=ToyBlendModel(), **QUICK)
    assert torch.equal(*taken[:2])
    assert played.computed_again == ()


@virtual
async def test_the_engines_time_is_counted_once(library):
    """Tokens computed ahead, the choice, and the tokens at the end wait for each other."""
    events = []
    async with slow(library) as link:
        played = await play(
            link, parts=PARTS, share=0.1, deadline=20.0, engine=ToyBlendModel(), log=events.append, **QUICK
        )
    assert played.record.recompute_s <= played.record.delivered_s
    assert sum(event.tokens for event in events if isinstance(event, TokensDone)) == len(played.computed_again)


@virtual
async def test_a_cache_that_would_lose_too_much_waits_for_the_tokens_of_a_slow_engine(library):
    class Slow(ToyBlendModel):
        def recompute(self, *arguments, **options):
            slowness.wait()
            return super().recompute(*arguments, **options)

    loop = asyncio.get_running_loop()
    with Hang() as slowness:
        async with slow(library) as link:
            loop.call_later(25.0, slowness.release)
            played = await play(
                link, parts=PARTS, share=0.1, max_loss=0.2, deadline=20.0, engine=Slow(), gpu_price=100.0,
                prefill_cost=PrefillCost(0.0, 0.05),
            )  # fmt: skip
    assert not played.met
    assert played.record.blend.share == 0.1
