"""Contexts: where they are cut, what they may not be cut from, and the codes planted in them."""

import zlib
from itertools import pairwise
from types import SimpleNamespace

import pytest

from kvabr.codec.calibration_fingerprint import Seen
from kvabr.publish.texts import calibration_texts, paragraphs
from kvabr.types.errors import UsageError
from kvabr_lab.bench.contexts import (
    DEPTHS,
    Context,
    check_unseen,
    chosen,
    cut,
    plant,
    seen_sentence,
    seen_shares,
)
from kvabr_lab.bench.repeated_texts import repeated_texts
from tests.lab.bench.conftest import prose

pytestmark = pytest.mark.slow


def test_repeated_texts_are_the_same_every_time_and_compress_well():
    texts = repeated_texts()
    assert texts == repeated_texts()
    for name, text in texts.items():
        assert len(zlib.compress(text.encode())) < len(text) / (1.5 if name == "hexdump" else 4), name
    assert list(chosen(texts, ["base64", "one-word"])) == ["base64", "one-word"]
    with pytest.raises(UsageError, match="no text for python; available: one-word, line-breaks"):
        chosen(texts, ["python"])


def test_texts_of_the_calibration_are_refused():
    seen = paragraphs(calibration_texts()["pydoc"])[7]
    with pytest.raises(UsageError, match="shares 1 paragraphs"):
        check_unseen({"mine": f"something else\n\n{seen}\n\nand more"})
    check_unseen({"mine": seen[:150]})


def test_contexts_that_a_calibration_has_seen_are_named():
    tokens = tuple(range(1200))
    contexts = [Context("a", index, tokens[400 * index : 400 * index + 300], ()) for index in range(3)]
    some = Seen.of({"t": "text"}, [("t", tokens[:510])])
    other = Seen.of({"t": "text"}, [("t", range(3000, 3200))])
    profiles = [SimpleNamespace(seen=some), SimpleNamespace(seen=other)]
    shares = seen_shares(contexts, profiles)
    assert shares["a-0"] == 1.0
    assert 0 < shares["a-1"] < 1
    assert shares["a-2"] == 0.0
    assert seen_sentence(shares).startswith("used by the calibration, so their results do not count: a-0 100%, a-1 ")
    assert "a-2" not in seen_sentence(shares)
    assert seen_sentence(seen_shares(contexts, profiles[1:])).startswith("no context is in the texts")
    unknown = seen_shares(contexts, [*profiles, SimpleNamespace(seen=None)])
    assert set(unknown.values()) == {None}
    assert "not known" in seen_sentence(unknown)


def test_contexts_are_spread_over_the_text_and_do_not_overlap(tiny):
    ids = tiny.encode(prose(1))
    made = cut(tiny, {"a": prose(1)}, 4, 100, 20)
    starts = []
    for one in made:
        whole = [*one.tokens, *one.continuation]
        assert (len(one.tokens), len(one.continuation)) == (100, 20)
        starts.append(next(n for n in range(len(ids)) if ids[n : n + 120] == whole))
    gaps = [after - before for before, after in pairwise(starts)]
    assert min(gaps) >= 120
    assert max(gaps) - min(gaps) <= 1
    assert starts[0] > 0
    assert starts[-1] + 120 < len(ids)
    assert [one.name for one in made] == ["a-0", "a-1", "a-2", "a-3"]


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
