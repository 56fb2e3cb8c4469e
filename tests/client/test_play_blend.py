"""Prompts in parts of which tokens are computed again: which, when, over what, and when that is refused."""

import asyncio

import pytest
import torch

from kvabr.client.engine_work import THREADS
from kvabr.client.options import PlayOptions
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.events import PassageRefused, PlayGaveUp, TokensFailed, TokensStarted
from kvabr.types.passage import Exact, Passage
from tests.client.playing import off_by, play
from tests.client.virtual import Hang, virtual
from tests.toymodel import ToyBlendModel, ToyModel, prompt, toy_passage

COST = PrefillCost(0.001, 0.001)
DEAR = {"prefill_cost": COST, "gpu_price": 100.0}
"""Too dear to compute passages, or any tokens that nobody asks for."""
IDS = prompt(200).tokens
SYSTEM, BETWEEN, QUESTION = Exact(IDS[:11]), Exact(IDS[90:93]), Exact(IDS[190:200])
ONE, OTHER, UNMEASURED = Passage(IDS[11:60]), Passage(IDS[60:90]), Passage(IDS[93:133])
ORDERED = Passage(IDS[133:173])
PARTS = (SYSTEM, ONE, BETWEEN, OTHER, QUESTION)
COVERED = 11 + 49 + 3 + 30
WHOLE = [token for part in PARTS for token in part.ids]
SLOW = {
    "rate": 2e4, "parts": (SYSTEM, ORDERED, ONE, OTHER, QUESTION), "share": 0.1, "deadline": 20.0,
    "prefill_cost": PrefillCost(0.0, 3e-5), "gpu_price": 100.0,
}  # fmt: skip
"""A link on which an engine has time for the publisher's order while the rest comes."""


FUSION = ((0.0, 0.09), (0.1, 0.05), (0.3, 0.04), (1.0, 0.0))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("passages")
    toy_passage(root / "one", ONE.ids, fusion=FUSION)
    toy_passage(root / "other", OTHER.ids, fusion=FUSION)
    toy_passage(root / "unmeasured", UNMEASURED.ids, fusion=())
    toy_passage(root / "ordered", ORDERED.ids, fusion=((0.0, 0.09), (0.15, 0.01)), order=bytes([*range(200, 240)]))
    return PublishedAssets(root)


@pytest.fixture
def played_in_parts(library_origin):
    """Play a prompt in parts, on a link of its own: ``await played_in_parts(share=..., rate=..., ...)``."""

    async def play_it(rate=1e8, **how):
        usual = {"parts": PARTS, "deadline": 5.0, "engine": ToyBlendModel(), **DEAR}
        async with library_origin(rate=rate) as link:
            return await play(link, **usual | how)

    return play_it


@virtual
async def test_the_tokens_that_the_question_asks_for_are_computed_over_the_rest(played_in_parts):
    plain, played = [await played_in_parts(share=share, policy="fixed:FP16") for share in (0, 0.1)]
    at = played.computed_again
    assert len(at) == 8  # a tenth of 79, rounded up
    assert all(11 <= place < 60 or 63 <= place < COVERED for place in at)
    assert plain.computed_again == ()
    untouched = [place for place in range(COVERED) if place not in at]
    assert torch.equal(played.kv[:, :, :, untouched], plain.kv[:, :, :, untouched])
    again = ToyBlendModel().recompute(WHOLE, at, plain.kv)
    torch.testing.assert_close(played.kv[:, :, :, list(at)].float(), again, rtol=1e-2, atol=1e-2)
    assert not torch.equal(played.kv[:, :, :, list(at)], plain.kv[:, :, :, list(at)])
    assert plain.fusion_loss == pytest.approx(0.18)
    assert played.fusion_loss == pytest.approx(0.1)
    assert played.loss == pytest.approx(plain.loss - 0.08)
    assert played.approximate
    record = played.record.blend
    assert (record.share, record.tokens) == (0.1, 8)
    assert played.record.tokens_recomputed == 8 + 11 + 3
    assert record.begun_s <= record.done_s == played.record.delivered_s


@virtual
async def test_all_tokens_are_a_full_prefill(played_in_parts):
    played = await played_in_parts(parts=(SYSTEM, ONE, OTHER, QUESTION), share=1, policy="fixed:FP16")
    assert off_by(played.kv, ToyModel().prefill((*SYSTEM.ids, *ONE.ids, *OTHER.ids))) < 1e-3
    assert played.fusion_loss == 0.0


@virtual
async def test_without_a_share_it_is_what_the_tokens_are_worth(played_in_parts):
    how = {"prefill_cost": PrefillCost(0.001, 0.0005), "policy": "fixed:FP16"}
    for price, share in ((0.0, 1.0), (4.0, 0.1), (20.0, 0.0), (float("inf"), 0.0)):
        assert (await played_in_parts(gpu_price=price, **how)).record.blend.share == share


@virtual
async def test_a_selector_of_ones_own_chooses(library_origin, tmp_path):
    own = tmp_path / "ends.py"
    own.write_text(
        "import torch\nfrom kvabr.blend import Selector\n\nclass Ends(Selector):\n"
        "    def scores(self, prompt):\n        return torch.arange(float(prompt.tokens))\n"
    )
    async with library_origin() as link:
        played = await play(
            link, parts=PARTS, share=0.1, deadline=5.0, engine=ToyBlendModel(), selector=f"{own}:Ends", **DEAR
        )
        assert played.computed_again == tuple(range(COVERED - 8, COVERED))
        with pytest.raises(Exception, match="nonesuch"):
            await play(link, parts=PARTS, deadline=5.0, engine=ToyBlendModel(), selector="nonesuch", **DEAR)


@virtual
async def test_on_a_slow_link_the_publishers_order_is_computed_meanwhile(played_in_parts):
    ahead = tuple(range(11 + 34, 11 + 40))  # the last tokens of the passage, 15 % of them
    events = []
    for share in (0.1, 0.0001):
        played = await played_in_parts(**SLOW | {"share": share}, log=events.append)
        blend = played.record.blend
        assert played.met
        assert blend.ahead == 6
        assert set(ahead) < set(played.computed_again)
        assert len(played.computed_again) == 6 + blend.tokens
        # What was computed is what is in place, whatever came for the group later.
        plain = ToyBlendModel().prefill([*SYSTEM.ids, *ORDERED.ids])[:, :, :, list(ahead)]
        assert off_by(played.kv[:, :, :, list(ahead)], plain) < 0.3
    starts = [event for event in events if isinstance(event, TokensStarted)]
    assert [event.tokens for event in starts if "order" in event.reason] == [6, 6]


@virtual
async def test_what_there_is_no_time_for_is_not_computed(played_in_parts):
    played = await played_in_parts(rate=1e5, share=1, deadline=1.2, prefill_cost=PrefillCost(0.001, 0.02))
    assert played.met
    assert played.record.blend.share < 1


@virtual
async def test_a_loss_above_the_limit_is_computed_instead(played_in_parts):
    for limit, share, refused in ((0.2, 0, False), (0.17, 0, True), (0.12, 0.1, False), (0.09, 0.1, True)):
        events = []
        how = {"share": share, "max_loss": limit, "policy": "fixed:FP16"}
        played = await played_in_parts(**how, tail=0, log=events.append)
        assert played.approximate != refused
        assert any(isinstance(event, PlayGaveUp) for event in events) == refused
        if refused:
            assert "max_loss" in next(event for event in events if isinstance(event, PlayGaveUp)).reason
            assert played.loss == 0.0
            assert off_by(played.kv, ToyModel().prefill(WHOLE)) < 1e-3
        else:
            assert played.loss <= limit
        shorter = await played_in_parts(**how)
        assert shorter.loss <= limit
        assert bool(shorter.tail) == (limit < 0.18)  # of the whole prompt; a tail lowers it


@virtual
async def test_tokens_are_computed_again_in_front_of_a_tail(played_in_parts):
    """Of a passage that is cut, its publisher's order and its loss are cut with it."""
    for more in ({}, {"selector": "order", "deadline": 60.0}):
        one = await played_in_parts(gpu_price=PlayOptions().gpu_price, policy="fixed:FP16", share=0.3, tail=20, **more)
        assert one.tail > 0
        assert one.kv.shape[3] == one.tokens
        assert one.record.blend.share == 0.3
        assert 0 < len(one.computed_again) <= one.tokens
        assert max(one.computed_again) < one.tokens


@virtual
async def test_a_passage_of_unknown_loss_is_computed_unless_any_loss_will_do(played_in_parts):
    parts, events = (SYSTEM, ONE, UNMEASURED, QUESTION), []
    assert (await played_in_parts(parts=parts, share=0, log=events.append)).tokens == 11 + 49
    assert [event.passage for event in events if isinstance(event, PassageRefused)]
    played = await played_in_parts(parts=parts, share=0.1, max_loss=float("inf"))
    assert played.tokens == 11 + 49 + 40
    assert played.fusion_loss is None
    assert len(played.computed_again) == 9


@virtual
async def test_what_cannot_be_computed_again_is_said_at_once(library_origin):
    bare, small = (SYSTEM, ONE, OTHER), ToyBlendModel()
    small.context = 102  # as engines of transformers have it
    async with library_origin() as link:
        for words, engine, how, parts in (
            ("question is empty", ToyBlendModel(), {"question": ()}, PARTS),
            ("single tokens", ToyModel(), {"share": 0.1}, PARTS),
            ("give a question", ToyBlendModel(), {"share": 0.1}, bare),
            ("give share or after", ToyBlendModel(), {"share": 0.1, "after": 1.0}, PARTS),
            ("must be 0 to 1", ToyBlendModel(), {"share": 1.5}, PARTS),
            ("got x", ToyBlendModel(), {"share": "x"}, PARTS),
            ("a sequence of token ids", ToyBlendModel(), {"question": 5}, PARTS),
            ("needs the exact cache", ToyBlendModel(), {"selector": "oracle"}, PARTS),
            ("max_loss", ToyBlendModel(), {"max_loss": -1.0}, PARTS),
            ("token ids", ToyBlendModel(), {"question": "what?"}, PARTS),
            ("from 0 to", ToyBlendModel(), {"question": (3, -1)}, PARTS),
            ("103 tokens in total", small, {}, PARTS),
        ):
            with pytest.raises(UsageError, match=words):
                await play(link, parts=parts, deadline=1.0, engine=engine, **how, **DEAR)
        with pytest.raises(UsageError, match="in parts"):
            await play(link, WHOLE, share=0.1, deadline=1.0, engine=ToyBlendModel(), **DEAR)
        assert not link.requests
        played = await play(link, parts=bare, question=(1, 2), share=0.1, deadline=5.0, engine=ToyBlendModel(), **DEAR)
        assert len(played.computed_again) == 8
        played = await play(link, parts=bare, deadline=5.0, engine=ToyBlendModel(), **DEAR)
        assert played.computed_again == ()


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
@virtual
async def test_a_cache_is_whole_after_a_fault_of_the_engine(played_in_parts, how, nth):
    events, engine = [], Faulty(how, nth)
    played = await played_in_parts(**SLOW, engine=engine, log=events.append)
    assert engine.calls > nth
    assert bool(torch.isfinite(played.kv).all())
    assert played.met
    assert sum(isinstance(event, TokensFailed) for event in events) == 1
    assert played.record.blend.share == 0.0
    assert len(played.computed_again) == (6 if nth else 0)


@virtual
async def test_an_engine_that_cannot_choose_leaves_the_cache_as_it_was_joined(played_in_parts):
    class NoAttention(ToyBlendModel):
        def attention(self, *_, **__):
            raise RuntimeError("out of memory")

    events = []
    played = await played_in_parts(share=0.3, engine=NoAttention(), log=events.append)
    assert played.computed_again == ()
    assert played.fusion_loss == pytest.approx(0.18)
    assert bool(torch.isfinite(played.kv).all())
    assert any(isinstance(event, TokensFailed) for event in events)


@virtual
async def test_of_an_engine_that_hangs_the_joined_cache_is_handed_over_by_the_deadline(played_in_parts):
    with Hang() as hang:

        def hanging(made):
            hang.wait()
            return made

        played = await asyncio.wait_for(played_in_parts(**SLOW, engine=Faulty(hanging, 1)), 60.0)
        kept = played.kv.clone()
        assert len(played.computed_again) == 6
        assert played.met
        assert played.record.blend.share == 0.0
    for thread in list(THREADS):
        await asyncio.to_thread(thread.wait, 300.0)
    assert torch.equal(played.kv, kept)


@virtual
async def test_a_cache_that_would_lose_too_much_waits_for_the_tokens_of_a_slow_engine(played_in_parts):
    class Slow(ToyBlendModel):
        def recompute(self, *arguments, **options):
            slowness.wait()
            return super().recompute(*arguments, **options)

    loop = asyncio.get_running_loop()
    with Hang() as slowness:
        loop.call_later(25.0, slowness.release)
        played = await played_in_parts(**SLOW | {"prefill_cost": PrefillCost(0.0, 0.05)}, max_loss=0.2, engine=Slow())
    assert not played.met
    assert played.record.blend.share == 0.1
