"""Prompts with media: their names have the media's digests from the group on that one begins in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.types.errors import UsageError
from kvabr.types.media import MediaTokens, Medium
from kvabr.types.naming import chain, next_digest
from kvabr.types.passage import Exact, Passage

ONE, OTHER = "1" * 64, "2" * 64
NAMED = {"model": "m", "tokenizer": "t", "group_tokens": 8}


@st.composite
def prompts(draw):
    count = draw(st.integers(1, 60))
    places = draw(st.lists(st.integers(0, count), min_size=2, max_size=6, unique=True).map(sorted))
    media = [
        Medium(a, b - a, draw(st.sampled_from((ONE, OTHER)))) for a, b in zip(places[::2], places[1::2], strict=False)
    ]
    return MediaTokens([7] * count, media)


@given(prompts(), st.data())
def test_a_name_tells_of_every_medium_from_where_it_begins(prompt, data):
    plain, named = (chain(each, **NAMED) for each in (prompt.ids, prompt))
    first = min((each.first for each in prompt.media), default=len(prompt)) // 8
    assert named[:first] == plain[:first]
    assert not set(named[first:]) & set(plain)
    changed = data.draw(st.sampled_from(prompt.media)) if prompt.media else None
    if changed is not None:
        for how in ({"digest": "3" * 64}, {"tokens": changed.tokens - 1}, {"tokens": 1, "digest": ONE}):
            new = Medium(**{"first": changed.first, "tokens": changed.tokens, "digest": changed.digest} | how)
            if new.tokens and new != changed:
                other = chain(MediaTokens(prompt.ids, [new if e is changed else e for e in prompt.media]), **NAMED)
                assert other[: changed.first // 8] == named[: changed.first // 8]
                assert not set(other[changed.first // 8 :]) & set(named)


@given(prompts(), st.integers(0, 60))
def test_a_piece_of_a_prompt_has_the_names_of_the_whole(prompt, cut):
    groups = min(cut, len(prompt)) // 8
    assert chain(prompt[: groups * 8], **NAMED) == chain(prompt, **NAMED)[:groups]
    *before, last = chain(prompt, **NAMED)
    if before:
        assert next_digest(before[-1], prompt[len(before) * 8 :]) == last
    assert [*prompt[:groups], *prompt[groups:]] == list(prompt)


@pytest.mark.parametrize(
    ("media", "why"),
    [
        ([Medium(0, 2, "x" * 64)], "64 hex digits, not 'xxx"),
        ([Medium(0, 2, 5)], "64 hex digits, not '5'"),
        ([Medium(0, 0, ONE)], "at least one token"),
        ([Medium(9, 2, ONE)], "lie in the prompt"),
        ([Medium(-4, 4, ONE)], "lie in the prompt"),
        ([Medium(2, 4, ONE), Medium(5, 1, OTHER)], "follow one another"),
        ([Medium(0, 1 << 64, ONE)], "lie in the prompt"),
        ([Medium(0.5, 2, ONE)], "whole numbers"),
        ([Medium(0, "2", ONE)], "whole numbers"),
        ([(0, 2, ONE)], r"a medium is Medium\(first"),
        (None, "whole numbers, and `Medium`s"),
    ],
)
def test_media_that_cannot_be(media, why):
    with pytest.raises(UsageError, match=why):
        MediaTokens(range(9), media)


def test_what_knows_tokens_alone_takes_no_media():
    prompt = MediaTokens(range(9), [Medium(0, 2, ONE)])
    for part in (Exact, Passage):
        with pytest.raises(UsageError):
            part(prompt)
    with pytest.raises(UsageError):
        prompt[::2]
