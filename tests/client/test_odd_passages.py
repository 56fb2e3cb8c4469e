"""Prompts of passages that are unusual, and still played: short ones, one many times, and nothing but passages."""

from __future__ import annotations

import pytest

from kvabr.server.published_assets import PublishedAssets
from kvabr.types.errors import UsageError
from kvabr.types.events import PassageRefused
from kvabr.types.passage import Exact, Passage
from tests.client.playing import connection, play
from tests.client.test_play_passages import COST, off_by, wanted
from tests.client.virtual import virtual
from tests.toymodel import SPEC, ToyBlendModel, ToyModel, prompt, toy_passage

IDS = prompt(120).tokens
BEGIN, TOKEN, SHORT, LONG = Exact(IDS[:7]), Passage(IDS[7:8]), Passage(IDS[8:13]), Passage(IDS[13:60])
CACHED = {TOKEN, SHORT, LONG}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("odd")
    for index, passage in enumerate((TOKEN, SHORT, LONG)):
        assert index == 2 or len(passage.ids) < SPEC.group_tokens
        toy_passage(root / str(index), passage.ids)
    return PublishedAssets(root)


@virtual
async def check(library, parts, joined):
    async with connection(library) as link:
        played = await play(link, parts=parts, deadline=2.0, engine=ToyModel(), prefill_cost=COST, policy="fixed:FP16")
    tokens = sum(len(part.ids) for part in parts)
    assert played.tokens == tokens
    assert off_by(played.kv, wanted(parts, CACHED, tokens)) < 1e-3
    assert played.fusion_loss == pytest.approx(0.05 * joined)
    assert played.approximate


def test_a_passage_that_is_shorter_than_a_group(library):
    check(library, (BEGIN, SHORT, TOKEN), 2)


def test_the_same_passage_many_times_in_a_row(library):
    check(library, (BEGIN, *(SHORT,) * 5, LONG, LONG), 7)


def test_a_prompt_of_nothing_but_one_passage_begins_with_a_computed_one(library):
    check(library, (LONG, LONG, LONG), 2)


@virtual
async def test_passages_without_a_track_in_common_with_most_are_computed(tmp_path):
    most = (Passage(IDS[13:60]), Passage(IDS[60:90]))
    for index, (passage, tracks) in enumerate(((SHORT, ("FP8",)), (most[0], ("FP16", "Int4")), (most[1], ("FP16",)))):
        toy_passage(tmp_path / str(index), passage.ids, tracks)
    parts, events = (BEGIN, SHORT, *most, Exact(IDS[90:99])), []
    async with connection(PublishedAssets(tmp_path)) as link:
        played = await play(
            link, parts=parts, share=0, deadline=2.0, engine=ToyModel(), prefill_cost=COST, policy="fixed:FP16",
            log=events.append,
        )  # fmt: skip
    assert "FP16" in played.coverage
    assert off_by(played.kv, wanted(parts, set(most), played.tokens)) < 1e-3
    assert [event.passage for event in events if isinstance(event, PassageRefused)] == [SHORT.name(SPEC).prompt]


@virtual
async def test_tokens_that_the_model_does_not_have_are_refused_at_once(library):
    engine = ToyBlendModel()
    engine.vocabulary = max(IDS) + 1  # as engines of transformers have it
    async with connection(library) as link:
        for parts, question in ((BEGIN, LONG, Exact((engine.vocabulary,))), None), ((BEGIN, LONG), [engine.vocabulary]):
            with pytest.raises(UsageError, match=f"has no token {engine.vocabulary}: its vocabulary ends at"):
                await play(link, parts=parts, question=question, deadline=2.0, engine=engine, prefill_cost=COST)
        assert not link.requests
