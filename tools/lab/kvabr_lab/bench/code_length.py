"""The symbols that a coder writes for a group, and the length of an ideal code for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvabr.codec.native.coder_model import TOTAL, CoderModel, Index, check_indices
from kvabr.codec.native.references import TILE
from kvabr.types.errors import FormatError


def ideal_bits(model: CoderModel, index: NDArray[Any], below: NDArray[Any] | None = None) -> float:
    """Return the ideal code length in bits of a group's indices under the model's tables, with flags and escapes."""
    index, base = check_indices(model, index, below)
    values, context = conditioned(index, base)
    cost = -np.log2(np.maximum(model.freqs, 1) / TOTAL)
    bits = 0.0
    for first in range(0, index.shape[1], TILE):
        tile = slice(first, first + TILE)
        live = (values[:, tile] != 0).any(axis=1)
        chance = flag_chance(model, base, tile)
        bits -= float(np.log2(np.where(live, chance, TOTAL - chance) / TOTAL).sum())
        for row in np.flatnonzero(live):
            symbols, escaped = symbols_of(model, int(row), values[row, tile], context[row, tile], model.freqs)
            bits += float(cost[model.row_class[row], context[row, tile], symbols].sum()) + 16 * len(escaped)
    return bits


def conditioned(index: Index, below: Index | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the coded values and their contexts, both [row, token]."""
    values = index.astype(np.int64)
    farthest = 0
    if below is not None:
        values -= 3 * below.astype(np.int64)
        farthest = int(np.abs(below.astype(np.int64)).max())
    if int(np.abs(values).max()) > 32767 or farthest > 32767 // 3:
        raise FormatError("an index exceeds 16 bits, or cannot refine the index below; keep such tokens exact")
    if below is None:
        return values, np.zeros(index.shape, dtype=np.int64)
    return values * signs_of(below), contexts_of(below)


def contexts_of(below: Index) -> NDArray[np.int64]:
    """Return the contexts that the indices below select."""
    context: NDArray[np.int64] = np.minimum(np.abs(below.astype(np.int64)), 2)
    return context


def signs_of(below: Index) -> NDArray[np.int64]:
    """Return the sign of the index below: values are coded as if that index was not negative."""
    return np.where(below < 0, -1, 1)


def flag_chance(model: CoderModel, below: Index | None, tile: slice) -> NDArray[np.int64]:
    """Return the probability of a set flag for each row, [row]."""
    chance: NDArray[np.int64] = model.flag_freq[0].astype(np.int64)
    if below is not None:
        chance = np.where((below[:, tile] != 0).any(axis=1), model.flag_freq[1], chance)
    return chance


def symbols_of(
    model: CoderModel, row: int, values: NDArray[np.int64], context: NDArray[np.int64], freqs: NDArray[np.uint16]
) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """Return the symbols of one row, and the values that are escaped."""
    which = model.row_class[row]
    radius = int(model.radius[which])
    symbols = np.where(np.abs(values) <= radius, values + radius, 2 * radius + 1)
    symbols[freqs[which, context, symbols] == 0] = 2 * radius + 1
    return symbols, values[symbols == 2 * radius + 1].astype(np.int16)
