"""Planted codes: where they are, what is asked, and how the answer is judged."""

import pytest
import torch

from kvabr.lab.bench.needle import DEPTHS, plant, recall
from kvabr.lab.bench.texts import cut
from kvabr.types.errors import UsageError
from tests.lab.bench.conftest import prose


def test_every_depth_has_a_code_of_its_own_and_the_text_keeps_its_length(tiny, contexts):
    needles = list(plant(tiny, contexts))
    assert len(needles) == DEPTHS * len(contexts)
    places = []
    for needle in needles:
        code, text = tiny.decode(needle.answer), tiny.decode(needle.tokens)
        assert len(code) == 6
        assert code.isdigit()
        assert text.count(code) == 1
        assert len(needle.tokens) == len(needle.context.tokens)
        assert needle.tokens[: needle.at] == needle.context.tokens[: needle.at]
        assert tiny.decode(needle.question).endswith("The secret code is ")
        places.append(text.index("The secret") / len(text))
    assert places[:DEPTHS] == sorted(places[:DEPTHS])
    assert places[0] < 0.1
    assert places[DEPTHS - 1] > 0.65  # the sentence itself takes a quarter of so short a text
    assert len({needle.answer for needle in needles}) == len(needles)
    assert list(plant(tiny, contexts)) == needles
    assert list(plant(tiny, contexts, seed=2)) != needles


def test_a_text_without_room_is_refused(tiny):
    with pytest.raises(UsageError, match="does not fit"):
        list(plant(tiny, cut(tiny, {"a": prose(1)}, 1, 40, 8)))


class Parrot:
    """Says the answer with a given confidence, but for the digits that it is told to miss."""

    def __init__(self, needle, probability, missed=()):
        self.asked, self.probability, self.missed, self.needle = None, probability, missed, needle

    def score(self, kv, tokens):
        self.asked = list(tokens)
        rows = torch.full((len(tokens), 256), 1e-9, dtype=torch.float64)
        first = len(self.needle.question) - 1
        for place, digit in enumerate(self.needle.answer):
            rows[first + place, 0 if place in self.missed else digit] = self.probability
        return rows.log()


def test_the_answer_is_judged_digit_by_digit_behind_the_right_ones(tiny, contexts):
    needle = next(plant(tiny, contexts))
    sure = Parrot(needle, 0.5)
    found = recall(sure, None, needle)
    assert (found.digits, found.whole) == (1.0, True)
    assert found.logprob == pytest.approx(-0.6931, abs=1e-3)
    assert sure.asked == [*needle.question, *needle.answer[:-1]]
    found = recall(Parrot(needle, 0.5, missed=(2, 4)), None, needle)
    assert found.digits == pytest.approx(4 / 6)
    assert not found.whole
    assert found.logprob < -5


def test_the_question_goes_behind_the_cache_that_is_given(tiny, contexts):
    needle = next(plant(tiny, contexts))
    kv = tiny.engine.prefill(needle.tokens)
    before = kv.clone()
    assert recall(tiny.engine, kv, needle) == recall(tiny.engine, kv, needle)
    assert (kv == before).all()
    assert recall(tiny.engine, torch.zeros_like(kv), needle).logprob != recall(tiny.engine, kv, needle).logprob
