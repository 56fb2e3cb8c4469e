"""Destinations of kernels: addresses of layers' keys and values, and token offsets from these addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.native.coder_model import DTYPES
from kvabr.types.errors import FormatError


@dataclass(frozen=True, eq=False)
class WriteTarget:
    """A tensor of any strides, or the blocks of a paged cache, as kernels address it."""

    address: int
    addresses: NDArray[np.int64]
    """Byte addresses, [layer, K/V] flattened."""
    offsets: NDArray[np.int64]
    """Offset of each token in elements, [token]; negative: token is not written."""
    strides: tuple[int, int]
    """Strides of heads and dims, in elements."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_tensor(cls, out: torch.Tensor) -> WriteTarget:
        """Describe a tensor [layer, K/V, head, token, dim]."""
        by_layer, by_half, by_head, by_token, by_dim = out.stride()
        size = out.element_size()
        addresses = _grid(out.shape[0], by_layer * size, out.shape[1], by_half * size)
        offsets = _grid(out.shape[3], by_token, 1, 0)
        return cls(out.data_ptr(), addresses, offsets, (by_head, by_dim), out.dtype, out.device)

    @classmethod
    def of_blocks(cls, blocks: BlockSlots) -> WriteTarget:
        """Describe the slots of a paged cache."""
        first = blocks.first
        by_block, by_head, by_token, by_dim = first.stride()
        size, slots = first.shape[2], blocks.slots
        offsets = np.where(slots < 0, -1, slots // size * by_block + slots % size * by_token)
        return cls(0, blocks.checked.addresses, offsets, (by_head, by_dim), first.dtype, first.device)


@lru_cache(maxsize=256)
def _grid(rows: int, by_row: int, columns: int, by_column: int) -> NDArray[np.int64]:
    """Return the offsets of a matrix's elements in row-major order."""
    return (np.arange(rows)[:, None] * by_row + np.arange(columns) * by_column).reshape(-1)


def check_blocks(shape: Sequence[int], blocks: BlockSlots) -> None:
    """Raise `FormatError` unless kernels can write a group of this shape to these blocks."""
    if not blocks.fits(shape) or blocks.dtype not in DTYPES or blocks.direct is None:
        raise FormatError(f"blocks of shape {tuple(blocks.first.shape)} cannot hold a group of shape {tuple(shape)}")
