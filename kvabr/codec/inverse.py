"""The encoder's matrices: inverses of a decoder's, in 16 bits, with order-independent products.

All sums are sums of integers, so they are exact on every processor with any number of threads. Entries are those of the
exact inverse, rounded to 16 bits, independent of any library's inverse. Each vector is rounded to 16 bits in its own
unit. The norm of a matrix row is at most 2**15, in its units, and that of a vector less than 2**16, so their product is
below 2**31 (Cauchy-Schwarz).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.types.errors import FormatError

if TYPE_CHECKING:
    from kvabr.codec.transform import Matrices

MAX_ELEMENT = 2.0**64
"""Largest magnitude of elements for which results are finite."""
_WORST_CONDITION = 1e-2
_ROW_BITS = 15
_ONE_BITS = 14
"""Binary logarithm of the integer that stands for 1.0 in a decoder's matrix."""
_FIXED_BITS = 60
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Inverse:
    """An inverse matrix: integer entries, to multiply by factors of rows and columns."""

    entries: NDArray[np.int16]
    rows: Floats
    """Factors of rows, [row]: powers of two."""
    columns: Floats
    """Factors of columns, [column]: powers of two that even out the columns."""


def inverted(matrix: Matrices) -> Inverse:
    """Return the inverse of a profile's matrix; raise `FormatError` if it is singular."""
    whole = matrix.expanded.astype(np.int64)
    if not whole.size:
        nothing = np.zeros(0, np.float32)
        return Inverse(np.zeros((0, 0), np.int16), nothing, nothing)
    square = whole / 2.0**_ONE_BITS
    found, failed = torch.linalg.inv_ex(torch.from_numpy(square))
    inverse = found.numpy()
    left = np.abs(square @ inverse - np.eye(len(square)))
    if int(failed) or not left.sum(axis=1).max() < _WORST_CONDITION:
        raise FormatError("profile: a matrix of its transform has no inverse; nothing can be encoded with it")
    # The norm of the inverse's column is about the reciprocal of the matrix row's norm.
    energy = (whole * whole).sum(axis=1)
    columns = np.array([(int(each).bit_length() - 1) // 2 - _ONE_BITS for each in energy])
    length = np.sqrt(((inverse * 2.0**columns) ** 2).sum(axis=1))
    # The margin keeps away from powers of two: many rows have the same norm up to rounding.
    rows = _ROW_BITS - np.frexp(length * (1 + 2.0**-8))[1]
    scaled = inverse * 2.0 ** (rows[:, None] + columns)
    noise = 2.0**-52 * len(square) * np.abs(square).sum(axis=1).max() * np.abs(inverse).max(axis=0)
    error = np.abs(inverse).sum(axis=1)[:, None] * (left.max(axis=0) + noise) * 2.0 ** (rows[:, None] + columns)
    entries = np.rint(scaled)
    unsure = np.abs(scaled - np.floor(scaled) - 0.5) <= 2 * error
    which = np.flatnonzero(unsure.any(axis=0))
    if len(which):
        better = _refined(whole, inverse, rows, columns[which], which)
        entries[:, which] = np.where(unsure[:, which], better, entries[:, which])
    return Inverse(entries.astype(np.int16), (2.0**-rows).astype(np.float32), (2.0**-columns).astype(np.float32))


def _refined(
    whole: NDArray[np.int64],
    inverse: NDArray[np.float64],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    which: NDArray[np.intp],
) -> NDArray[np.float64]:
    """Return columns ``which`` of the exact inverse, multiplied by 2**(rows + columns) and rounded to integers.

    The residual is computed in 64-bit integers, modulo 2**64.
    """
    near = inverse[:, which]
    bits = _FIXED_BITS - np.frexp(np.abs(near).max(axis=0))[1]
    fixed = np.rint(near * 2.0**bits).astype(np.int64)
    one = np.array([pow(2, int(each) + _ONE_BITS, 1 << 64) for each in bits], dtype=np.uint64).view(np.int64)
    left = -(whole @ fixed)
    left[which, np.arange(len(which))] += one
    change = inverse @ (left.astype(np.float64) * 2.0 ** -(bits + _ONE_BITS))
    shift = (bits - rows[:, None] - columns).clip(1, 62)
    down = fixed >> shift
    half = np.int64(1) << (shift - 1)
    rest = ((fixed - (down << shift)) - half) * 2.0**-shift + change * 2.0 ** (bits - shift)
    out: NDArray[np.float64] = (down + (rest > 0)).astype(np.float64)
    return out
