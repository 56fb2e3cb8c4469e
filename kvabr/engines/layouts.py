"""Layouts of engines' KV caches, and conversion to and from kvabr's. Pure functions over tensors.

kvabr's layout is ``[layer, K/V, head, token, dim]`` per layer class (`kvabr.types.kv`). A paged engine keeps one tensor
per layer, cut into blocks of some tokens. Only the engine knows which tokens a block holds; here it is a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from kvabr.codec.block_slots import BlockLayers
from kvabr.types.errors import FormatError, UsageError

_FP16_MAX = 65504.0


class BlockLayout(Enum):
    """Where keys and values are in one layer's paged cache, [block, head, token, dim of key and value]."""

    PLAIN = "plain"
    """The first numbers of each token are its key, the others its value (vLLM on GPUs; any strides)."""
    TRANSPOSED = "transposed"
    """Each head of a block is contiguous: keys as [dim, token], then values as [token, dim] (vLLM on CPUs, where the
    kernels read keys that way)."""


def keys_and_values(
    cache: torch.Tensor, layout: BlockLayout, k_dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a layer's paged cache, [block, head, token, dim of key and value].

    Both are views, [block, head, token, dim]. Keys have ``k_dim`` dimensions; None: as many as values.

    Raises:
        FormatError: the cache has another shape, or is transposed and not contiguous, or transposed with keys and
            values of unlike dimensions.
    """
    if cache.dim() != 4 or (k_dim is None and cache.shape[-1] % 2):
        raise FormatError(f"a paged cache is [block, head, token, 2 x dim], this one is {tuple(cache.shape)}")
    blocks, heads, tokens, both = cache.shape
    dim = both // 2 if k_dim is None else k_dim
    if layout is BlockLayout.PLAIN:
        return cache[..., :dim], cache[..., dim:]
    if 2 * dim != both:
        raise FormatError(f"a transposed cache has keys and values alike, not {dim} and {both - dim} dimensions")
    if cache.stride()[1:] != (tokens * both, both, 1):
        raise FormatError(
            f"a transposed cache must be contiguous within a block, this one has strides {cache.stride()}"
        )
    step = cache.stride(0)
    first = cache.storage_offset()
    keys = cache.as_strided((blocks, heads, tokens, dim), (step, tokens * both, 1, tokens), first)
    values = cache.as_strided((blocks, heads, tokens, dim), (step, tokens * both, dim, 1), first + tokens * dim)
    return keys, values


def block_layers(
    caches: Sequence[torch.Tensor], layout: BlockLayout, split: tuple[int, int], dtype: torch.dtype
) -> BlockLayers:
    """Return layers of a paged cache as groups of ``dtype`` are decoded to them; errors as `keys_and_values`.

    ``split``: dimensions of keys and values. Unlike ones, and one vector per token, are one half; see `PagedBlocks`.
    """
    caches = [cache.view(dtype) if cache.dtype.itemsize == dtype.itemsize == 1 else cache for cache in caches]
    k_dim, v_dim = split
    if k_dim == v_dim:
        return BlockLayers([keys_and_values(cache, layout, k_dim) for cache in caches])
    if layout is not BlockLayout.PLAIN and v_dim:
        raise FormatError(f"a transposed cache has keys and values alike, not {k_dim} and {v_dim} dimensions")
    return BlockLayers([(cache,) for cache in caches])


@dataclass(frozen=True, slots=True)
class PagedBlocks:
    """Some blocks of a paged cache: plays write them, publications read them."""

    layers: Sequence[torch.Tensor]
    """One tensor per layer, [block, head, token, dim of key and value]."""
    blocks: Sequence[int]
    """Numbers of the blocks, in the order of their tokens."""
    layout: BlockLayout
    split: tuple[int, int] | None = None
    """Dimensions of keys and of values; None: half each. See `kvabr.types.kv.LayerClass.split`."""

    def write(self, kv: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Copy KV into the blocks.

        Args:
            kv: [layer, K/V, head, token, dim], or a tensor of each layer, with all tokens of the blocks, any float
                dtype, any device. Of unlike keys and values, or of one vector per token, the second axis has length 1.

        Raises:
            FormatError: it has another shape.
        """
        numbers = self._numbers()
        for own, part in self._pairs(kv):
            own.index_copy_(0, numbers, cast(part.to(own.device), own.dtype).transpose(0, 1))

    def read(self, out: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Copy the KV of the blocks into ``out``, of the shape that `write` takes; `FormatError` if it is another."""
        numbers = self._numbers()
        for own, part in self._pairs(out):
            part.copy_(cast(own.index_select(0, numbers), part.dtype).transpose(0, 1))

    def _numbers(self) -> torch.Tensor:
        return torch.tensor(list(self.blocks), dtype=torch.int64, device=self.layers[0].device)

    def _pairs(self, kv: torch.Tensor | Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys, then the values, of each layer's whole cache, with its part of ``kv``, [head, block, ...]."""
        count, (_, heads, size, both) = len(self.blocks), self.layers[0].shape
        k_dim, v_dim = self.split or (both // 2, both // 2)
        alike = k_dim == v_dim
        one = (2, heads, count * size, k_dim) if alike else (1, heads, count * size, k_dim + v_dim)
        if len(kv) != len(self.layers):
            raise FormatError(f"{len(kv)} layers were given, the cache has {len(self.layers)}")
        for cache, own in zip(self.layers, kv, strict=True):
            _check(own, one, f"{count} blocks")
            parts = own.unflatten(2, (count, size))
            halves = (parts[0], parts[1]) if alike else (parts[0][..., :k_dim], parts[0][..., k_dim:])
            places = keys_and_values(cache, self.layout, None if self.split is None else k_dim)
            yield places[0], halves[0]
            if v_dim:
                yield places[1], halves[1]


def _check(kv: torch.Tensor, wanted: Sequence[int], place: str) -> None:
    if tuple(kv.shape) != tuple(wanted):
        raise FormatError(f"{tuple(kv.shape)} is not the shape of {place}, {tuple(wanted)}")


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in another dtype; FP16 is clamped to its range, since one infinity ruins all attention."""
    converted = values.to(dtype)
    if dtype is torch.float16 and values.dtype is not dtype:
        converted.clamp_(-_FP16_MAX, _FP16_MAX)
    return converted


def head_shard(heads: int, rank: int, ranks: int) -> range:
    """Return the KV heads, of ``heads`` in the model, that one rank of a tensor-parallel engine holds.

    With more ranks than heads each head is held by several ranks, as in vLLM, SGLang and Megatron.

    Raises:
        UsageError: heads and ranks do not divide each other, or there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise UsageError(f"there is no rank {rank} among {ranks} tensor-parallel ranks")
    if heads % ranks and ranks % heads:
        raise UsageError(f"{heads} KV heads cannot be spread over {ranks} tensor-parallel ranks")
    each = max(1, heads // ranks)
    first = rank * heads // ranks
    return range(first, first + each)


def whole_blocks(tokens: int, block: int) -> int:
    """Return the number of tokens in the blocks that ``tokens`` fill completely."""
    return tokens // block * block


def check_block_size(block: int, group: int) -> None:
    """Raise `UsageError` unless an engine's block size and an asset's group size, in tokens, divide one another."""
    if block <= 0 or (block % group and group % block):
        fitting = ", ".join(str(size) for size in (16, 32, 64, 128, 256) if not (size % group and group % size))
        raise UsageError(
            f"blocks of {block} tokens and groups of {group} do not fit each other: one must be a multiple of the "
            f"other; start the engine with another block size, such as {fitting or group}"
        )
