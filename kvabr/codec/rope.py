"""The rotary position embedding of keys, applied and undone (RoFormer; Su et al., 2021).

A channel's values are similar at neighbouring tokens only before rotation, so the AC codec works on unrotated keys.
Encoder and decoders use the tables of this file, which are equal on every machine. NumPy's powers, cosines and sines
vary with vector length, and C libraries differ. Here all steps are additions and multiplications of doubles, or decimal
arithmetic.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.types.kv import RopeSpec

Doubles = NDArray[np.float64]

_PIECES = tuple(map(float.fromhex, ("0x1.921fb5p+0", "0x1.110b46p-26", "0x1.1a62633145c07p-54")))
"""Pi / 2 as a sum of three doubles; the first two have 26 significant bits."""
_FARTHEST = 2.0**27
"""Largest angle, in radians, for which a piece times the number of quarter turns is exact."""
_SIN = (
    *(-1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04),
    *(2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10),
)
_COS = (
    *(4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05),
    *(-2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11),
)
"""Polynomial coefficients for angles up to an eighth of a turn, by Sun Microsystems (fdlibm)."""


def powers(base: float, exponents: Doubles) -> Doubles:
    """Return a positive number to the power of each exponent, correctly rounded."""
    with localcontext() as context:
        context.prec = 40
        logarithm = Decimal(base).ln()
        return np.array([float((logarithm * Decimal(each)).exp()) for each in exponents.tolist()])


def cos_sin(angles: Doubles) -> tuple[Doubles, Doubles]:
    """Return cosines and sines of angles in radians; angles beyond 2**27 use NumPy."""
    if not angles.size or not float(np.abs(angles).max()) < _FARTHEST:
        return np.cos(angles), np.sin(angles)
    quarters = np.rint(angles * (2 / np.pi))
    far = angles - quarters * _PIECES[0]
    second, third = quarters * _PIECES[1], quarters * _PIECES[2]
    near = far - second
    rest = (far - near) - second
    left = near - third
    rest += (near - left) - third
    square = left * left
    sin = left + (left * square * _polynomial(_SIN, square) + rest * (1 - square / 2))
    half = 0.5 * square
    most = 1 - half
    cos = most + (((1 - most) - half) + (square * square * _polynomial(_COS, square) - left * rest))
    whole = quarters.astype(np.int64)
    odd = (whole & 1).astype(bool)
    cos, sin = np.where(odd, sin, cos), np.where(odd, cos, sin)
    np.negative(cos, out=cos, where=((whole + 1) & 2).astype(bool))
    np.negative(sin, out=sin, where=(whole & 2).astype(bool))
    return cos, sin


def _polynomial(factors: tuple[float, ...], square: Doubles) -> Doubles:
    out = np.full_like(square, factors[-1])
    for factor in factors[-2::-1]:
        out *= square
        out += factor
    return out


Tables = tuple[NDArray[np.float32], NDArray[np.float32]]


def rope_shape(rope: RopeSpec | None) -> tuple[int, int]:
    """Return the number of rotating dimensions, and 1 if their pairs are interleaved, else 0."""
    return (0, 0) if rope is None else (rope.rotary_dim, int(rope.layout == "interleaved"))


def rope_first(rope: RopeSpec | None) -> int:
    """Return the index of the first dimension that rotates."""
    return 0 if rope is None else rope.first


@lru_cache(maxsize=64)
def _frequencies(rope: RopeSpec) -> NDArray[np.float64]:
    if rope.frequencies is not None:
        return np.array(rope.frequencies, dtype=np.float64)
    half = rope_shape(rope)[0] // 2
    return powers(rope.theta, -np.arange(half, dtype=np.float64) / half)


@lru_cache(maxsize=256)
def rope_tables(rope: RopeSpec | None, first_token: int | None, tokens: int) -> Tables:
    """Return cosines and sines of the rotation, times the embedding's factor: two arrays [token, pair], read-only.

    ``first_token`` is the position of the first token. If it is None, the tables leave keys unchanged.
    """
    half = rope_shape(rope)[0] // 2
    if rope is None:
        return np.empty((tokens, 0), np.float32), np.empty((tokens, 0), np.float32)
    if first_token is None:
        return _read_only(np.ones((tokens, half), np.float32)), _read_only(np.zeros((tokens, half), np.float32))
    frequencies = _frequencies(rope)
    # Use doubles: at position 100,000, float32 angles would be off by a hundredth of a radian.
    angles = np.arange(first_token, first_token + tokens, dtype=np.float64)[:, None] * frequencies
    cos, sin = ((rope.factor * table).astype(np.float32) for table in cos_sin(angles))
    return _read_only(cos), _read_only(sin)


def backwards(rope: RopeSpec | None, first_token: int | None, tokens: int) -> Tables:
    """Return tables that undo `rope_tables`, as first * cos + second * sin, and second * cos - first * sin."""
    # The embedding multiplies a pair's length by the factor, and so do the tables; divide by both.
    length = np.float32(1 / (rope.factor**2 if rope and first_token is not None else 1))
    cos, sin = rope_tables(rope, first_token, tokens)
    return cos * length, sin * length


def rotate(keys: torch.Tensor, rope: RopeSpec | None, first_token: int | None, *, undo: bool = False) -> torch.Tensor:
    """Rotate keys [..., token, dim] float32 to positions from ``first_token`` on, or back with ``undo``.

    Return new keys, or ``keys`` itself without an embedding. ``first_token`` may be None, see `rope_tables`.
    """
    if rope is None:
        return keys
    return rotate_by((backwards if undo else rope_tables)(rope, first_token, keys.shape[-2]), keys, rope, undo=undo)


def rotate_by(tables: Tables, keys: torch.Tensor, rope: RopeSpec, *, undo: bool = False) -> torch.Tensor:
    """Rotate keys [..., token, dim] float32 by tables with one row per token; see `rotate`."""
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
    # Round each product and sum separately on every device, as the coders do.
    out[..., pairs[0]] = one * cos - other * sin
    out[..., pairs[1]] = other * cos + one * sin
    return out


def _read_only(table: NDArray[np.float32]) -> NDArray[np.float32]:
    table.flags.writeable = False
    return table
