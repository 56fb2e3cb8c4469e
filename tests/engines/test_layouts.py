"""KV layouts: what is written into blocks is read back, whatever the blocks, the strides and the element types."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.engines.layouts import (
    BlockLayout,
    check_block_size,
    head_shard,
    keys_and_values,
)
from kvabr.types.errors import FormatError, UsageError
from tests.engines.paging import paged_blocks
from tests.examples import examples

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
        with pytest.raises(FormatError, match="must have the same size"):
            paged_blocks([cache], [0], BlockLayout.TRANSPOSED, split).write(kv[:1, :, :, :SIZE])
    with pytest.raises(FormatError, match="the shape must be"):
        paged_blocks([cache], [4, 1], BlockLayout.PLAIN, split).write(kv)


def test_shapes_that_do_not_fit():
    cache = paged()
    with pytest.raises(FormatError, match="the shape must be"):
        paged_blocks([cache], [0, 1], BlockLayout.PLAIN).write(numbers(1)[None])
    with pytest.raises(FormatError, match="the shape must be"):
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
    with pytest.raises(UsageError, match="rank must be"):
        head_shard(8, 2, 2)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, 384])
def test_blocks_that_fit_groups(block):
    check_block_size(block, 128)


@pytest.mark.parametrize("block", [0, 48, 96, 192])
def test_blocks_that_do_not(block):
    with pytest.raises(UsageError, match="multiple of the other"):
        check_block_size(block, 128)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}
"""How far rounding may be off, relatively."""

worlds = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "ranks": st.sampled_from([1, 2, 3, 6, 12]),
        "heads": st.sampled_from([6, 12]),
        "block": st.sampled_from([1, 4, 16]),
        "dim": st.sampled_from([2, 6, 8]),
        "numbers": st.permutations(range(5)).flatmap(lambda order: st.integers(1, 5).map(lambda n: order[:n])),
        "layout": st.sampled_from(BlockLayout),
        "own": st.sampled_from(DTYPES),
        "engines": st.sampled_from(DTYPES),
        "seed": st.integers(0, 1 << 16),
    }
)


def made(world):
    """A contiguous cache [layer, K/V, head, token, dim] of normal numbers, of whole blocks."""
    dice = torch.Generator().manual_seed(world["seed"])
    tokens = len(world["numbers"]) * world["block"]
    shape = (world["layers"], 2, world["heads"], tokens, world["dim"])
    return (4 * torch.randn(shape, generator=dice)).to(world["own"])


def caches(world, heads):
    """A rank's caches, a layer each, full of NaN."""
    shape = (5, heads, world["block"], 2 * world["dim"])
    return [torch.full(shape, float("nan"), dtype=world["engines"]) for _ in range(world["layers"])]


@examples(60)
@given(worlds)
def test_over_ranks_and_blocks_and_back(world):
    kv = made(world)
    back = torch.full_like(kv, float("nan"))
    for rank in range(world["ranks"]):
        heads = head_shard(world["heads"], rank, world["ranks"])
        layers = caches(world, len(heads))
        mine = slice(heads.start, heads.stop)
        blocks = paged_blocks(layers, world["numbers"], world["layout"])
        blocks.write(kv[:, :, mine])
        blocks.read(back[:, :, mine])
        others = [block for block in range(5) if block not in world["numbers"]]
        assert all(bool(cache[others].isnan().all()) for cache in layers)
    if STEP[world["engines"]] <= STEP[world["own"]] and world["own"] is not torch.bfloat16:
        assert torch.equal(back, kv)  # the engine's element type holds all of the cache's numbers
    else:
        step = STEP[world["engines"]] or STEP[world["own"]]
        assert torch.allclose(back.float(), kv.float(), rtol=2 * step, atol=2.0**-24)


@pytest.mark.parametrize("layout", BlockLayout)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_what_is_beyond_fp16_becomes_its_largest_number(layout, own):
    cache = torch.zeros(1, 1, 2, 4, dtype=torch.float16)
    kv = torch.tensor([1e6, -1e6, 1.0, 0.0], dtype=own).view(1, 1, 2, 2).repeat(2, 1, 1, 1)
    paged_blocks([cache], [0], layout).write(kv[None])
    out = torch.empty_like(kv)
    paged_blocks([cache], [0], layout).read(out[None])
    wanted = torch.tensor([65504.0, -65504.0, 1.0, 0.0]).half().to(own).view(1, 1, 2, 2)
    assert torch.equal(out, wanted.expand(2, 1, 2, 2))
    wide = torch.full((1, 1, 2, 4), 1e6, dtype=own)
    short = torch.empty(2, 1, 2, 2, dtype=torch.float16)
    paged_blocks([wide], [0], layout).read(short[None])
    assert bool((short == 65504.0).all())
