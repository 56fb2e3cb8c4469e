"""An asset of random groups with the shape and rates of a real model's AC layers, for timing whole plays."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvabr.codec.ac import payload_head
from kvabr.codec.base import GroupContext
from kvabr.codec.group import framed
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import Index
from kvabr.codec.profile import ClassProfile, Depth
from kvabr.codec.quantiser import RATIO
from kvabr.data import default_catalog
from kvabr.publish.offer import TrackOffer
from kvabr.store.locations import open_store
from kvabr.types.digests import digest_of
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.naming import LAYERS, chain
from kvabr_lab.bench import coder_speed

_NONE_LISTED = bytes(4)
_STEP = 0.1
_DEAD = 0.2


def drawn_spec(shape: coder_speed.CacheShape) -> KVSpec:
    """Return the spec of a cache of this shape."""
    rope = RopeSpec(10000.0, shape.head_dim)
    return KVSpec.uniform(
        f"drawn/{shape.name}", "drawn", shape.layers, shape.kv_heads, shape.head_dim, "bfloat16", rope
    )


def draw_asset(path: Path, shape: coder_speed.CacheShape, tokens: Sequence[int], *, bits: float, depths: int) -> None:
    """Write an asset with the prompt's whole groups to a folder; an existing folder is replaced.

    AC-L0 has about ``bits`` per element; ``depths`` counts all layers.
    """
    spec, tracks = drawn_spec(shape), LAYERS[:depths]
    sample = coder_speed.synthetic(shape, bits, depths, tokens=spec.group_tokens)
    steps = [_STEP / RATIO**depth for depth in range(depths)]
    made = {track: Depth(step, _DEAD, model) for track, step, model in zip(tracks, steps, sample.depths, strict=True)}
    profile = ClassProfile(spec, 0, sample.transform, made)
    offer = TrackOffer(spec, prior=default_catalog(), tracks=tracks, profile=profile, source="drawn numbers")
    chunks = chain(tokens, model=spec.model, tokenizer=spec.tokenizer)

    def coded(group: int) -> list[bytes]:
        # Groups must differ, since equal ones would be transferred once.
        order = np.random.default_rng(group).permutation(spec.group_tokens)
        indices = [np.ascontiguousarray(index[:, order]) for index in sample.indices]
        below: list[Index | None] = [None, *indices]
        return [coder.encode_indices(*each) for each in zip(sample.depths, indices, below, strict=False)]

    with open_store(path).writer(force=True) as writer, ThreadPoolExecutor() as pool:
        frames = offer.encoder(chunks, len(tokens), writer)
        frames.write_profile()
        for group, parts in enumerate(pool.map(coded, range(len(chunks)))):
            for track, part in zip(tracks, parts, strict=True):
                payload = payload_head(part) + _NONE_LISTED + part
                context = GroupContext(spec, group * spec.group_tokens, spec.group_tokens, profile)
                frame = framed(payload, track, context, chunks[group], group)
                digest = digest_of(frame, frames.digest)
                writer.frame(group, track, frame, digest)
                frames.bytes[track][group], frames.digests[track][group] = len(frame), digest
        writer.commit(offer.catalog(frames))
