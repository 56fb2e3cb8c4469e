"""Biases: the mean rounding errors of a group's values.

A model averages values over many tokens, so independent errors cancel. Coarse steps cause errors that all tokens share:
a row of zeros loses its mean, and a dead zone pulls towards zero. So the two coarsest layers store the mean error of
each row of values, in sixteenths or eighths of the step, and a decoder adds it to the channels' means. Keys need no
biases.

Biases are coded as the values of the nonzero ones and the distances between these (Rice, 1979):

    number of them 4 | low bits L 1 | bits, highest first, the last byte filled up with zeros

    bits: for each number, its skipped rows without the lowest L bits, in unary (n ones and a zero); for each, its value
        in unary, as 0 for -1, 1 for 1, 2 for -2 and so on; for each, the lowest L bits of its skipped rows

Biases are computed from sums of integers over tokens, so they are equal on every machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec import coefficients
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import Shift, derived
from kvabr.codec.transform import FINE
from kvabr.types.errors import FormatError
from kvabr.types.naming import LAYERS

if TYPE_CHECKING:
    from kvabr.codec.profile import Depth
    from kvabr.codec.transform import Structure

UNITS = {LAYERS[0]: 1, LAYERS[1]: 2}
"""Tracks with biases, and their units in sixteenths of the step."""
_ROUNDING_TENTHS = 3
"""Tenths to add before rounding down. Rounding to nearest would cost a third more bits for the same loss."""
MIN_TOKENS = 64
"""Minimum tokens of a group with biases; in smaller groups they cost more than they save."""
_MAX_VALUE = 127
_HEAD = struct.Struct("<IB")
_MAX_LOW = 16


def value_rows(structure: Structure) -> NDArray[np.intp]:
    """Return the rows of values, ascending; empty if keys and values are coded together."""

    def make() -> NDArray[np.intp]:
        if structure.halves != 2 or structure.spec.only.kind == "state":  # keys and values
            return np.zeros(0, np.intp)
        every = np.arange(structure.rows)
        first = structure.first_rows
        parts = [every[first[at] : first[at + 1]] for at, stack in enumerate(structure.stacks) if stack.kind == 1]
        return np.concatenate([np.zeros(0, np.intp), *parts])

    return derived(structure, "value rows", make)


def error_sums(
    structure: Structure, depth: Depth, groups: Sequence[tuple[torch.Tensor, NDArray[np.bool_]]]
) -> list[NDArray[np.int64]]:
    """Return each group's summed rounding errors in the rows of values; see `kvabr.codec.coefficients.error_sums`.

    ``groups`` has coefficients, [row, token] float32, and masks of coded tokens.
    """
    which = value_rows(structure)
    gains = np.ones(len(which), np.float32)
    if depth.gains:
        stacks = np.searchsorted(structure.first_rows, which, side="right") - 1
        gains = np.array(depth.gains, np.float32)[stacks]
    return coefficients.error_sums(groups, which, gains, depth)


def biases(sums: NDArray[np.int64], tokens: int, unit: int) -> NDArray[np.int16]:
    """Return the mean error of each row of values, clamped to 127; zeros for fewer than `MIN_TOKENS` tokens.

    ``sums`` is from `error_sums`; ``unit`` is the unit of the result in sixteenths of the step.
    """
    if tokens < MIN_TOKENS:
        return np.zeros(len(sums), np.int16)
    whole = coder.ERROR_UNIT * tokens * unit
    mean = (10 * FINE * np.abs(sums) + _ROUNDING_TENTHS * whole) // (10 * whole)
    out: NDArray[np.int16] = (np.sign(sums) * np.minimum(mean, _MAX_VALUE)).astype(np.int16)
    return out


def join_biases(numbers: NDArray[np.int16]) -> bytes:
    """Code the biases that `biases` returns."""
    at = np.flatnonzero(numbers)
    skipped = np.diff(at, prepend=-1) - 1
    value = numbers[at].astype(np.int64)
    value = np.where(value < 0, -2 * value - 2, 2 * value - 1)
    # Golomb's rule for geometric distances: low bits that halve the mean distance about once too often.
    low = min(_MAX_LOW, max(0, int(np.log2(max(1.0, 0.7 * float(skipped.mean())))))) if len(at) else 0
    unary = np.concatenate([skipped >> low, value])
    ends = np.cumsum(unary + 1) - 1
    size = int(ends[-1]) + 1 if len(ends) else 0
    bits = np.zeros(size + low * len(at), np.uint8)
    bits[:size] = 1
    bits[ends] = 0
    bits[size:] = (skipped[:, None] >> np.arange(low)[::-1] & 1).reshape(-1)
    return _HEAD.pack(len(at), low) + np.packbits(bits).tobytes()


def split_biases(data: memoryview, count: int, what: str) -> NDArray[np.int16]:
    """Decode untrusted bytes to ``count`` numbers; raise `FormatError` if malformed."""
    bad = FormatError(f"{what}: the biases of {count} rows of values are corrupt")
    if len(data) < _HEAD.size or len(data) > _HEAD.size + count * (_MAX_VALUE + 1):
        raise bad
    some, low = _HEAD.unpack_from(data)
    bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=_HEAD.size))
    if not 0 < some <= count or low > _MAX_LOW:
        raise bad
    ends = np.flatnonzero(bits == 0)[: 2 * some]
    size = int(ends[-1]) + 1 if len(ends) == 2 * some else len(bits) + 1
    rest = bits[size : size + low * some]
    if size + low * some > len(bits) or len(bits) - size - low * some >= 8 or bits[size + low * some :].any():
        raise bad
    unary = np.diff(ends, prepend=-1) - 1
    tail = rest.reshape(some, low) @ (1 << np.arange(low, dtype=np.int64)[::-1])
    at = np.cumsum((unary[:some] << low) + tail + 1) - 1
    value = unary[some:]
    if int(at[-1]) >= count or int(value.max()) >= 2 * _MAX_VALUE:
        raise bad
    out = np.zeros(count, np.int16)
    out[at] = np.where(value % 2, (value + 1) // 2, -value // 2 - 1)
    return out


def shift_of(structure: Structure, numbers: NDArray[np.int16], unit: int) -> Shift:
    """Return the shift of the channels' means by biases, given in units of ``unit`` sixteenths of a step."""
    at = np.flatnonzero(numbers)
    return Shift(value_rows(structure)[at], (unit * numbers[at]).astype(np.int16))
