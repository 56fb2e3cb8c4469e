"""The rotary position embedding of keys, applied and undone (RoFormer; Su et al., 2021).

Without it, a channel has similar statistics at neighbouring tokens; with it, every token is rotated by another angle.
The AC codec therefore works on keys before rotation; encoder and decoders on any device use the tables of this file.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.angles import cos_sin, powers
from kvabr.types.kv import RopeSpec

Tables = tuple[NDArray[np.float32], NDArray[np.float32]]


def rope_shape(rope: RopeSpec | None) -> tuple[int, int]:
    """Return how many dimensions rotate, 0 without an embedding, and whether their pairs are interleaved, 0 or 1.

    They are consecutive, from `RopeSpec.first` on.
    """
    return (0, 0) if rope is None else (rope.rotary_dim, int(rope.layout == "interleaved"))


def rope_first(rope: RopeSpec | None) -> int:
    """Return the first dimension that rotates."""
    return 0 if rope is None else rope.first


@lru_cache(maxsize=64)
def _frequencies(rope: RopeSpec) -> NDArray[np.float64]:
    """Return the angle by which each pair rotates from one token to the next, radians."""
    if rope.frequencies is not None:
        return np.array(rope.frequencies, dtype=np.float64)
    half = rope_shape(rope)[0] // 2
    return powers(rope.theta, -np.arange(half, dtype=np.float64) / half)


@lru_cache(maxsize=256)
def rope_tables(rope: RopeSpec | None, first_token: int | None, tokens: int) -> Tables:
    """Return cosines and sines of the rotation, times the embedding's factor: two arrays [token, pair], read-only.

    ``first_token``: position of the first one; None: tables that leave keys as they are.
    """
    half = rope_shape(rope)[0] // 2
    if rope is None:
        return np.empty((tokens, 0), np.float32), np.empty((tokens, 0), np.float32)
    if first_token is None:
        return _read_only(np.ones((tokens, half), np.float32)), _read_only(np.zeros((tokens, half), np.float32))
    frequencies = _frequencies(rope)
    # Double precision: at position 100,000, float32 angles would be off by a hundredth of a radian.
    angles = np.arange(first_token, first_token + tokens, dtype=np.float64)[:, None] * frequencies
    cos, sin = ((rope.factor * table).astype(np.float32) for table in cos_sin(angles))
    return _read_only(cos), _read_only(sin)


def backwards(rope: RopeSpec | None, first_token: int | None, tokens: int) -> Tables:
    """Return tables that undo `rope_tables`: first * cos + second * sin, and second * cos - first * sin."""
    # The factor lengthens a pair in both directions; divide it out twice.
    length = np.float32(1 / (rope.factor**2 if rope and first_token is not None else 1))
    cos, sin = rope_tables(rope, first_token, tokens)
    return cos * length, sin * length


def rotate(keys: torch.Tensor, rope: RopeSpec | None, first_token: int | None, *, undo: bool = False) -> torch.Tensor:
    """Rotate keys [..., token, dim] float32 by their positions from ``first_token`` on, or back with ``undo``.

    Returns new keys, or ``keys`` itself if there is no embedding. For None see `rope_tables`.
    """
    if rope is None:
        return keys
    return rotate_by((backwards if undo else rope_tables)(rope, first_token, keys.shape[-2]), keys, rope, undo=undo)


def rotate_by(tables: Tables, keys: torch.Tensor, rope: RopeSpec, *, undo: bool = False) -> torch.Tensor:
    """Rotate keys [..., token, dim] float32 by tables with a row for each token; see `rotate`."""
    rotary, interleaved = rope_shape(rope)
    half = rotary // 2
    first, end = rope.first, rope.first + rotary
    pairs = (slice(first, end, 2), slice(first + 1, end, 2))
    if not interleaved:
        pairs = (slice(first, first + half), slice(first + half, end))
    cos, sin = (torch.from_numpy(table if table.flags.writeable else table.copy()).to(keys.device) for table in tables)
    if undo:
        sin = -sin
    out = keys.clone()
    one, other = (keys[..., pair] for pair in pairs)
    # Each product and each sum is rounded by itself, on every device, as the coders do.
    out[..., pairs[0]] = one * cos - other * sin
    out[..., pairs[1]] = other * cos + one * sin
    return out


def _read_only(table: NDArray[np.float32]) -> NDArray[np.float32]:
    table.flags.writeable = False
    return table
