"""What a model with windows costs on the wire: hardly more than its share of a cache of all layers in full."""

from __future__ import annotations

import pytest
import torch

from kvabr.codec.base import GroupContext
from kvabr.codec.group import encode_group
from kvabr.types.catalog import Catalog, Track
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import TrackNamespace
from kvabr.types.units import units_of

TOKENS = 4096
LEVELS = ("FP16", "BF16", "FP8", "Int8", "FP4", "Int4")
FULL, WINDOWS = (5, 11, 17), tuple(layer for layer in range(18) if layer % 6 != 5)
GEMMA = KVSpec(
    "google/gemma-3-270m",
    "gemma",
    (
        LayerClass("window", WINDOWS, 1, 256, 256, "bfloat16", window=512),
        LayerClass("full", FULL, 1, 256, 256, "bfloat16"),
    ),
)
"""The shape of Gemma 3 270M."""
SHARE = (len(FULL) * TOKENS + len(WINDOWS) * 512) / (18 * TOKENS)
"""Share of all tokens of all layers that a prompt still sees behind the cache."""


def catalog_of(spec):
    """A catalog with the sizes of real frames: those of plain levels do not depend on what they hold."""
    chunks = tuple(f"{group:064x}" for group in range(spec.groups(TOKENS)))
    sizes = {}
    for number, part in enumerate(spec.parts):
        kv = torch.randn(part.shape(spec.group_tokens), generator=torch.Generator().manual_seed(1))
        context = GroupContext(part, 0, spec.group_tokens, None)
        for level in LEVELS:
            sizes[number, level] = len(encode_group(kv, level, context, chunks[0], 0, ()))
    units = units_of(spec, TOKENS)
    tracks = []
    for level in LEVELS:
        own = tuple(sizes[unit.part, level] for unit in units)
        tracks.append(Track(level, own, (0.0,) * len(own), ("ab" * 32,) * len(own)))
    return Catalog(TrackNamespace(spec.model, chunks[-1]), spec, TOKENS, chunks, tuple(tracks))


def over():
    """Per level, the bytes of a play over the needed share of a cache of all layers in full, less 1."""
    needed = catalog_of(GEMMA).to_play
    full = catalog_of(KVSpec.uniform(GEMMA.model, GEMMA.tokenizer, 18, 1, 256, "bfloat16"))
    return {level: needed.track(level).total_bytes / (SHARE * full.track(level).total_bytes) - 1 for level in LEVELS}


def test_a_play_costs_no_more_than_its_share():
    shares = over()
    print("".join(f"\n{level}: {share:+.3%}" for level, share in shares.items()))
    assert max(shares.values()) < 0.005
    assert min(shares.values()) >= 0
    assert catalog_of(GEMMA).to_play.fp16_bytes == pytest.approx(SHARE * GEMMA.fp16_bytes(TOKENS))
