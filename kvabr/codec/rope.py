"""The rotary position embedding of keys, applied and undone (RoFormer; Su et al., 2021).

Without it, a channel has similar statistics at neighbouring tokens; with it, every token is rotated by another angle.
The AC codec therefore works on keys before rotation; encoder and decoders on any device use the tables of this file.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.types.kv import RopeSpec

Tables = tuple[NDArray[np.float32], NDArray[np.float32]]


def rope_shape(rope: RopeSpec | None) -> tuple[int, int]:
    """Return how many dimensions rotate, 0 without an embedding, and whether their pairs are interleaved, 0 or 1."""
    return (0, 0) if rope is None else (rope.rotary_dim, int(rope.layout == "interleaved"))


@lru_cache(maxsize=256)
def rope_tables(rope: RopeSpec | None, first_token: int, tokens: int) -> Tables:
    """Return cosines and sines of the rotation, times the embedding's factor: two arrays [token, pair], read-only."""
    half = rope_shape(rope)[0] // 2
    if rope is None:
        return np.empty((tokens, 0), np.float32), np.empty((tokens, 0), np.float32)
    if rope.frequencies is None:
        frequencies = rope.theta ** (-np.arange(half, dtype=np.float64) / half)
    else:
        frequencies = np.array(rope.frequencies, dtype=np.float64)
    # Double precision: at position 100,000, float32 angles would be off by a hundredth of a radian.
    angles = np.arange(first_token, first_token + tokens, dtype=np.float64)[:, None] * frequencies
    cos, sin = ((rope.factor * table).astype(np.float32) for table in (np.cos(angles), np.sin(angles)))
    cos.flags.writeable = sin.flags.writeable = False
    return cos, sin


def backwards(rope: RopeSpec | None, first_token: int, tokens: int) -> Tables:
    """Return tables that undo `rope_tables`: first * cos + second * sin, and second * cos - first * sin."""
    # The factor lengthens a pair in both directions; divide it out twice.
    length = np.float32(1 / (rope.factor**2 if rope else 1))
    cos, sin = rope_tables(rope, first_token, tokens)
    return cos * length, sin * length


def rotate(keys: torch.Tensor, rope: RopeSpec | None, first_token: int, *, undo: bool = False) -> torch.Tensor:
    """Rotate keys [..., token, dim] float32 by their positions from ``first_token`` on, or back with ``undo``.

    Returns new keys, or ``keys`` itself if there is no embedding.
    """
    if rope is None:
        return keys
    rotary, interleaved = rope_shape(rope)
    half = rotary // 2
    pairs = (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else (slice(half), slice(half, rotary))
    tables = (backwards if undo else rope_tables)(rope, first_token, keys.shape[-2])
    cos, sin = (torch.from_numpy(table if table.flags.writeable else table.copy()) for table in tables)
    if undo:
        sin = -sin
    out = keys.clone()
    first, second = (keys[..., pair] for pair in pairs)
    out[..., pairs[0]] = first * cos - second * sin
    out[..., pairs[1]] = second * cos + first * sin
    return out
