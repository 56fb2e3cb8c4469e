"""A profile's tables for kernels, built once per device and cached with the profile."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native.coder_model import BUCKETS, TOTAL, CoderModel, derived
from kvabr.codec.transform import NO_MATRIX, Transform

COMPONENTS, OUTPUTS = 64, 64
"""Tile sizes of a matrix product; vectors are padded to whole tiles of components."""
COARSE = 5
"""Binary logarithm of the slots per entry of the coarse table."""
_ESCAPED = 255


class CoderTables(NamedTuple):
    """The tables of one depth on the device."""

    coding_order: torch.Tensor
    """int32 [row]: row | class << 22, in coding order."""
    chances: torch.Tensor
    """int32 [1 or 2, row]: probability of a set flag, in units of 1/4,096, in coding order."""
    entries: torch.Tensor
    """int32 [class, context, slot]: symbol, frequency << 8, first slot << 20; then `NearTables`."""
    coarse: torch.Tensor
    """int32 [class, context, slot >> `COARSE`]: entry if all slots of a coarse slot have one symbol, else 0."""
    bucket: torch.Tensor
    """int32 [1 or 3, 16]: see `NearTables.bucket`; zeros without near tables."""
    delta: torch.Tensor


def coder_tables(model: CoderModel, device: torch.device) -> CoderTables:
    """Return the tables of a depth."""

    def make() -> CoderTables:
        order = model.order.astype(np.int64)
        packed = order | model.row_class[order].astype(np.int64) << 22
        near = model.near
        entries = np.concatenate(
            [_entries(model, model.freqs), *([] if near is None else [_entries(model, near.freqs)])]
        )
        parts = entries.reshape(-1, 1 << COARSE)
        coarse = np.where((parts == parts[:, :1]).all(axis=1), parts[:, 0], 0).astype(np.int32)
        bucket = np.zeros((model.contexts, BUCKETS), np.uint8) if near is None else near.bucket
        return CoderTables(
            on_device(packed.astype(np.int32), device),
            on_device(model.flag_freq[:, order].astype(np.int32), device),
            on_device(entries, device),
            on_device(coarse, device),
            on_device(bucket.astype(np.int32), device),
            on_device(model.delta[model.row_class].astype(np.int8), device),
        )

    return derived(model, device, make)


def _entries(model: CoderModel, freqs: NDArray[np.uint16]) -> NDArray[np.int32]:
    out = []
    for reach, (symbol, freq, place) in zip(model.radius.astype(np.int64), lookup(freqs), strict=True):
        value = np.where(symbol == 2 * reach + 1, _ESCAPED, symbol - reach + 128)
        out.append((value | freq << 8 | (np.arange(TOTAL) - place) << 20).astype(np.uint32).view(np.int32))
    return np.stack(out).reshape(-1)


class TransformTables(NamedTuple):
    """The arrays of a transform on the device.

    The vectors of a token hold the components of every stack, then of every block, each padded to whole tiles.
    """

    width: int
    first_place: int
    padded: int
    run: int
    """Length of the runs in which neighbouring rows have neighbouring places."""
    row_gain: torch.Tensor
    """uint8 [row]: gain for the row's first matrix."""
    row_place: torch.Tensor
    max_tiles: int
    tiles: torch.Tensor
    """int64 [tile, 5]: see `kernels.unstack`."""
    stack_mantissa: torch.Tensor
    """int8, flat: matrices of all stacks, each [output, component], both padded to whole tiles."""
    output_gain: torch.Tensor
    """uint8 [output]: gain for the block matrix."""
    output_place: torch.Tensor
    mantissa: torch.Tensor
    """int8 [block, channel, component]; empty without block transforms."""
    mean: torch.Tensor
    """float32 [layer, K/V, head, dim]."""


def transform_tables(transform: Transform, device: torch.device) -> TransformTables:
    """Return the arrays of a transform."""
    return derived(transform, device, lambda: _tables_of(transform, device))


def _tables_of(transform: Transform, device: torch.device) -> TransformTables:
    structure = transform.structure
    width, padded = structure.width, _padded(structure.width)
    sizes = [structure.width_of(stack) for stack in structure.stacks]
    first_place = sum(map(_padded, sizes))
    gains = np.ones((structure.blocks, width), np.uint8) if transform.block is None else transform.block.gain
    row_gain, row_place = np.zeros(structure.rows, np.uint8), np.zeros(structure.rows, np.int32)
    tiles, matrices, output_gain, output_place = [], [], [], []
    place = outputs = entries = 0
    for number, (stack, matrix, size) in enumerate(zip(structure.stacks, transform.stack, sizes, strict=True)):
        own = structure.blocks_of(stack)
        there = first_place + np.array(own)[:, None] * padded + np.arange(width)
        trailing = structure.trailing_rows(number)
        row_place[trailing] = there[:, stack.kept :].reshape(-1)
        row_gain[trailing] = gains[own, stack.kept :].reshape(-1)
        if not size:
            continue
        rows = structure.stack_rows(number)
        row_place[rows], row_gain[rows] = place + np.arange(size), matrix.gain
        output_place.append(there[:, : stack.kept].reshape(-1))
        output_gain.append(gains[own, : stack.kept].reshape(-1))
        whole = np.zeros((-(-size // OUTPUTS) * OUTPUTS, _padded(size)), np.int8)
        whole[:size, :size] = matrix.mantissa
        for first in range(0, size, OUTPUTS):
            begin = entries + first * whole.shape[1]
            tiles.append((begin, whole.shape[1], place, outputs + first, outputs + size))
        matrices.append(whole.reshape(-1))
        place += whole.shape[1]
        outputs += size
        entries += whole.size
    block = transform.block or NO_MATRIX
    mantissa = np.zeros((*block.mantissa.shape[:-1], padded), np.int8)
    mantissa[..., : block.mantissa.shape[-1]] = block.mantissa
    none = np.zeros(0, np.int64)
    return TransformTables(
        first_place + structure.blocks * padded,
        first_place,
        padded,
        common(width, *(stack.kept for stack in structure.stacks)),
        on_device(row_gain, device),
        on_device(row_place, device),
        max((tile[1] for tile in tiles), default=0) // COMPONENTS,
        on_device(np.array(tiles, np.int64).reshape(-1, 5), device),
        on_device(np.concatenate([none.astype(np.int8), *matrices]), device),
        on_device(np.concatenate([none.astype(np.uint8), *output_gain]), device),
        on_device(np.concatenate([none, *output_place]).astype(np.int32), device),
        on_device(mantissa, device),
        on_device(transform.mean.astype(np.float32), device),
    )


def common(*numbers: int) -> int:
    """Return the largest power of two, at most 8, that divides all numbers."""
    return math.gcd(8, *numbers)


def divisible(numbers: NDArray[np.int64]) -> int:
    """Return a number divisible by exactly those powers of two that divide every element."""
    return int(np.bitwise_or.reduce(numbers, axis=None))


def _padded(components: int) -> int:
    return -(-components // COMPONENTS) * COMPONENTS


def on_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to a device, and wait for it."""
    # Torch rejects read-only arrays.
    return torch.from_numpy(np.array(array, order="C")).to(device)


def lookup(freqs: NDArray[np.uint16]) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Return symbol, frequency, and offset within the symbol for every slot, [context, slot], by class."""
    wide, out = freqs.astype(np.int64), []
    for own, starts in zip(wide, np.cumsum(wide, axis=2) - wide, strict=True):
        symbol = np.stack([np.repeat(np.arange(own.shape[1]), each) for each in own])
        place = np.arange(TOTAL) - np.take_along_axis(starts, symbol, axis=1)
        out.append((symbol, np.take_along_axis(own, symbol, axis=1), place))
    return out
