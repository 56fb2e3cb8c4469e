"""Prompts that are joined from passages: every one at its place, all else computed in order, and never a hole."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.fit import fit
from kvabr.codec.rope import rotate
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.events import PassageRefused
from kvabr.types.passage import Exact, Passage
from tests.client.playing import connection, off_by, play
from tests.client.virtual import virtual
from tests.examples import examples
from tests.memory_transport import Fault, MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyBlendModel, ToyModel, prompt, toy_base, toy_passage

COST = PrefillCost(0.001, 0.0001)
IDS = prompt(200).tokens
SYSTEM, BETWEEN, QUESTION = Exact(IDS[:11]), Exact(IDS[90:93]), Exact(IDS[190:200])
ONE, OTHER, LAYERED, ABSENT = Passage(IDS[11:60]), Passage(IDS[60:90]), Passage(IDS[93:133]), Passage(IDS[140:170])
TINY = Passage(IDS[180:185])
"""Shorter than a group."""
PARTS = (SYSTEM, ONE, ABSENT, OTHER, BETWEEN, ONE, QUESTION)
COVERED = 11 + 49 + 30 + 30 + 3 + 49
WHOLE = [token for part in PARTS for token in part.ids]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("passages")
    profile = fit(SPEC, lambda: iter([ToyModel().prefill(prompt(200).tokens)]))
    toy_passage(root / "one", ONE.ids)
    toy_passage(root / "other", OTHER.ids, fusion=((0.0, 0.02), (0.2, 0.01)))
    toy_passage(root / "layered", LAYERED.ids, ("Int4", "AC-L0", "AC-L1"), profile=profile)
    toy_passage(root / "tiny", TINY.ids)
    toy_passage(root / "salted", ONE.ids, salt=b"secret")
    return PublishedAssets(root)


def wanted(parts, cached, until):
    """The cache of a joined prompt, part by part: passages rotated to their places, all else behind what is there."""
    model, kv, ids, place = ToyModel(), None, [], 0
    for part in parts:
        if part in cached and place:
            new = toy_base(part.ids).kv.clone()
            new[:, 0] = rotate(new[:, 0], SPEC.rope, place)
        else:
            new = model.prefill(part.ids, kv)
        kv = new if kv is None else torch.cat((kv, new), dim=3)
        place, ids = place + len(part.ids), [*ids, *part.ids]
    return kv[:, :, :, :until]


@virtual
async def test_passages_are_placed_and_the_rest_is_computed_in_order(library_origin):
    engine = ToyModel()
    async with library_origin() as link:
        how = {"engine": engine, "prefill_cost": COST, "policy": "fixed:FP16", "tail": 0}
        played = await play(link, parts=PARTS, deadline=2.0, **how)
        assert link.requests == 3 + 4 + 2  # a passage that comes twice is fetched once
    assert played.tokens == COVERED
    assert played.met
    assert played.approximate
    assert played.coverage == ("recomputed", *["FP16"] * 4, "recomputed", *["FP16"] * 2, "recomputed", *["FP16"] * 4)
    assert engine.prefilled == 11 + 30 + 3
    assert off_by(played.kv, wanted(PARTS, {ONE, OTHER}, COVERED)) < 1e-3
    assert played.fusion_loss == pytest.approx(0.05 + 0.02 + 0.05)
    assert played.loss == pytest.approx(0.12, abs=1e-3)
    assert played.lookup_s == pytest.approx(0.02, abs=0.005)  # one round trip for all passages
    assert played.limited_by is None


@virtual
async def test_the_end_of_the_last_passage_is_left_to_the_questions_call(library_origin):
    engine, how = ToyModel(), {"prefill_cost": COST, "policy": "fixed:FP16"}
    async with library_origin() as link:
        whole = await play(link, parts=PARTS, deadline=2.0, engine=engine, tail=0, **how)
        played = await play(link, parts=PARTS, deadline=2.0, engine=engine, tail=40, **how)
    assert (played.tokens, played.tail) == (
        COVERED - 33,
        33,
    )  # the first group of its 49 tokens stays
    assert played.coverage == whole.coverage[:-3]
    assert played.approximate
    assert off_by(played.kv, wanted(PARTS, {ONE, OTHER}, COVERED - 33)) < 1e-3
    assert played.fusion_loss == pytest.approx(0.05 + 0.02 + 0.05 * 16 / 49)
    assert played.loss < whole.loss
    assert played.met
    parts = PARTS[:-1]
    async with library_origin() as link:  # nothing follows
        assert (await play(link, parts=parts, deadline=2.0, engine=engine, tail=40, **how)).tail == 0
        # A tail longer than the passage leaves a group of it.
        played = await play(link, parts=PARTS, deadline=2.0, engine=engine, tail=10_000, **how)
    assert (played.tokens, played.tail) == (COVERED - 33, 33)


@virtual
async def test_what_does_not_come_is_computed_behind_what_is_in_place(library_origin):
    def dead(ask):
        return None if ask.track == "kvabr.catalog" else Fault(stall_after=0)

    async with library_origin(faults=dead) as link:
        played = await play(link, parts=PARTS, deadline=1.0, engine=ToyModel(), prefill_cost=COST)
    assert set(played.coverage) == {"recomputed"}
    assert not played.approximate
    assert (played.loss, played.fusion_loss) == (0.0, 0.0)
    assert off_by(played.kv, ToyModel().prefill(WHOLE)[:, :, :, : played.tokens]) < 1e-3

    def damaged(ask):
        return Fault(corrupt_at=400) if ask.namespace == OTHER.name(SPEC) and ask.track != "kvabr.catalog" else None

    async with library_origin(faults=damaged) as link:
        played = await play(link, parts=PARTS, deadline=1.0, engine=ToyModel(), prefill_cost=COST, gpu_price=100.0)
    assert played.coverage[6:8] == ("recomputed",) * 2
    assert off_by(played.kv, wanted(PARTS, {ONE}, COVERED)) < 0.08
    assert played.approximate
    assert played.fusion_loss == pytest.approx(0.05 + 0.05)


@virtual
async def test_without_any_passage_the_engine_computes_the_prompt(library_origin):
    for parts in ((SYSTEM, ABSENT, QUESTION), (SYSTEM, QUESTION), (ONE, QUESTION)):
        async with library_origin() as link:
            played = await play(link, parts=parts, deadline=2.0, engine=ToyModel(), prefill_cost=COST)
        ids = [token for part in parts for token in part.ids]
        assert played.tokens == len(ids)
        assert not played.approximate
        assert played.loss == 0.0
        assert off_by(played.kv, ToyModel().prefill(ids)) < 1e-3


@virtual
async def test_what_cannot_be_played_in_parts_is_said_at_once(library_origin):
    class Suffix(ToyModel):
        mode = "suffix"

    unrotated = ToyModel(SPEC.changed(rope=None))
    async with library_origin() as link:
        for words, options in (
            ("needs an engine", {}),
            ("needs an engine", {"spec": SPEC}),
            ("any group", {"engine": Suffix(), "prefill_cost": COST}),
            ("any group", {"engine": ToyModel(), "prefill_cost": COST, "mode": "suffix"}),
            ("rotated", {"engine": unrotated, "prefill_cost": COST}),
            ("not both", {"engine": ToyModel(), "prefill_cost": COST, "tokens": (1, 2)}),
        ):
            with pytest.raises(UsageError, match=words):
                await play(link, parts=PARTS, deadline=1.0, **options)
        with pytest.raises(UsageError, match="parts"):
            await play(link, parts=(), deadline=1.0, engine=ToyModel(), prefill_cost=COST)
        assert not link.requests


@examples(15)
@given(st.lists(st.sampled_from([SYSTEM, BETWEEN, QUESTION, ONE, OTHER, TINY, ABSENT]), min_size=1, max_size=7))
def test_any_prompt_of_any_parts_is_placed_as_it_should_be(library, parts):
    cached = {ONE, OTHER, TINY}
    ends = [place for place in range(1, len(parts)) if parts[place] in cached]
    covered = sum(len(part.ids) for part in parts[: ends[-1] + 1 if ends else None])
    events, seen = [], []

    @virtual
    async def check():
        async with MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(1e8, 0.02)) as link:
            options = {"policy": "fixed:FP16", "log": events.append, "watch": seen.append, "tail": 0}
            played = await play(link, parts=parts, deadline=2.0, engine=ToyModel(), prefill_cost=COST, **options)
        assert (played.tokens, played.approximate) == (covered, bool(ends))
        assert off_by(played.kv, wanted(parts, cached, covered)) < 1e-3

    check()
    assert events
    assert seen or not ends


@virtual
async def test_passages_without_a_track_in_common_with_most_are_computed(tmp_path):
    most = (ONE, OTHER)
    for index, (passage, tracks) in enumerate(((TINY, ("FP8",)), (most[0], ("FP16", "Int4")), (most[1], ("FP16",)))):
        toy_passage(tmp_path / str(index), passage.ids, tracks)
    parts, events = (SYSTEM, TINY, *most, Exact(IDS[90:99])), []
    async with connection(PublishedAssets(tmp_path)) as link:
        played = await play(
            link, parts=parts, share=0, deadline=2.0, engine=ToyModel(), prefill_cost=COST, policy="fixed:FP16",
            log=events.append,
        )  # fmt: skip
    assert "FP16" in played.coverage
    assert off_by(played.kv, wanted(parts, set(most), played.tokens)) < 1e-3
    assert [event.passage for event in events if isinstance(event, PassageRefused)] == [TINY.name(SPEC).prompt]


@virtual
async def test_tokens_that_the_model_does_not_have_are_refused_at_once(library_origin):
    engine = ToyBlendModel()
    engine.vocabulary = max(IDS) + 1  # as engines of transformers have it
    async with library_origin() as link:
        for parts, question in ((SYSTEM, ONE, Exact((engine.vocabulary,))), None), ((SYSTEM, ONE), [engine.vocabulary]):
            with pytest.raises(UsageError, match=f"has no token {engine.vocabulary}: its vocabulary ends at"):
                await play(link, parts=parts, question=question, deadline=2.0, engine=engine, prefill_cost=COST)
        assert not link.requests
