"""Packed caches: every byte comes back on Raw, nothing else codes them, and a spec says how they are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvabr.codec.base import GroupContext, names
from kvabr.codec.columns import has_ac
from kvabr.codec.group import decode_group, decode_payload, encode_group, encode_payload
from kvabr.codec.quantised import check_wanted
from kvabr.publish.encoder import RAW, needs_raw, ordered_tracks
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import KVSpec, LayerClass

PACKED = LayerClass("full", (0, 1), 3, 20, 0, "uint8", packing="vllm-0.32,sm100,FLASHINFER:nvfp4,block=16")
SPEC = KVSpec("m", "t", (PACKED,), 16)
CHUNK = "0" * 64


def group(tokens=16):
    return torch.arange(2 * 3 * tokens * 20).reshape(2, 1, 3, tokens, 20).to(torch.uint8)


@pytest.mark.parametrize("tokens", [16, 5])
def test_every_byte_comes_back(tokens):
    kv, context = group(tokens), GroupContext(SPEC, 0, tokens)
    frame = encode_group(kv.transpose(2, 3).contiguous().transpose(2, 3), "Raw", context, CHUNK, 0)
    assert len(frame) < kv.numel() + 300
    out = torch.zeros_like(kv)
    decode_group(frame, "Raw", context, CHUNK, 0, out)
    assert torch.equal(out, kv)
    numbers = GroupContext(replace(SPEC, classes=(replace(PACKED, dtype="float16", packing=""),)), 0, tokens)
    coded = encode_payload(torch.zeros(kv.shape), "Int4", numbers)
    with pytest.raises(FormatError, match="only Raw carries it"):
        decode_payload(memoryview(coded), "Int4", context, 0, out)


def test_nothing_else_reads_or_codes_them():
    context = GroupContext(SPEC, 0, 16)
    for track in ("FP16", "Int8", "AC-5x"):
        with pytest.raises(FormatError, match="only Raw carries it"):
            encode_group(group(), track, context, CHUNK, 0)
    frame = encode_group(group(), "Raw", context, CHUNK, 0)
    for dtype in (torch.float32, torch.float8_e4m3fn):
        with pytest.raises(FormatError, match="is kept in uint8"):
            decode_group(frame, "Raw", context, CHUNK, 0, torch.zeros(group().shape, dtype=dtype))
        with pytest.raises(UsageError, match="only the engine that packed"):
            check_wanted(dtype, SPEC)
    numbers = KVSpec.uniform("m", "t", 2, 3, 10, "float16", group_tokens=16)
    with pytest.raises(FormatError, match="is kept in float16"):
        encode_group(torch.zeros(numbers.shape(16), dtype=torch.uint8), "Raw", GroupContext(numbers, 0, 16), CHUNK, 0)
    assert (needs_raw(SPEC), has_ac(SPEC)) == (True, False)
    assert ordered_tracks(None, SPEC) == (RAW,)
    assert RAW in names()


def test_a_spec_says_how_they_are_packed():
    assert KVSpec.from_json(SPEC.to_json()) == SPEC
    assert "3 x 20 bytes per token, vllm-0.32" in SPEC.summary
    other = replace(SPEC, classes=(replace(PACKED, packing="other"),))
    assert other.digest() != SPEC.digest()
    plain = replace(SPEC, classes=(LayerClass("full", (0, 1), 3, 20, 0, "float16"),))
    assert (SPEC.with_dtypes(plain), plain.with_dtypes(SPEC), SPEC.with_dtypes(other)) == (SPEC, plain, SPEC)
    for change, what in (
        ({"packing": ""}, "must say how it is packed"),
        ({"dtype": "float16"}, "and no other does"),
        ({"packing": "a b"}, "at most 128 letters"),
        ({"v_dim": 20}, "one vector of bytes"),
        ({"packing": 3}, "must say how"),
    ):
        with pytest.raises(FormatError, match=what):
            replace(PACKED, **change)
