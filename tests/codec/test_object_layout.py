from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.base import GroupContext
from kvabr.codec.container import header_bytes
from kvabr.codec.group import encode_group
from kvabr.codec.object_layout import SLICE_BYTES, ObjectSpan, object_spans, slices
from kvabr.codec.payload_layout import level_layout
from kvabr.types.naming import LEVELS
from tests.kvdata import cache, profile, spec

SEPARABLE = [track for track in LEVELS if track != "AC-5x"]
SMOLLM2, LLAMA = (30, 3, 64), (32, 8, 128)
SIZES = st.tuples(st.integers(1, 80), st.integers(1, 16), st.integers(1, 256))


def check(spans, first_token, tokens, size):
    """What every receiver relies on."""
    assert spans[0].object_id == first_token
    assert [span.begin for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == size
    ids = [span.object_id for span in spans]
    assert ids == sorted(set(ids))
    assert ids[-1] < first_token + tokens


@given(st.sampled_from(SEPARABLE), SIZES, st.integers(1, 300), st.integers(0, 1 << 20))
def test_objects_hold_whole_tokens(track, sizes, tokens, first_token):
    shape = spec(*sizes, group_tokens=300, rope=None)
    layout = level_layout(track, shape, tokens)
    size = header_bytes(track) + layout.payload_bytes
    spans = object_spans(shape, track, first_token, tokens, size)
    check(spans, first_token, tokens, size)
    start = header_bytes(track) + layout.head_bytes
    for span in spans[1:]:
        unit, rest = divmod(span.object_id - first_token, layout.unit_tokens)
        assert rest == 0
        assert span.begin == start + unit * layout.unit_bytes
        assert span.end - span.begin <= max(SLICE_BYTES, layout.unit_bytes)
    assert spans[0].end <= start + max(SLICE_BYTES, layout.unit_bytes)
    # No more objects than it takes: two neighbours would not fit into one.
    assert all(after.end - before.begin + layout.unit_bytes > SLICE_BYTES for before, after in pairwise(spans))


@pytest.mark.parametrize("track", LEVELS)
@pytest.mark.parametrize("tokens", [1, 40, 128])
def test_frames_are_cut_as_they_are_made(track, tokens):
    shape = spec(30, 3, 64)
    side = profile(shape) if track == "AC-5x" else None
    frame = encode_group(cache(shape, tokens), track, GroupContext(shape, 256, tokens, side), "ab" * 32, 2)
    spans = object_spans(shape, track, 256, tokens, len(frame))
    check(spans, 256, tokens, len(frame))
    if side is not None:
        assert spans == slices(256, len(frame))
    else:
        assert len(frame) == header_bytes(track) + level_layout(track, shape, tokens).payload_bytes


@pytest.mark.parametrize(
    ("track", "sizes", "tokens_each"),
    [
        ("FP16", SMOLLM2, 2),
        ("FP8", SMOLLM2, 5),
        ("Int4", SMOLLM2, 11),
        ("FP4", SMOLLM2, 32),
        ("FP16", LLAMA, 1),
        ("Int8", LLAMA, 1),
        ("Int4", LLAMA, 1),
        ("FP4", LLAMA, 32),
    ],
)
def test_runs_grow_as_tokens_shrink(track, sizes, tokens_each):
    shape = spec(*sizes)
    size = header_bytes(track) + level_layout(track, shape, 128).payload_bytes
    ids = [span.object_id for span in object_spans(shape, track, 0, 128, size)]
    assert ids == list(range(0, 128, tokens_each))


def test_what_is_not_of_our_layout_is_sliced():
    shape = spec()
    size = header_bytes("FP16") + level_layout("FP16", shape, 128).payload_bytes
    for track, given_size in (("FP16", size + 1), ("Other", 3 * SLICE_BYTES), ("AC-5x", 100)):
        assert object_spans(shape, track, 128, 128, given_size) == slices(128, given_size)


def test_slices():
    assert slices(7, 0) == (ObjectSpan(7, 0, 0),)
    assert slices(7, SLICE_BYTES) == (ObjectSpan(7, 0, SLICE_BYTES),)
    assert slices(7, SLICE_BYTES + 1)[1:] == (ObjectSpan(8, SLICE_BYTES, SLICE_BYTES + 1),)
