"""The host's part of the encoder's transform on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.gpu import analysis_kernels as kernels
from kvabr.codec.inverse import MAX_ELEMENT, Inverse
from kvabr.codec.native.coder_model import DTYPES, derived
from kvabr.codec.rope import backwards, rope_first, rope_shape
from kvabr.codec.transform import Structure, Transform

_CHANNELS, _OUTPUTS, _TOKENS, _COMPONENTS = 32, 64, 64, 64
_FEW_TOKENS = 16
_WARPS = 8
Inverses = tuple[Sequence[Inverse], Sequence[Inverse]]
"""Inverses of all blocks (empty without a block transform), and of all stacks."""


class Analysed(NamedTuple):
    """A transformed group on its device; see `kvabr.codec.analysis.Coefficients`."""

    rows: torch.Tensor
    largest: torch.Tensor
    """Largest magnitudes, [3, token] float32: of elements divided by the norm, of stacks' components, and of rows."""
    power: torch.Tensor
    """[K/V, layer, token] float32: squared distances from means."""


def analyse(
    transform: Transform, inverses: Inverses, scale: NDArray[np.float32], group: torch.Tensor, first_token: int | None
) -> Analysed:
    """Transform a group on its device, see `kvabr.codec.analysis.Analysis.analyse`.

    ``scale``, [layer, K/V], has the factors that convert elements to units of the norm.
    """
    device = group.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        group = group.detach() if group.dtype in DTYPES else group.detach().float()
        return _Analysis(transform, _tables(transform, inverses, scale, device), group).run(first_token)


class _Matrix(NamedTuple):
    size: int
    high: torch.Tensor
    """int8 [matrix, row, column]: upper bytes."""
    low: torch.Tensor
    """int8 [matrix, row, column]: lower bytes, less 128."""
    totals: torch.Tensor
    """int64 [matrix, row]: sums of the numbers, less 128 each."""
    factors: torch.Tensor
    """float32 [matrix, row]."""
    columns: torch.Tensor
    """float32 [matrix, column]."""
    places: torch.Tensor
    """int32 [matrix, 3]: see `analysis_kernels.product`."""


class _Tables(NamedTuple):
    mean: torch.Tensor
    scale: torch.Tensor
    blocks: _Matrix | None
    stacks: list[_Matrix | None]
    places: NDArray[np.int64]
    """[block, 3]: see `analysis_kernels.product`."""
    firsts: list[int]
    """First component of each stack, then the total number of components."""


class _Analysis:
    def __init__(self, transform: Transform, tables: _Tables, group: torch.Tensor) -> None:
        self._transform, self._tables, self._group = transform, tables, group
        self._tokens = group.shape[3]
        self._stride = -(-self._tokens // _TOKENS) * _TOKENS

    def run(self, first_token: int | None) -> Analysed:
        structure, tables, tokens = self._transform.structure, self._tables, self._tokens
        channels = self._centred(first_token)
        power = self._powers(channels)
        rows, across = self._empty(structure.rows), self._empty(max(1, tables.firsts[-1]))
        largest = torch.zeros((3, self._stride), device=self._group.device)
        if tables.blocks is None:
            largest[0] = self._copied(channels, rows, across)
        else:
            scales, per_layer = tables.scale, structure.per_layer
            largest[0] = self._multiplied(tables.blocks, channels, scales, per_layer, across, rows)
        for number, matrix in enumerate(tables.stacks):
            if matrix is not None:
                part = across[tables.firsts[number] : tables.firsts[number + 1]]
                largest[1] = torch.maximum(largest[1], part.abs().amax(dim=0))
                self._multiplied(matrix, part, None, 1, across, rows)
        largest[2] = rows.abs().amax(dim=0)
        return Analysed(rows[:, :tokens], largest[:, :tokens], power[:, :, :tokens])

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((*shape, self._stride), dtype=dtype, device=self._group.device)

    def _centred(self, first_token: int | None) -> torch.Tensor:
        structure, group = self._transform.structure, self._group
        rope, (layers, halves, heads, tokens, dim) = structure.coded.rope, group.shape
        turns = (torch.from_numpy(np.array(table)).to(group.device) for table in backwards(rope, first_token, tokens))
        rotary, interleaved = rope_shape(rope)
        channels = self._empty(structure.rows)
        kernels.centre[(self._stride // _TOKENS, -(-dim // _CHANNELS), layers * halves * heads)](
            group,
            self._tables.mean,
            *turns,
            channels,
            tokens,
            self._stride,
            *group.stride(),
            heads,
            dim,
            rotary // 2,
            rope_first(rope),
            HALVES=halves,
            INTERLEAVED=bool(interleaved),
            CHANNELS=_CHANNELS,
            TOKENS=_TOKENS,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # rounds each product and sum separately
        )
        return channels

    def _powers(self, channels: torch.Tensor) -> torch.Tensor:
        structure = self._transform.structure
        layers, halves = structure.coded.layers, structure.halves
        power = self._empty(halves, layers)
        kernels.powers[(self._stride // _FEW_TOKENS, layers, halves)](
            channels,
            power,
            structure.rows // (layers * halves),
            layers,
            self._stride,
            HALVES=halves,
            TOKENS=_FEW_TOKENS,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return power

    def _copied(self, channels: torch.Tensor, rows: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
        structure, tables = self._transform.structure, self._tables
        scale = tables.scale.reshape(-1).repeat_interleave(structure.per_layer)[:, None, None]
        elements = channels.reshape(structure.blocks, structure.width, -1) * scale
        top = torch.full((), MAX_ELEMENT, device=channels.device)
        elements = torch.where(elements < top, elements, top).clamp_(min=-MAX_ELEMENT)
        for part, (kept, to_across, to_rows) in zip(elements, tables.places.tolist(), strict=True):
            across[to_across : to_across + kept] = part[:kept]
            rows[to_rows : to_rows + structure.width - kept] = part[kept:]
        return elements.abs().amax(dim=(0, 1))

    def _multiplied(
        self,
        matrix: _Matrix,
        vectors: torch.Tensor,
        scales: torch.Tensor | None,
        per_scale: int,
        across: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        count = len(matrix.places)
        high, low = (self._empty(count * matrix.size, dtype=torch.int8) for _ in range(2))
        totals = self._empty(count, dtype=torch.int64)
        units, largest = self._empty(count), self._empty(count)
        kernels.to_words[(self._stride // _FEW_TOKENS, count)](
            vectors,
            matrix.factors if scales is None else scales,
            matrix.columns,
            high,
            low,
            totals,
            units,
            largest,
            matrix.size,
            per_scale,
            self._stride,
            SCALES=scales is not None,
            COMPONENTS=_COMPONENTS,
            TOKENS=_FEW_TOKENS,
            num_warps=4,
            enable_fp_fusion=False,
        )
        kernels.product[(-(-matrix.size // _OUTPUTS), self._stride // _TOKENS, count)](
            matrix.high,
            matrix.low,
            matrix.totals,
            matrix.factors,
            high,
            low,
            totals,
            units,
            matrix.places,
            across,
            rows,
            matrix.size,
            self._stride,
            OUTPUTS=_OUTPUTS,
            TOKENS=_TOKENS,
            COMPONENTS=_COMPONENTS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
        return largest.amax(dim=0)


def _tables(transform: Transform, inverses: Inverses, scale: NDArray[np.float32], device: torch.device) -> _Tables:
    def make() -> _Tables:
        structure, (blocks, stacks) = transform.structure, inverses
        places, firsts = _places(structure)
        own = [
            None if not inverse.entries.size else _matrix([inverse], np.array([[0, 0, rows]]), device)
            for inverse, rows in zip(stacks, structure.first_rows, strict=False)
        ]
        return _Tables(
            _there(transform.mean.astype(np.float32), device),
            _there(scale, device),
            _matrix(blocks, places, device) if blocks else None,
            own,
            places,
            firsts,
        )

    return derived(transform, ("encoder", device), make)


def _places(structure: Structure) -> tuple[NDArray[np.int64], list[int]]:
    places, firsts = np.zeros((structure.blocks, 3), np.int64), [0]
    for number, stack in enumerate(structure.stacks):
        trailing = structure.trailing_rows(number).start
        for at, block in enumerate(structure.blocks_of(stack)):
            places[block] = stack.kept, firsts[-1] + at * stack.kept, trailing + at * (structure.width - stack.kept)
        firsts.append(firsts[-1] + structure.width_of(stack))
    return places, firsts


def _matrix(inverses: Sequence[Inverse], places: NDArray[np.int64], device: torch.device) -> _Matrix:
    entries = np.stack([inverse.entries for inverse in inverses])
    return _Matrix(
        entries.shape[2],
        _there((entries >> 8).astype(np.int8), device),
        _there(((entries & 255) - 128).astype(np.int8), device),
        _there(entries.sum(axis=2, dtype=np.int64) - 128 * entries.shape[2], device),
        _there(np.stack([inverse.rows for inverse in inverses]), device),
        _there(np.stack([inverse.columns for inverse in inverses]), device),
        _there(places.astype(np.int32), device),
    )


def _there(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    # Torch rejects read-only arrays.
    return torch.from_numpy(np.array(array, order="C")).to(device)
