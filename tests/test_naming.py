import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.errors import FormatError
from kvabr.naming import LEVELS, ROOT, ObjectName, TrackNamespace, chain, check_track_name

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


@given(models, digests, st.sampled_from(LEVELS), st.integers(0, 10**6), st.integers(0, 10**9))
def test_object_path_round_trips(model, prompt, track, group, first):
    name = ObjectName(TrackNamespace(model, prompt), track, group, first)
    assert ObjectName.from_path(name.path()) == name


@given(tokens, tokens)
def test_chain_of_a_prefix_is_a_prefix_of_the_chain(prefix, rest):
    prefix = prefix[: len(prefix) // 8 * 8]
    whole = chain(prefix + rest, model="m", tokenizer="t", group_tokens=8)
    assert chain(prefix, model="m", tokenizer="t", group_tokens=8) == whole[: len(prefix) // 8]


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


def test_short_last_group_differs_from_the_full_one():
    assert chain([1, 2, 3], model="m", tokenizer="t", group_tokens=4) != chain(
        [1, 2, 3, 0], model="m", tokenizer="t", group_tokens=4
    )


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


def test_full_track_name_has_a_limit():
    space = TrackNamespace("m" * 4096, "0" * 64)
    with pytest.raises(FormatError, match="4096"):
        ObjectName(space, "FP16", 0, 0)
