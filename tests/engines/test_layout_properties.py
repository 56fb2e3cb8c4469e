"""KV layouts, whatever the shape: a cache cut over ranks and blocks, and put together again, is what it was."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.engines.layouts import BlockLayout, head_shard
from tests.engines.paging import paged_blocks
from tests.examples import examples

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


def paged(world, heads):
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
        layers = paged(world, len(heads))
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
