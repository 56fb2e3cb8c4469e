"""Numbers of separately stored tokens in AC tracks: six bits in a base, two more in each of the next two layers.

Only one token in a hundred is stored separately, but with 8 bits per number these tokens would take a fifth of a base.
With six bits a base has the same loss. With ten bits instead of eight, AC-L3 and AC-5x lose a tenth to a third less.

A number is a code from -511 to 511, in sixteenths of a scale per token, layer and K/V. Its coarse part is the code
divided by 16, rounded, from -32 to 32. Each of the two layers above a base adds two bits. If a code is only partly
known, the middle of its possible values is used.

Coarse parts are coded like coefficients (`kvabr.codec.native.streams`): each token, layer and K/V is a live row, and
its numbers take the place of tokens. The table is one of eight two-sided geometric distributions.

    coarse: size of the rest 4 | table 1 | coded
    fine:  of each number the higher two bits of the code less 16 times the coarse part, plus 8, or in the second layer
        the lower two; four numbers in a byte, the first one the lowest
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import TOTAL, CoderModel
from kvabr.types.errors import FormatError

Codes = NDArray[np.int16]

_SIZE, _HEAD = struct.Struct("<I"), struct.Struct("<IB")
LARGEST = 511
MIN_NUMBERS = 8192
"""Minimum numbers for coding coarse parts; with fewer, the coder's states would take more bytes than this saves."""
UNITS = 16
FINE_LAYERS = 2
_AT_ONCE = 4
_MAX_COARSE = 32
_USUAL_ROWS = 1 << 14
"""Rows up to which a coder model is cached; hostile payloads could fill the memory with larger ones."""
_OF = 64
_FALL_STEPS = (2, 3, 4, 6, 8, 12, 16, 24)
"""By table: how much less likely a number is than the next smaller one, in 64ths."""


def _model(table: int, rows: int) -> CoderModel:
    return _usual_model(table, rows) if rows <= _USUAL_ROWS else _new_model(table, rows)


def _new_model(table: int, rows: int) -> CoderModel:
    likely = [1 << 40]
    for _ in range(_MAX_COARSE):
        likely.append(likely[-1] * (_OF - _FALL_STEPS[table]) // _OF)
    both = [likely[abs(number)] for number in range(-_MAX_COARSE, _MAX_COARSE + 1)]
    room = TOTAL - len(both) - 1
    freqs = [1 + room * each // sum(both) for each in both] + [1]
    freqs[_MAX_COARSE] += TOTAL - sum(freqs)
    return CoderModel(
        row_class=np.zeros(rows, np.uint8),
        radius=np.array([_MAX_COARSE], np.uint8),
        freqs=np.array([[freqs]], np.uint16),
        flag_freq=np.full((1, rows), TOTAL - 1, np.uint16),
        delta=np.zeros(1, np.uint8),
    )


_usual_model = lru_cache(maxsize=256)(_new_model)


def coarse_of(codes: Codes) -> Codes:
    """Return the coarse parts of codes."""
    return (codes + UNITS // 2) >> 4


def meant(coarse: Codes, fine: Sequence[Codes]) -> NDArray[np.float32]:
    """Return the numbers that coarse parts, and the fine parts received so far, stand for, in units of a scale."""
    codes = UNITS * coarse.astype(np.int32) - UNITS // 2
    unknown = UNITS
    for two in fine:
        unknown >>= 2
        codes += unknown * two.astype(np.int32)
    out: NDArray[np.float32] = (codes.astype(np.float32) + np.float32((unknown - 1) / 2)) / np.float32(UNITS)
    return out


def join_coarse(coarse: Codes) -> bytes:
    """Code the coarse parts of rows, [row, number]."""
    total = int(np.abs(coarse).sum(dtype=np.int64))
    # If each number is f / 64 less likely than the next smaller one, the mean magnitude is about 64 / f.
    table = min(range(len(_FALL_STEPS)), key=lambda each: abs(total * _FALL_STEPS[each] - _OF * coarse.size))
    coded = coder.encode_indices(_model(table, len(coarse)), coarse, streams=1)
    return _HEAD.pack(1 + len(coded), table) + coded


def split_coarse(data: memoryview, rows: int, width: int, what: str) -> Codes:
    """Decode untrusted coarse parts, without their size field, to [row, number]; raise `FormatError` if invalid."""
    if len(data) and data[0] < len(_FALL_STEPS):
        out: Codes = coder.decode_indices(_model(data[0], rows), data[1:], width)
        if max(int(out.max()), -int(out.min())) <= _MAX_COARSE:
            return out
    raise FormatError(f"{what}: the {rows * width} coarse numbers of the stored tokens are corrupt")


def coarse_size(head: memoryview) -> int:
    """Return the size field of the coarse parts."""
    return int(_SIZE.unpack(head)[0])


def fine_size(numbers: int) -> int:
    """Return the size in bytes of the fine parts of ``numbers`` numbers."""
    return -(-numbers // _AT_ONCE)


def join_fine(codes: Codes, coarse: Codes, layer: int) -> bytes:
    """Encode the fine parts of layer 1 or 2, clamped to the range that the coarse parts allow."""
    rest = np.clip(codes - UNITS * coarse + UNITS // 2, 0, UNITS - 1).astype(np.uint8).reshape(-1)
    rest = rest >> 2 * (FINE_LAYERS - layer) & 3
    four = np.append(rest, np.zeros(-len(rest) % _AT_ONCE, np.uint8)).reshape(-1, _AT_ONCE)
    return bytes((four << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=1, dtype=np.uint8))


def split_fine(data: memoryview, shape: tuple[int, ...], what: str) -> Codes:
    """Decode untrusted fine parts to an array of ``shape``; raise `FormatError` if invalid."""
    packed, count = np.frombuffer(data, np.uint8), math.prod(shape)
    fine = (packed[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1)
    if len(packed) != fine_size(count) or fine[count:].any():
        raise FormatError(f"{what}: the fine numbers of the stored tokens are corrupt")
    out: Codes = fine[:count].reshape(shape).astype(np.int16)
    return out
