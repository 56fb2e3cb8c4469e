"""What an asset of plain full attention consists of, to the byte: whatever changes inside, published assets must play.

The AC levels have vectors of their own (`tests.codec.native`): their bytes depend on the processor.
"""

import hashlib
import json
from importlib.resources import files

import pytest
import torch

from kvabr.codec.base import GroupContext
from kvabr.codec.container import object_spans
from kvabr.codec.group import decode_group, encode_group
from kvabr.data import CATALOG, default_catalog
from kvabr.types.kv import KVSpec

PLAIN = {
    "model": "test/model", "tokenizer": "tokenizer", "layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": "float16",
    "rope": {"theta": 10000.0, "rotary_dim": 32, "layout": "half"}, "group_tokens": 128,
}  # fmt: skip
NARROW = PLAIN | {"kv_heads": 3, "head_dim": 6, "dtype": "bfloat16", "rope": None, "group_tokens": 40}
TURNED = {"theta": 5e5, "rotary_dim": 4, "layout": "interleaved", "frequencies": [1.0, 0.00141421356], "factor": 1.25}
SCALED = PLAIN | {"layers": 1, "head_dim": 8, "rope": TURNED}
SPECS = {"plain": PLAIN, "narrow": NARROW, "scaled": SCALED}
CHUNK = "ab" * 32


def sha(data):
    return hashlib.sha256(data).hexdigest()[:16]


def spec(name):
    return KVSpec.from_json(SPECS[name])


def numbers(shape):
    """Whole numbers between -128 and 128 in no order, and one key channel far larger."""
    kv = ((torch.arange(torch.Size(shape).numel()) * 7919 % 257) - 128).float().view(shape)
    kv[:, 0, :, :, 1] *= 16
    return kv


DIGESTS = {
    "plain": "f6b0cf809e36a2c025f36ae93f3dbefe",
    "narrow": "f6cef09205cd57e88617a4500349ee45",
    "scaled": "fcd0988f0b7b0a6e07ef6dd3fdb31bb5",
}
FRAMES = {
    ("plain", "FP16"): (64090, "96454a4c3d566e19", "773acb09dcdaef2f", "2b84ef43464d57a8"),
    ("plain", "BF16"): (64090, "db19b49ce8d3e1eb", "773acb09dcdaef2f", "2b84ef43464d57a8"),
    ("plain", "FP8"): (32601, "6987e09685556213", "dde4c809d9a48772", "e3e7c94c2b2ddd15"),
    ("plain", "Int8"): (33106, "f787f295e7a64646", "7fdca8f2e643ff83", "c02aa6b7feae3dca"),
    ("plain", "FP4"): (17101, "7f05ba122a565ea6", "ccffc387268943f6", "4478f189492bc8ff"),
    ("plain", "Int4"): (17106, "c1d3bea801e61678", "5b553db6237f4275", "d25e5174a2911836"),
    ("narrow", "FP16"): (5418, "ce4cfae11ecbf077", "b5c9fd77b3c5c324", "d9cbd0d15f0830d0"),
    ("narrow", "BF16"): (5418, "2d3120a4dccf7af9", "b5c9fd77b3c5c324", "d9cbd0d15f0830d0"),
    ("narrow", "FP8"): (2897, "0d2bd816c570176c", "fd2eaa12262c26fc", "2d3492dd254922d9"),
    ("narrow", "Int8"): (2938, "af6d0d24b607363e", "1e359a9981d8e716", "964fec2b57013805"),
    ("narrow", "FP4"): (1535, "fc33eceb9cba910a", "e09b8c2db09e03b6", "db51fecc399766fa"),
    ("narrow", "Int4"): (1606, "bc96f0d2e98a9062", "7219ff42f1dd327c", "92810f2d520cc139"),
    ("scaled", "FP16"): (8090, "138f19bef4ceac50", "a94fbb26408713d5", "3e9b35bfd38acde3"),
    ("scaled", "BF16"): (8090, "63ec43464d22e4de", "a94fbb26408713d5", "3e9b35bfd38acde3"),
    ("scaled", "FP8"): (4153, "de91913e13176df1", "eb2f7d4e86473f32", "af77abef39430c08"),
    ("scaled", "Int8"): (4218, "c336020487ef51bf", "98f14e92db8fb846", "2b15b247e225b753"),
    ("scaled", "FP4"): (2216, "fd32482338bb54ed", "20563536295cf922", "67af5c97800f4868"),
    ("scaled", "Int4"): (2218, "ce5b73dd800242a1", "3d6bc09f1a8d4a83", "b1a367c36f7e2985"),
}
"""By spec and track: bytes of a frame, its SHA-256, that of what it decodes to, and that of how it is cut."""


@pytest.mark.parametrize("name", SPECS)
def test_specs_keep_their_json_and_their_digest(name):
    made = spec(name)
    assert json.dumps(made.to_json()) == json.dumps(SPECS[name])
    assert made.digest().hex() == DIGESTS[name]


@pytest.mark.parametrize(("name", "track"), FRAMES)
def test_frames_keep_their_bytes(name, track):
    made = spec(name)
    context = GroupContext(made, made.group_tokens, made.group_tokens - 3)
    kv = numbers(made.shape(context.tokens))
    frame = encode_group(kv, track, context, CHUNK, 1)
    out = torch.empty_like(kv)
    decode_group(frame, track, context, CHUNK, 1, out)
    spans = object_spans(made, track, context.first_token, context.tokens, len(frame))
    cuts = json.dumps([(span.object_id, span.begin, span.end) for span in spans])
    found = (len(frame), sha(frame), sha(out.numpy().tobytes()), sha(cuts.encode()))
    assert found == FRAMES[name, track]


def test_the_shipped_catalog_stays_as_it_is():
    catalog = default_catalog()
    assert catalog.spec.digest().hex() == "286ea2668d7a44faa6e16935bb3fcf8b"
    assert catalog.dumps() == files("kvabr.data").joinpath(CATALOG).read_text()
