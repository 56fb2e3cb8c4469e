"""Layouts of engines' KV caches, and their conversion to and from kvabr's layout. Pure functions over tensors.

A paged engine has one tensor per layer, cut into numbered blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from kvabr.codec.block_slots import BlockLayers
from kvabr.types.errors import FormatError, UsageError


class BlockLayout(Enum):
    """Order of keys and values in one layer's paged cache, [block, head, token, dim of key and value]."""

    PLAIN = "plain"
    """Each token's key, then its value (vLLM on GPUs; any strides)."""
    TRANSPOSED = "transposed"
    """Each head of a block is contiguous: keys as [dim, token], then values as [token, dim] (vLLM on CPUs)."""


def keys_and_values(
    cache: torch.Tensor, layout: BlockLayout, k_dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of keys and values, [block, head, token, dim], of a layer's paged cache.

    ``k_dim`` defaults to half of the dimensions. Raise `FormatError` for another shape, or if a transposed cache is not
    contiguous or its keys and values have different dimensions.
    """
    if cache.dim() != 4 or (k_dim is None and cache.shape[-1] % 2):
        raise FormatError(f"a paged cache must be [block, head, token, 2 x dim], got {tuple(cache.shape)}")
    blocks, heads, tokens, both = cache.shape
    dim = both // 2 if k_dim is None else k_dim
    if layout is BlockLayout.PLAIN:
        return cache[..., :dim], cache[..., dim:]
    if 2 * dim != both:
        raise FormatError(f"keys and values of a transposed cache must have the same size, got {dim} and {both - dim}")
    if cache.stride()[1:] != (tokens * both, both, 1):
        raise FormatError(f"a transposed cache must be contiguous within a block, got the strides {cache.stride()}")
    step = cache.stride(0)
    first = cache.storage_offset()
    keys = cache.as_strided((blocks, heads, tokens, dim), (step, tokens * both, 1, tokens), first)
    values = cache.as_strided((blocks, heads, tokens, dim), (step, tokens * both, dim, 1), first + tokens * dim)
    return keys, values


def block_layers(
    caches: Sequence[torch.Tensor], layout: BlockLayout, split: tuple[int, int], dtype: torch.dtype
) -> BlockLayers:
    """Return the layers of a paged cache for decoding groups of ``dtype``; errors as `keys_and_values`.

    ``split`` has the dimensions of keys and of values. If they differ, or for one vector per token, a layer has a
    single view.
    """
    caches = [cache.view(dtype) if cache.dtype.itemsize == dtype.itemsize == 1 else cache for cache in caches]
    k_dim, v_dim = split
    if k_dim == v_dim:
        return BlockLayers([keys_and_values(cache, layout, k_dim) for cache in caches])
    if layout is not BlockLayout.PLAIN and v_dim:
        raise FormatError(f"keys and values of a transposed cache must have the same size, got {k_dim} and {v_dim}")
    return BlockLayers([(cache,) for cache in caches])


def head_shard(heads: int, rank: int, ranks: int) -> range:
    """Return the KV heads, out of ``heads``, that one rank of a tensor-parallel engine holds.

    With more ranks than heads, several ranks hold each head. Raise `UsageError` for an unknown rank, or if neither
    number divides the other.
    """
    if not 0 <= rank < ranks:
        raise UsageError(f"rank must be 0 or more and less than the {ranks} tensor-parallel ranks, got {rank}")
    if heads % ranks and ranks % heads:
        raise UsageError(f"{heads} KV heads cannot be spread over {ranks} tensor-parallel ranks")
    each = max(1, heads // ranks)
    first = rank * heads // ranks
    return range(first, first + each)


def whole_blocks(tokens: int, block: int) -> int:
    """Return the number of tokens in full blocks of ``block`` tokens."""
    return tokens // block * block


def check_block_size(block: int, group: int) -> None:
    """Raise `UsageError` unless an engine's block size divides the group size or vice versa, both in tokens."""
    if block <= 0 or (block % group and group % block):
        fitting = ", ".join(str(size) for size in (16, 32, 64, 128, 256) if not (size % group and group % size))
        raise UsageError(
            f"blocks of {block} tokens and groups of {group} tokens do not match: one must be a multiple of the other; "
            f"start the engine with another block size, such as {fitting or group}"
        )
