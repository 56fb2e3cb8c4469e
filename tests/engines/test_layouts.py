"""KV layouts: what is written into blocks is read back, whatever the blocks, the strides and the element types."""

import pytest
import torch

from kvabr.engines.layouts import (
    BlockLayout,
    check_block_size,
    head_shard,
    keys_and_values,
)
from kvabr.types.errors import FormatError, UsageError
from tests.engines.paging import paged_blocks

BLOCKS, HEADS, SIZE, DIM = 7, 3, 8, 4


def paged(dtype=torch.float32, *, tokens_outside_heads=False):
    """A cache full of NaN: what is not written shows."""
    if tokens_outside_heads:
        whole = torch.full((BLOCKS, SIZE, HEADS, 2 * DIM), float("nan"), dtype=dtype)
        return whole.transpose(1, 2)
    return torch.full((BLOCKS, HEADS, SIZE, 2 * DIM), float("nan"), dtype=dtype)


def numbers(count):
    return torch.arange(2 * HEADS * count * SIZE * DIM, dtype=torch.float32).view(2, HEADS, count * SIZE, DIM) % 1013


def test_the_plain_layout_takes_any_strides():
    cache = paged(tokens_outside_heads=True)
    kv = numbers(2)
    paged_blocks([cache], [4, 0], BlockLayout.PLAIN).write(kv[None])
    assert torch.equal(cache[4][..., :DIM], kv[0, :, :SIZE])
    assert torch.equal(cache[0][..., DIM:], kv[1, :, SIZE:])
    with pytest.raises(FormatError, match="must be contiguous"):
        keys_and_values(cache, BlockLayout.TRANSPOSED)


def test_the_transposed_layout_is_that_of_the_processor_kernels():
    """A head of a block: keys as [dim, token], then values as [token, dim]."""
    cache = paged()
    kv = numbers(1)
    paged_blocks([cache], [2], BlockLayout.TRANSPOSED).write(kv[None])
    row = cache[2, 1].flatten()
    assert torch.equal(row[: SIZE * DIM], kv[0, 1].T.flatten())
    assert torch.equal(row[SIZE * DIM :], kv[1, 1].flatten())


@pytest.mark.parametrize("split", [(6, 2), (8, 0)])
def test_keys_and_values_of_unlike_dims(split):
    """The second axis has length 1: keys and values lie side by side, or there is one vector per token."""
    cache = torch.full((BLOCKS, HEADS, SIZE, sum(split)), float("nan"))
    kv = torch.rand(2, 1, HEADS, 2 * SIZE, sum(split))
    paged_blocks([cache, cache.clone()], [4, 1], BlockLayout.PLAIN, split).write(kv)
    assert torch.equal(cache[1], kv[0, 0, :, SIZE:])
    out = torch.empty_like(kv[:1])
    paged_blocks([cache], [4, 1], BlockLayout.PLAIN, split).read(out)
    assert torch.equal(out, kv[:1])
    if split[1]:
        with pytest.raises(FormatError, match="keys and values alike"):
            paged_blocks([cache], [0], BlockLayout.TRANSPOSED, split).write(kv[:1, :, :, :SIZE])
    with pytest.raises(FormatError, match="not the shape"):
        paged_blocks([cache], [4, 1], BlockLayout.PLAIN, split).write(kv)


def test_shapes_that_do_not_fit():
    cache = paged()
    with pytest.raises(FormatError, match="not the shape"):
        paged_blocks([cache], [0, 1], BlockLayout.PLAIN).write(numbers(1)[None])
    with pytest.raises(FormatError, match="not the shape"):
        paged_blocks([cache], [0], BlockLayout.PLAIN).read(numbers(2)[None])
    with pytest.raises(FormatError, match="paged cache"):
        keys_and_values(cache[..., 1:], BlockLayout.PLAIN)
    with pytest.raises(FormatError, match="slot"):
        paged_blocks([cache], [BLOCKS], BlockLayout.PLAIN).write(numbers(1)[None])


@pytest.mark.parametrize(
    ("heads", "ranks", "shards"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (3, 3, [range(1), range(1, 2), range(2, 3)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),  # more ranks than heads: each is held twice
    ],
)
def test_heads_of_each_rank(heads, ranks, shards):
    assert [head_shard(heads, rank, ranks) for rank in range(ranks)] == shards


def test_heads_that_cannot_be_spread():
    with pytest.raises(UsageError, match="3 KV heads"):
        head_shard(3, 0, 2)
    with pytest.raises(UsageError, match="there is no rank"):
        head_shard(8, 2, 2)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, 384])
def test_blocks_that_fit_groups(block):
    check_block_size(block, 128)


@pytest.mark.parametrize("block", [0, 48, 96, 192])
def test_blocks_that_do_not(block):
    with pytest.raises(UsageError, match="multiple of the other"):
        check_block_size(block, 128)
