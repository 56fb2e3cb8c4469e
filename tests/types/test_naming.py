import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.media import MediaTokens, Medium
from kvabr.types.naming import (
    LOOSE,
    MAX_FULL_TRACK_NAME,
    MAX_PREFIX_DIGESTS,
    ROOT,
    TrackNamespace,
    akin,
    chain,
    check_track_name,
    next_digest,
    parse_prefix_track,
    prefix_gap,
    prefix_key,
    prefix_positions,
    prefix_track,
    safe_name,
    with_facts,
)
from kvabr.types.passage import Exact, Passage

digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
models = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40).filter(
    lambda m: "//" not in m and not m.startswith("/") and not m.endswith("/")
)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(models, digests)
def test_namespace_round_trips_in_both_forms(model, prompt):
    space = TrackNamespace(model, prompt)
    assert TrackNamespace.from_fields(space.fields()) == space
    assert TrackNamespace.from_fields(space.split_fields()) == space
    assert all(b"/" not in field for field in space.split_fields())


@given(tokens, tokens)
def test_chain_of_a_prefix_is_a_prefix_of_the_chain_and_the_last_digest_follows_from_the_one_before(prefix, rest):
    prefix = prefix[: len(prefix) // 8 * 8]
    whole = chain(prefix + rest, model="m", tokenizer="t", group_tokens=8)
    assert chain(prefix, model="m", tokenizer="t", group_tokens=8) == whole[: len(prefix) // 8]
    if len(whole) > 1:
        assert next_digest(whole[-2], (prefix + rest)[(len(whole) - 1) * 8 :]) == whole[-1]


@given(st.lists(st.integers(0, 50000), min_size=16, max_size=64), st.data())
def test_chain_covers_every_token_before(ids, data):
    place = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[place] += 1
    one = chain(ids, model="m", tokenizer="t", group_tokens=8)
    other = chain(changed, model="m", tokenizer="t", group_tokens=8)
    same = place // 8
    assert one[:same] == other[:same]
    assert all(a != b for a, b in zip(one[same:], other[same:], strict=True))


def test_chain_covers_model_tokenizer_salt_and_group_size():
    ids = list(range(16))
    seen = {
        tuple(chain(ids, model=m, tokenizer=t, salt=s, group_tokens=g))
        for m, t, s, g in [
            ("m", "t", b"", 8),
            ("m2", "t", b"", 8),
            ("m", "t2", b"", 8),
            ("m", "t", b"salt", 8),
            ("mt", "", b"", 8),
            ("m", "t", b"", 4),
        ]
    }
    assert len(seen) == 6


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 65, "a\0b", "é"])
def test_names_that_cannot_be_files_are_refused(name):
    with pytest.raises(FormatError, match="track name"):
        check_track_name(name)


@pytest.mark.parametrize(
    "fields",
    [(), (b"x",), (ROOT.encode(), b"m"), (ROOT.encode(), b"m", b"zz"), (ROOT.encode(), b"\xff", b"0" * 64)],
)
def test_foreign_namespaces_are_refused(fields):
    with pytest.raises(FormatError):
        TrackNamespace.from_fields(fields)


def prompt_digests(groups: int, seed: int = 0) -> list[str]:
    return [hashlib.sha256(f"{seed}/{group}".encode()).hexdigest() for group in range(groups)]


@given(st.integers(1, 5000))
def test_the_name_of_a_lookup_carries_all_digests_or_the_ends_of_runs_and_the_last(groups):
    mine = prompt_digests(groups)
    positions = prefix_positions(1, groups)
    keys = parse_prefix_track(prefix_track(mine))
    assert keys == [prefix_key(mine[group]) for group in positions]
    assert len(keys) <= MAX_PREFIX_DIGESTS
    assert groups == 1 or positions[-1] == groups - 1
    assert groups > MAX_PREFIX_DIGESTS + 1 or list(positions) == list(range(1, groups))
    space = TrackNamespace("m" * 584, mine[0])
    assert space.full_name_bytes(prefix_track(mine)) <= MAX_FULL_TRACK_NAME


@given(st.integers(1, 5000), st.data())
def test_a_second_lookup_settles_any_prompt(groups, data):
    """A server that knows one other prompt, equal up to some group: two lookups find how far exactly."""
    mine = prompt_digests(groups)
    others = [
        mine[:equal] + prompt_digests(20, seed=1 + index)
        for index, equal in enumerate(data.draw(st.lists(st.integers(1, groups), min_size=1, max_size=4)))
    ]

    def ask(track):
        keys = {prefix_key(mine[0]), *parse_prefix_track(track)}
        return max(others, key=lambda other: max(n for n, digest in enumerate(other) if prefix_key(digest) in keys))

    def shared(other):
        return next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), groups)

    best = ask(prefix_track(mine))
    gap = prefix_gap(shared(best), groups)
    if gap:
        assert len(gap) <= MAX_PREFIX_DIGESTS
        best = ask(prefix_track(mine, gap.start, gap.stop))
    assert groups > MAX_PREFIX_DIGESTS + 1 or not gap
    assert shared(best) == max(map(shared, others))


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
def test_any_name_is_a_lookup_or_is_refused(text):
    for name in (text, "prefix." + text):
        try:
            keys = parse_prefix_track(name)
        except FormatError:
            continue
        assert name == "prefix." + base64.urlsafe_b64encode(b"".join(keys)).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "name",
    [
        "", "prefix", "catalog", "prefix.A", "prefix.AA==", "prefix.AAAA", "prefix.AAAAAAAAAAB", "prefix.AAAAAAAAAA+",
        "prefix.AAAAAAAAAA /", "prefix.\n", "prefix.é", "prefix." + "A" * 3424, "prefix." + "A" * (1 << 20),
    ],
)  # fmt: skip
def test_hostile_names_of_lookups_are_refused(name):
    with pytest.raises(FormatError):
        parse_prefix_track(name)
    with pytest.raises(FormatError):
        prefix_track(["0" * 64, "short"])


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
        ([Medium(0, 2, "x" * 64)], "64 hex digits, got 'xxx"),
        ([Medium(0, 2, 5)], "64 hex digits, got '5'"),
        ([Medium(0, 0, ONE)], "at least one token"),
        ([Medium(9, 2, ONE)], "lie in the prompt"),
        ([Medium(-4, 4, ONE)], "lie in the prompt"),
        ([Medium(2, 4, ONE), Medium(5, 1, OTHER)], "not overlap"),
        ([Medium(0, 1 << 64, ONE)], "lie in the prompt"),
        ([Medium(0.5, 2, ONE)], "whole numbers"),
        ([Medium(0, "2", ONE)], "whole numbers"),
        ([(0, 2, ONE)], r"a medium must be Medium\(first"),
        (None, "`Medium` objects as media"),
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


PLAIN = st.from_regex(r"[A-Za-z0-9._-]{1,20}(/[A-Za-z0-9._-]{1,20})?", fullmatch=True)
RAW = st.one_of(st.text(max_size=300), PLAIN, st.text("aA-:@/ .", max_size=8))
FACTS = st.dictionaries(
    st.sampled_from("abc"), st.none() | st.text(max_size=3) | st.lists(st.integers(0, 2), max_size=2)
)


def usual(facts):
    return {key: value for key, value in facts.items() if value not in (None, "", [])}


@given(RAW, RAW)
def test_different_texts_have_different_names(one, other):
    assert (safe_name(one) == safe_name(other)) == (one == other)
    assert (safe_name(one, LOOSE) == safe_name(other, LOOSE)) == (one == other)


@given(RAW)
def test_every_name_names_a_namespace_in_both_forms(raw):
    name = with_facts(safe_name(raw), {"rank": 1})
    space = TrackNamespace(name, "0" * 64)
    assert TrackNamespace.from_fields(space.split_fields()) == space
    longest = f"{name}+layers1000-2000+heads1000-1001,1002-1003"
    KVSpec.uniform(longest, "t", 1, 1, 8, "float16")


@given(PLAIN)
def test_a_plain_name_is_its_own(raw):
    assert safe_name(raw) == raw == with_facts(raw, {"adapter": None, "overrides": {}, "ranks": []})


@given(PLAIN, FACTS, PLAIN, FACTS)
def test_facts_tell_names_apart(name, facts, other, others):
    same = name == other and usual(facts) == usual(others)
    assert (with_facts(name, facts) == with_facts(other, others)) == same


def test_models_that_were_tuned_further_are_akin():
    model, tuned = "llama-0123456789abcdef", with_facts("llama-0123456789abcdef", {"adapter": "x"})
    assert akin(model, tuned)
    assert akin(model, "llama-fedcba9876543210")
    assert not akin(model, "gemma-0123456789abcdef")
