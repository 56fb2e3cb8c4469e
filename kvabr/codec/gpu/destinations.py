"""Where kernels write: a tensor of any strides, or the blocks of an engine's paged cache.

Both are addresses, one for each layer's keys and values, and offsets from these, one for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.native.coder_model import DTYPES, DecodeJob
from kvabr.types.errors import FormatError


@dataclass(frozen=True, eq=False)
class Destination:
    """What the kernels need to know."""

    addresses: NDArray[np.int64]
    """[layer, K/V], flattened."""
    offsets: NDArray[np.int64]
    """[token]: in elements; negative: not written."""
    strides: tuple[int, int]
    """Of heads and dims, in elements."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_tensor(cls, out: torch.Tensor) -> Destination:
        """Describe a tensor [layer, K/V, head, token, dim]."""
        by_layer, by_half, by_head, by_token, by_dim = out.stride()
        layer, half = np.arange(out.shape[0])[:, None] * by_layer, np.arange(out.shape[1]) * by_half
        addresses = out.data_ptr() + out.element_size() * (layer + half).reshape(-1)
        return cls(addresses, np.arange(out.shape[3]) * by_token, (by_head, by_dim), out.dtype, out.device)

    @classmethod
    def of_blocks(cls, blocks: BlockSlots) -> Destination:
        """Describe blocks."""
        first = blocks.first
        by_block, by_head, by_token, by_dim = first.stride()
        size, slots = first.shape[2], blocks.slots
        offsets = np.where(slots < 0, -1, slots // size * by_block + slots % size * by_token)
        addresses = np.array([view.data_ptr() for layer in blocks.layers for view in layer], np.int64)
        return cls(addresses, offsets, (by_head, by_dim), first.dtype, first.device)


def check_blocks(job: DecodeJob, blocks: BlockSlots) -> None:
    """Raise a `FormatError` unless kernels can write a job's group to these blocks."""
    if not blocks.fits(job.out.shape) or blocks.first.dtype not in DTYPES:
        raise FormatError(f"{tuple(job.out.shape)} cannot be decoded to blocks {tuple(blocks.first.shape)}")
