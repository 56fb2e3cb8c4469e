"""Models in the form that the kernels need, on the device; built once per model and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native.model import TOTAL, CoderModel, SynthesisModel

_ESCAPED = 255
"""Escape mark in the low byte of an entry; other symbols are their value plus 128."""


@dataclass(frozen=True, eq=False)
class CoderTables:
    """Tables of one depth."""

    coding_order: torch.Tensor
    """int32 [row]: row | class << 22, in coding order."""
    chances: torch.Tensor
    """int32 [1 or 2, row]: probability of a set flag out of 4,096, in coding order."""
    entries: torch.Tensor
    """int32 [class, context, slot]: symbol, frequency << 8, the slot's position in the symbol << 20."""
    delta: torch.Tensor
    """int8 [row]: the class's delta."""


@dataclass(frozen=True, eq=False)
class StackTables:
    """Tables of one stack."""

    mantissa: torch.Tensor
    """int8 [output, component]."""
    gain: torch.Tensor
    """uint8 [component]."""
    first_row: int
    """First row of its coefficients."""
    first_output: int
    """Position among the outputs of all stacks."""


@dataclass(frozen=True, eq=False)
class SynthesisTables:
    """Tables of a synthesis."""

    stacks: tuple[StackTables, ...]
    """The stacks that have a transform."""
    outputs: int
    """Number of outputs of all stacks."""
    places: torch.Tensor
    """int32 [layer, K/V, 3]: first row of the first block's untransformed components, its first stack output, and the
    number of components in the stack."""
    mantissa: torch.Tensor
    """int8 [layer, K/V, block, channel, component]; empty without block transforms."""
    gain: torch.Tensor
    """uint8 [layer, K/V, block, component]."""
    mean: torch.Tensor
    """float32 [layer, K/V, head, dim]."""


_Model = TypeVar("_Model", CoderModel, SynthesisModel)
_Tables = TypeVar("_Tables", CoderTables, SynthesisTables)
_coders: WeakKeyDictionary[CoderModel, dict[torch.device, CoderTables]] = WeakKeyDictionary()
_syntheses: WeakKeyDictionary[SynthesisModel, dict[torch.device, SynthesisTables]] = WeakKeyDictionary()


def coder_tables(model: CoderModel, device: torch.device) -> CoderTables:
    """Return the tables of one depth."""
    return _kept(_coders, model, device, _coder)


def synthesis_tables(model: SynthesisModel, device: torch.device) -> SynthesisTables:
    """Return the tables of a synthesis."""
    return _kept(_syntheses, model, device, _synthesis)


def _kept(
    kept: WeakKeyDictionary[_Model, dict[torch.device, _Tables]],
    model: _Model,
    device: torch.device,
    make: Callable[[_Model, torch.device], _Tables],
) -> _Tables:
    by_device = kept.setdefault(model, {})
    if device not in by_device:
        # Two threads may both build them; the last one's are kept.
        by_device[device] = make(model, device)
    return by_device[device]


def _coder(model: CoderModel, device: torch.device) -> CoderTables:
    order = model.order.astype(np.int64)
    packed = order | model.row_class[order].astype(np.int64) << 22
    return CoderTables(
        _there(packed.astype(np.int32), device),
        _there(model.flag_freq[:, order].astype(np.int32), device),
        _there(_entries(model), device),
        _there(model.delta[model.row_class].astype(np.int8), device),
    )


def _entries(model: CoderModel) -> NDArray[np.int32]:
    shape = model.freqs.shape
    freqs = model.freqs.astype(np.int64).reshape(-1, shape[2])
    radius = np.repeat(model.radius.astype(np.int64), shape[1])
    out = np.empty((len(freqs), TOTAL), dtype=np.uint32)
    for table, each, reach in zip(out, freqs, radius, strict=True):
        symbol = np.repeat(np.arange(shape[2]), each)
        place = np.arange(TOTAL) - (np.cumsum(each) - each)[symbol]
        value = np.where(symbol == 2 * reach + 1, _ESCAPED, symbol - reach + 128)
        table[:] = value | each[symbol] << 8 | place << 20
    return out.view(np.int32)


def _synthesis(model: SynthesisModel, device: torch.device) -> SynthesisTables:
    places = np.zeros((model.layers, 2, 3), dtype=np.int32)
    stacks, outputs = [], 0
    for number, stack in enumerate(model.stacks):
        trailing = model.trailing_rows(number).start
        for index, layer in enumerate(stack.layers):
            row = trailing + index * model.blocks * (model.width - stack.kept)
            places[layer, stack.kv] = row, outputs + index * model.blocks * stack.kept, stack.kept
        if stack.size:
            first = model.stack_rows(number).start
            stacks.append(StackTables(_there(stack.mantissa, device), _there(stack.gain, device), first, outputs))
        outputs += stack.size
    nothing = np.zeros(0, dtype=np.int8)
    return SynthesisTables(
        tuple(stacks),
        outputs,
        _there(places, device),
        _there(nothing if model.block_mantissa is None else model.block_mantissa, device),
        _there(nothing.view(np.uint8) if model.block_gain is None else model.block_gain, device),
        _there(model.mean, device),
    )


def _there(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    # Copy: torch rejects read-only arrays.
    return torch.from_numpy(np.array(array, order="C")).to(device)
