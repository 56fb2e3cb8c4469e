import dataclasses
import hashlib
import tracemalloc
import zlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.base import GroupContext, codec, payload_layout
from kvabr.codec.container import (
    MAX_PAYLOAD,
    SLICE_BYTES,
    VERSION,
    FrameHeader,
    ObjectSpan,
    header_bytes,
    object_spans,
    pack,
    slices,
    unpack,
)
from kvabr.codec.group import decode_group, encode_group, payload_of
from kvabr.codec.profile import Profile
from kvabr.codec.sample_frames import CHUNK, SampleFrames
from kvabr.data import default_catalog, default_profile_bytes
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.naming import LEVELS
from tests.examples import examples
from tests.kvdata import cache, profile, spec

FIELDS = {"track": "Int4", "spec_digest": b"s" * 16, "chunk": "cd" * 32, "group": 3, "first_token": 384, "tokens": 128}
SHAPE = spec(1, 2, 32)
SIDE = profile(SHAPE)
CONTEXT = GroupContext(SHAPE, 0, 20, SIDE)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FRAMES = {track: encode_group(cache(SHAPE, 20), track, CONTEXT, "ab" * 32, 0) for track in LEVELS}


@given(st.binary(max_size=300))
def test_round_trip_without_a_copy(payload):
    frame = pack(payload, FrameHeader(**FIELDS))
    header, view = unpack(frame)
    assert bytes(view) == payload
    assert dataclasses.asdict(header) == FIELDS | {"payload_bytes": len(payload)}
    assert view.obj is frame


@given(st.binary(min_size=1, max_size=100), st.data())
def test_every_truncation_and_every_flipped_bit_is_found(payload, data):
    frame = pack(payload, FrameHeader(**FIELDS))
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(FormatError):
        unpack(frame[:cut])
    with pytest.raises(FormatError):
        unpack(frame + b"\0")
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    flipped = bytearray(frame)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        unpack(flipped)


@given(st.binary(max_size=400))
def test_garbage_is_refused(data):
    with pytest.raises(FormatError):
        unpack(data)


@pytest.mark.parametrize(("at", "size", "value"), [(66, 4, 0), (70, 8, MAX_PAYLOAD + 1)], ids=["tokens", "payload"])
def test_a_header_that_no_encoder_writes_is_refused(at, size, value):
    """Also if its checksum is right."""
    frame = bytearray(pack(b"", FrameHeader(**FIELDS)))
    frame[at : at + size] = value.to_bytes(size, "little")
    frame[-4:] = zlib.crc32(frame[:-4]).to_bytes(4, "little")
    with pytest.raises(FormatError, match="must have at least 1 token"):
        unpack(frame)


def test_frames_of_other_versions_say_what_to_do():
    frame = bytearray(pack(b"x", FrameHeader(**FIELDS)))
    frame[4] = VERSION + 1
    with pytest.raises(FormatError, match=f"version {VERSION + 1}, .* upgrade"):
        unpack(frame)


def test_the_digest_is_compared_and_errors_say_the_nearest_cause():
    frame = pack(b"payload", FrameHeader(**FIELDS))
    header, _ = unpack(frame)
    digest = hashlib.sha256(frame).hexdigest()
    assert unpack(frame, header, digest)[1] == b"payload"
    lie = pack(b"paylord", FrameHeader(**FIELDS))
    with pytest.raises(FormatError, match="SHA-256"):
        unpack(lie, header, digest)
    with pytest.raises(FormatError, match="corrupt"):
        unpack(frame[:-1] + b"x", header, digest)
    with pytest.raises(ForeignError, match="group"):
        unpack(pack(b"payload", FrameHeader(**FIELDS | {"group": 4})), header, digest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"track": "Int8"}, "track"),
        ({"spec_digest": b"t" * 16}, "model"),
        ({"chunk": "ef" * 32}, "prompt"),
        ({"group": 4}, "group"),
        ({"first_token": 0}, "first token"),
        ({"tokens": 127}, "tokens"),
    ],
)
def test_a_good_frame_of_something_else_is_foreign(change, words):
    header, _ = unpack(pack(b"x", FrameHeader(**FIELDS)))
    frame = pack(b"x", FrameHeader(**(FIELDS | change)))
    with pytest.raises(ForeignError, match=words):
        unpack(frame, header)


@examples(150)
@given(st.sampled_from(LEVELS), st.data())
def test_mutilated_payloads_decode_to_finite_numbers_or_are_refused(track, data):
    _, view = unpack(FRAMES[track])
    payload = bytearray(view)
    for _ in range(data.draw(st.integers(1, 5))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))] if data.draw(st.booleans()) else payload
    out = torch.zeros(SHAPE.shape(20), dtype=data.draw(st.sampled_from(DTYPES)))
    try:
        codec(track).decode(memoryview(payload), CONTEXT, out)
    except FormatError:
        return
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize(
    "change",
    [
        {"track": "no/slash"}, {"spec_digest": b"short"}, {"chunk": "cd" * 31}, {"chunk": "CD" * 32},
        {"chunk": "cd " * 32}, {"group": -1}, {"group": 1 << 32}, {"first_token": -1}, {"tokens": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_frame_can_hold_is_refused(change):
    with pytest.raises(FormatError):
        pack(b"x", FrameHeader(**(FIELDS | change)))


SEPARABLE = [track for track in LEVELS if track != "AC-5x"]
SIZES = st.tuples(st.integers(1, 80), st.integers(1, 16), st.integers(1, 256))


def check(spans, first_token, tokens, size):
    assert spans[0].object_id == first_token
    assert [span.begin for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == size
    ids = [span.object_id for span in spans]
    assert ids == sorted(set(ids))
    assert ids[-1] < first_token + tokens


@given(st.sampled_from(SEPARABLE), SIZES, st.integers(1, 300), st.integers(0, 1 << 20))
def test_objects_hold_whole_tokens(track, sizes, tokens, first_token):
    shape = spec(*sizes, group_tokens=300, rope=None)
    layout = payload_layout(track, shape, tokens)
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
    # No more objects than necessary: two neighbours do not fit into one.
    assert all(after.end - before.begin + layout.unit_bytes > SLICE_BYTES for before, after in pairwise(spans))


def test_what_is_not_of_our_layout_is_sliced():
    shape = spec()
    size = header_bytes("FP16") + payload_layout("FP16", shape, 128).payload_bytes
    for track, given_size in (("FP16", size + 1), ("Other", 3 * SLICE_BYTES), ("AC-5x", 100)):
        assert object_spans(shape, track, 128, 128, given_size) == slices(128, given_size)


def test_slices_take_no_memory():
    size = (1 << 32) + 1
    tracemalloc.start()
    spans = slices(128, size)
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()
    assert len(spans) == (1 << 16) + 1
    whole, rest = spans[-2:]
    assert whole == ObjectSpan(127 + (1 << 16), size - 1 - SLICE_BYTES, size - 1)
    assert rest == ObjectSpan(128 + (1 << 16), size - 1, size)
    assert list(slices(128, 0)) == [ObjectSpan(128, 0, 0)]
    with pytest.raises(IndexError):
        spans[len(spans)]


def test_they_decode_and_are_as_large_as_real_ones() -> None:
    catalog, profile = default_catalog(), Profile.from_bytes(default_profile_bytes())
    tokens = catalog.spec.group_tokens
    sample = SampleFrames(GroupContext(catalog.spec, tokens, tokens, profile))
    for track in catalog.tracks:
        frame, lower, below = sample.frame(track.name), track, []
        while lower.refines is not None:
            lower = catalog.track(lower.refines)
            below.insert(0, payload_of(sample.frame(lower.name)))
        out = torch.full(catalog.spec.shape(tokens), float("nan"), dtype=torch.float16)
        decode_group(frame, track.name, sample.context, CHUNK, 0, out, below)
        assert bool(torch.isfinite(out).all())
        # Source code takes fewer bits than the texts that the tables are of, and its tokens refer to others.
        assert len(frame) == pytest.approx(track.total_bytes / catalog.groups, rel=0.25), track.name
        again = SampleFrames(GroupContext(catalog.spec, tokens, tokens, profile))
        assert track.name != "AC-L3" or again.frame(track.name) == frame
