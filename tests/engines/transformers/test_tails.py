"""Losses behind tails of models with windows and with states, and answers of an engine that generates."""

from __future__ import annotations

import pytest

from kvabr.publish.encoder import compute_cache, publish
from kvabr.publish.frames import MemoryFrames
from kvabr.publish.model import answer_of, score_classes
from kvabr.store.prompt import Prompt
from tests.engines.transformers.text import IDS
from tests.engines.transformers.tiny import tiny

pytestmark = pytest.mark.model

QUESTION = IDS[300:307]


@pytest.mark.parametrize(("name", "tails"), [("Gemma3", (9, 133)), ("Qwen3-Next", (9,))])
def test_what_is_left_is_measured_as_far_as_a_tail_can_be_computed(name, tails):
    engine = tiny(name)
    exact = compute_cache(engine, IDS[:200])
    said = answer_of(engine, exact, QUESTION, 8)
    scores = score_classes(engine, exact, [*QUESTION, *said])[len(QUESTION) - 1 : -1]
    taken = scores.gather(1, scores.new_tensor(said).long()[:, None])[:, 0]
    assert (scores.max(dim=1).values - taken).max() < 1e-3  # the likeliest, but for rounding
    prompt = Prompt(tuple(IDS[:200]), tuple(IDS[200:230]))
    catalog = publish(engine, prompt, ("BF16", "Int4", "FP4"), None, MemoryFrames(), questions=[QUESTION, IDS[400:407]])
    for track in catalog.tracks:
        assert tuple(tail.tokens for tail in track.tails) == tails
        assert all(tail.spread > 0 for tail in track.tails)
    assert catalog.asked == ()  # of several layer classes
    int4 = catalog.track("Int4")
    assert catalog.behind(len(catalog.chunks), 9).track("Int4").total_loss == pytest.approx(
        sum(catalog.to_play.track("Int4").loss) * int4.tails[0].share
    )
