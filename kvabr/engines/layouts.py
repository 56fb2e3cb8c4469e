"""How engines lay out a KV cache, and how kvabr's one layout gets in and out of theirs. Pure functions over tensors.

kvabr's layout is ``[layer, K/V, head, token, dim]``. An engine that pages its cache keeps one tensor per layer, cut
into blocks of some tokens; which tokens a block holds only the engine knows, so here a block is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from kvabr.types.errors import FormatError, UsageError

_TOP = 65504.0
"""FP16's largest number."""


class BlockLayout(Enum):
    """How one layer's paged cache is laid out: [block, head, token, 2 x dim] to look at, with keys and values where?"""

    PLAIN = "plain"
    """Keys are the first dim numbers of each token, values the others (vLLM on GPUs; any strides)."""
    TRANSPOSED = "transposed"
    """A head of a block is 2 x token x dim numbers in a row: first its keys as [dim, token], then its values as
    [token, dim] (vLLM on CPUs, where the kernels read keys that way)."""


def keys_and_values(cache: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys and of the values of one layer's paged cache, both [block, head, token, dim].

    Args:
        cache: [block, head, token, 2 x dim].
        layout: what is where in it.

    Raises:
        FormatError: the cache is not of this shape, or, if transposed, does not lie in one piece.
    """
    if cache.dim() != 4 or cache.shape[-1] % 2:
        raise FormatError(f"a paged cache is [block, head, token, 2 x dim], this one is {tuple(cache.shape)}")
    blocks, heads, tokens, both = cache.shape
    dim = both // 2
    if layout is BlockLayout.PLAIN:
        return cache[..., :dim], cache[..., dim:]
    if cache.stride()[1:] != (tokens * both, both, 1):
        raise FormatError(f"a transposed cache lies head by head in one piece, this one has strides {cache.stride()}")
    step = cache.stride(0)
    keys = cache.as_strided((blocks, heads, tokens, dim), (step, tokens * both, 1, tokens))
    values = cache.as_strided(
        (blocks, heads, tokens, dim), (step, tokens * both, dim, 1), cache.storage_offset() + tokens * dim
    )
    return keys, values


def write_blocks(cache: torch.Tensor, blocks: torch.Tensor, kv: torch.Tensor, layout: BlockLayout) -> None:
    """Put whole blocks of one layer into an engine's paged cache.

    Args:
        cache: [block, head, token, 2 x dim], written.
        blocks: numbers of the blocks, [n] int64, on the cache's device.
        kv: [K/V, head, n x tokens of a block, dim], any float dtype, any device.
        layout: of the cache.

    Raises:
        FormatError: the shapes do not fit each other.
    """
    keys, values = keys_and_values(cache, layout)
    _, heads, size, dim = keys.shape
    count = len(blocks)
    if tuple(kv.shape) != (2, heads, count * size, dim):
        raise FormatError(f"{tuple(kv.shape)} is not the cache of {count} blocks, {(2, heads, count * size, dim)}")
    for target, part in zip((keys, values), kv, strict=True):
        cut = part.view(heads, count, size, dim) if part.is_contiguous() else part.reshape(heads, count, size, dim)
        target.index_copy_(0, blocks, _cast(cut.to(cache.device), cache.dtype).transpose(0, 1))


def read_blocks(cache: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, layout: BlockLayout) -> None:
    """Take whole blocks of one layer out of an engine's paged cache.

    Args:
        cache: [block, head, token, 2 x dim].
        blocks: numbers of the blocks, [n] int64, on the cache's device.
        out: [K/V, head, n x tokens of a block, dim], any float dtype, any device; written.
        layout: of the cache.

    Raises:
        FormatError: the shapes do not fit each other.
    """
    keys, values = keys_and_values(cache, layout)
    _, heads, size, dim = keys.shape
    count = len(blocks)
    if tuple(out.shape) != (2, heads, count * size, dim):
        raise FormatError(f"{tuple(out.shape)} does not take {count} blocks, {(2, heads, count * size, dim)} does")
    for source, part in zip((keys, values), out, strict=True):
        part.unflatten(1, (count, size)).copy_(_cast(source.index_select(0, blocks), part.dtype).transpose(0, 1))


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Another element type; what is beyond FP16 becomes its largest number, since one infinity ruins all attention."""
    cast = values.to(dtype)
    if dtype is torch.float16 and values.dtype is not dtype:
        cast.clamp_(-_TOP, _TOP)
    return cast


def head_shard(heads: int, rank: int, ranks: int) -> range:
    """The KV heads that one rank of a tensor-parallel engine holds.

    With more ranks than heads each head is held by several ranks, as vLLM, SGLang and Megatron have it.

    Args:
        heads: KV heads of the model.
        rank: which rank.
        ranks: how many there are.

    Raises:
        UsageError: heads and ranks do not divide each other, or there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise UsageError(f"rank {rank} of {ranks} tensor-parallel ranks: there is no such rank")
    if heads % ranks and ranks % heads:
        raise UsageError(f"{heads} KV heads cannot be spread over {ranks} tensor-parallel ranks")
    each = max(1, heads // ranks)
    first = rank * heads // ranks
    return range(first, first + each)


def whole_blocks(tokens: int, block: int) -> int:
    """Tokens of the blocks that so many tokens fill."""
    return tokens // block * block


def check_block_size(block: int, group: int) -> None:
    """Refuse blocks that do not fit an asset's groups.

    Args:
        block: tokens in one of the engine's blocks.
        group: tokens in one of the asset's groups.

    Raises:
        UsageError: neither divides the other.
    """
    if block <= 0 or (block % group and group % block):
        fitting = ", ".join(str(size) for size in (16, 32, 64, 128, 256) if not (size % group and group % size))
        raise UsageError(
            f"blocks of {block} tokens and groups of {group} do not fit each other: one must be a multiple of the "
            f"other; start the engine with another block size, such as {fitting or group}"
        )


def indices(blocks: Sequence[int], cache: torch.Tensor) -> torch.Tensor:
    """Block numbers as `write_blocks` and `read_blocks` want them, once for all layers."""
    return torch.tensor(list(blocks), dtype=torch.int64, device=cache.device)
