"""Every level on every kind of layer class: shapes without a K/V axis, windows, latents and states."""

import pytest
import torch

from kvabr.codec.base import GroupContext, codec, payload_layout
from kvabr.codec.container import object_spans, unpack
from kvabr.codec.group import decode_group, encode_group, payload_of
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import KVSpec, LayerClass
from tests.kvdata import CHUNK, framed, unframed

LEVELS = ("FP16", "BF16", "FP8", "Int8", "FP4", "Int4", "Raw")
TOLERANCE = {"Raw": 2e-2, "FP16": 2e-3, "BF16": 2e-2, "FP8": 0.3, "Int8": 0.03, "FP4": 0.9, "Int4": 0.5}
"""Largest error of standard normal numbers."""


def of(*classes, group_tokens=128):
    return KVSpec("test/model", "tokenizer", classes, group_tokens)


ALONE = {
    "window": of(LayerClass("window", (0, 1), 2, 32, 32, "float16", window=300)),
    "chunked": of(LayerClass("chunked", (0,), 2, 16, 16, "bfloat16", window=256)),
    "wide keys": of(LayerClass("full", (0, 1), 3, 24, 16, "float16")),
    "odd": of(LayerClass("full", (0, 1), 1, 3, 2, "float16")),
    "wide values": of(LayerClass("full", (0,), 2, 8, 160, "float16")),
    "K = V": of(LayerClass("full", (0, 1), 2, 32, 0, "bfloat16")),
    "latent": of(LayerClass("latent", (0, 1, 2), 1, 72, 0, "bfloat16")),
    "odd latent": of(LayerClass("latent", (0, 1), 1, 9, 0, "bfloat16"), group_tokens=33),
    "state": of(LayerClass("state", (0, 2), 4, 24, 16, "float32"), LayerClass("full", (1,), 2, 8, 8, "float16")).parts[
        0
    ],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ALONE)
def test_every_level_carries_every_class(name, level):
    spec = ALONE[name]
    for tokens in (24,) if name == "state" else (128, 77, 1):
        context = GroupContext(spec, 128, tokens)
        kv = torch.randn(spec.shape(tokens), generator=torch.Generator().manual_seed(1))
        (frame,) = framed(kv, level, context)
        layout = payload_layout(level, spec, tokens)
        assert len(payload_of(frame)) == layout.payload_bytes
        assert float((unframed([frame], level, context) - kv).abs().max()) < TOLERANCE[level]
        spans = object_spans(spec, level, 128, tokens, len(frame))
        assert (spans[0].begin, spans[-1].end) == (0, len(frame))


@pytest.mark.parametrize("level", ["Int8", "FP4", "Int4"])
def test_keys_and_values_of_unlike_dims_are_as_good_as_alike(level):
    """The keys lose what they would lose next to values of their own size, and so do the values."""
    keys = torch.randn(2, 2, 128, 32, generator=torch.Generator().manual_seed(1))
    values = torch.randn(2, 2, 128, 64, generator=torch.Generator().manual_seed(2))
    unlike = of(LayerClass("full", (0, 1), 2, 32, 64, "float16"))
    both = torch.cat((keys, values), dim=3)[:, None]
    out = played(both, level, unlike)
    for part, place, one in ((keys, 0, out[:, 0, ..., :32]), (values, 1, out[:, 0, ..., 32:])):
        dim = part.shape[3]
        alike = played(torch.stack((part, part), dim=1), level, KVSpec.uniform("m", "t", 2, 2, dim, "float16"))
        assert torch.equal(one, alike[:, place])


def played(kv, level, spec):
    context = GroupContext(spec, 0, kv.shape[3])
    return unframed(framed(kv, level, context), level, context, torch.empty_like(kv))


@pytest.mark.parametrize("name", ALONE)
def test_raw_is_the_cache_to_the_bit(name):
    spec = ALONE[name]
    kv = torch.randn(spec.shape(24), generator=torch.Generator().manual_seed(1)).mul(1e-4).to(spec.torch_dtype)
    assert torch.equal(played(kv, "Raw", spec), kv)
    context = GroupContext(spec, 0, 24)
    frame = bytearray(encode_group(kv, "Raw", context, CHUNK, 0))
    payload = bytes(payload_of(bytes(frame)))
    assert payload == kv.permute(3, 0, 1, 2, 4).contiguous().view(torch.uint8).numpy().tobytes()
    bad = torch.full_like(kv, float("inf")).permute(3, 0, 1, 2, 4).contiguous().view(torch.uint8).numpy().tobytes()
    with pytest.raises(FormatError, match="not finite"):
        codec("Raw").decode(memoryview(bad), context, torch.empty_like(kv))
    with pytest.raises(FormatError, match="truncated, or of another version"):
        codec("Raw").decode(memoryview(payload[:-1]), context, torch.empty_like(kv))


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize(("level", "most"), [("FP8", 0.04), ("Int8", 0.012)])
def test_small_states_keep_their_precision(level, most, size):
    """Scales are float16, of which numbers this small leave but a few bits."""
    spec = ALONE["state"]
    kv = torch.randn(spec.shape(24), generator=torch.Generator().manual_seed(1)).mul(size)
    assert float((played(kv, level, spec) - kv).norm() / kv.norm()) < most


def test_a_frame_of_one_class_is_refused_under_the_name_of_another():
    spec = of(
        LayerClass("full", (0,), 2, 8, 8, "float16"),
        LayerClass("window", (1,), 2, 8, 8, "float16", window=64),
        LayerClass("window", (2,), 2, 8, 8, "float16", window=64, role="other"),
    )
    kv = torch.zeros(spec.parts[0].shape(128))
    contexts = [GroupContext(part, 0, 128) for part in spec.parts]
    frames = [encode_group(kv, "Int8", context, CHUNK, 0) for context in contexts]
    assert [unpack(frame)[0].track for frame in frames] == ["Int8.full", "Int8.window64", "Int8.window64-other"]
    out = torch.empty_like(kv)
    for mine, context in enumerate(contexts):
        for other, frame in enumerate(frames):
            if mine == other:
                decode_group(frame, "Int8", context, CHUNK, 0, out)
            else:
                with pytest.raises(ForeignError):
                    decode_group(frame, "Int8", context, CHUNK, 0, out)
