"""Contexts: where they are cut, and what they may not be cut from."""

from itertools import pairwise

import pytest

from kvabr.lab.bench.texts import DOMAINS, check_unseen, cut, read_texts, token_key
from kvabr.publish.texts import calibration_texts, paragraphs
from kvabr.types.errors import UsageError
from tests.lab.bench.conftest import prose


def test_a_folder_gives_one_text_a_domain_in_the_order_asked_for(texts_folder):
    assert list(read_texts(texts_folder, None)) == [name for name in DOMAINS if name in ("python", "prose")]
    assert list(read_texts(texts_folder, ["prose"])) == ["prose"]


def test_without_a_folder_python_brings_texts():
    texts = read_texts(None, None)
    assert len(texts) >= 2
    check_unseen(texts)


def test_missing_texts_are_told_with_what_fetches_them(texts_folder, tmp_path):
    with pytest.raises(UsageError, match=r"no text for klingon; there is prose, python.*fetch-texts"):
        read_texts(texts_folder, ["prose", "klingon"])
    with pytest.raises(UsageError, match="no such folder"):
        read_texts(tmp_path / "nowhere", None)


def test_texts_of_the_calibration_are_refused():
    seen = paragraphs(calibration_texts()["pydoc"])[7]
    with pytest.raises(UsageError, match="shares 1 paragraphs"):
        check_unseen({"mine": f"something else\n\n{seen}\n\nand more"})
    check_unseen({"mine": seen[:150]})


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


def test_too_short_a_text_and_too_long_a_context_are_refused(tiny):
    with pytest.raises(UsageError, match="too few for 3 contexts of 300"):
        cut(tiny, {"a": "x" * 800}, 3, 290, 10)
    with pytest.raises(UsageError, match=r"more than .* can see"):
        cut(tiny, {"a": "x" * 8000}, 1, 640, 10)


def test_a_key_tells_sequences_apart():
    assert token_key([1, 23]) != token_key([12, 3])
    assert len(token_key([])) == 16
