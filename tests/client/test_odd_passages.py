"""Prompts of passages that are unusual, and still played: short ones, one many times, and nothing but passages."""

from __future__ import annotations

from functools import partial

import pytest

from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.passage import Exact, Passage
from tests.client.playing import play
from tests.client.test_play_passages import COST, off_by, wanted
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyModel, prompt, toy_passage

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
    async with MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(1e8, 0.02)) as link:
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
