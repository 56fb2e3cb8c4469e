"""Losses behind tails: what is measured, of which tracks, and what the catalog keeps of it."""

import math
from statistics import fmean, stdev

import pytest
import torch

from kvabr.publish import tails
from kvabr.publish.encoder import publish
from kvabr.publish.frames import FrameEncoder, MemoryFrames
from kvabr.publish.model import answer_of
from kvabr.publish.reference import Reference
from kvabr.publish.tails import TailMeter, answered
from kvabr.types.catalog import Catalog
from tests.toymodel import ToyModel, prompt

QUESTIONS = ([5, 17, 60], [9, 3, 88, 21, 40, 2])
TRACKS = ("FP16", "Int8", "Int4", "FP4")


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch):
    monkeypatch.setattr(tails, "TAILS", (4, 20, 40, 500))
    monkeypatch.setattr(tails, "ANSWER_TOKENS", 5)


def made(questions=QUESTIONS, **options) -> Catalog:
    return publish(ToyModel(), prompt(), TRACKS, None, MemoryFrames(), questions=questions, **options)


def test_an_answer_is_what_the_exact_cache_would_say():
    model, text = ToyModel(), prompt()
    exact, question = model.prefill(text.tokens), QUESTIONS[0]
    said = answer_of(model, (exact,), question, 5)
    every = model.score(exact, [*question, *said])
    assert said == every[len(question) - 1 : -1].argmax(dim=1).tolist()


def test_only_what_is_said_behind_a_question_is_compared():
    model, text = ToyModel(), prompt()
    exact = model.prefill(text.tokens)
    [one, _] = answered(model, (exact,), QUESTIONS)
    assert (one.question_tokens, len(one.continuation)) == (3, 8)
    scored = one.score((exact,))
    assert len(scored) == 6  # behind the question, and behind each token of the answer
    assert torch.equal(scored, model.score(exact, one.continuation)[2:])
    assert one.compared(scored).kl == 0


def test_each_kind_of_continuation_counts_and_their_spread_is_kept():
    model, text = ToyModel(), prompt()
    exact = model.prefill(text.tokens)
    reference, asked = Reference(model, exact, text.continuation), answered(model, (exact,), QUESTIONS)
    meter = TailMeter(reference, asked, text.tokens)
    assert meter.lengths == (20, 40)  # the prompt has 70 tokens
    worse = {"little": exact * 1.05, "much": exact * 1.2}
    losses = {track: reference.measure(kv).loss for track, kv in worse.items()}
    for track, kv in worse.items():
        meter.near(track, kv, reference.score(kv))
    steps = []
    meter.far(lambda track: (worse[track],), lambda: steps.append(1))
    assert len(steps) == meter.caches == 4
    found = meter.tails(losses | {"nearly exact": 1e-9})
    assert found["nearly exact"] == found["little"]
    for track, kv in worse.items():
        first, second, third = found[track]
        assert (first.tokens, second.tokens, third.tokens) == (4, 23, 43)  # of 3, 6 and 4; of 23, 26 and 20; ...
        by_hand = [one.measure(kv).loss for one in asked] + [reference.compared(reference.score(kv), 4).loss]
        assert first.share * losses[track] == pytest.approx(math.exp(fmean(map(math.log, by_hand))))
        assert first.spread == pytest.approx(stdev(map(math.log, by_hand)))
        computed = model.prefill(text.tokens[-20:], kv[:, :, :, :-20])
        whole = torch.cat((kv[:, :, :, :-20], computed), dim=3)
        by_hand = [one.measure(whole).loss for one in (*asked, reference)]
        assert second.share * losses[track] == pytest.approx(math.exp(fmean(map(math.log, by_hand))))


def test_the_catalog_says_what_is_left_on_every_track():
    catalog = made()
    assert Catalog.loads(catalog.dumps()) == catalog
    for track in catalog.tracks:
        assert [tail.tokens for tail in track.tails] == [4, 23, 43]
        assert all(tail.spread > 0 for tail in track.tails)
    int4 = catalog.track("Int4")
    assert catalog.with_tail(5, 4).track("Int4").total_loss == pytest.approx(int4.tails[0].share * int4.total_loss)


def test_the_catalog_says_which_groups_questions_are_about():
    catalog, model, text, store = made(), ToyModel(), prompt(), MemoryFrames()
    assert len(catalog.asked) == catalog.groups
    assert sum(catalog.asked) == pytest.approx(1.0)
    exact = model.prefill(text.tokens)
    frames = FrameEncoder(model.spec, catalog.chunks, len(text.tokens), TRACKS, None, store)
    frames.encode((exact,))
    worst = max(catalog.tracks, key=lambda track: track.measured.kl).name
    one, lost = answered(model, (exact,), QUESTIONS)[1], []
    for group in range(catalog.groups):
        coded, (first, last) = exact.clone(), model.spec.group_range(group, len(text.tokens))
        frames.decode(group, worst, coded[:, :, :, first:last])
        lost.append(one.measure(coded).loss)
    assert sorted(range(catalog.groups), key=lost.__getitem__) == sorted(
        range(catalog.groups), key=catalog.asked.__getitem__
    )


def test_questions_that_do_not_fit_the_model_are_left_out():
    class Words:
        engine = ToyModel()

        def encode(self, text):
            return list(range(len(text.split())))

    every = [len(each.split()) for each in tails.QUESTIONS]
    Words.engine.context = 100
    assert [len(ids) for ids in tails.questions(Words())] == every
    assert [len(ids) for ids in tails.questions(Words(), 100 - 5 - min(every))] == [min(every)]
    assert tails.questions(Words(), 99) == []
