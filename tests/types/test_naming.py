import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.types.errors import FormatError
from kvabr.types.naming import (
    MAX_FULL_TRACK_NAME,
    MAX_PREFIX_DIGESTS,
    ROOT,
    TrackNamespace,
    chain,
    check_track_name,
    next_digest,
    parse_prefix_track,
    prefix_gap,
    prefix_key,
    prefix_positions,
    prefix_track,
)

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
