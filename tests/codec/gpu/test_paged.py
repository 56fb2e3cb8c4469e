"""Decoding straight into the blocks of an engine's paged cache: the bits of a contiguous decode, and nothing beside."""

import numpy as np
import pytest
import torch

from kvabr.codec import gpu
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.paged import CodedGroup, expand
from kvabr.engines.layouts import BlockLayout, keys_and_values
from kvabr.types.errors import FormatError
from tests.codec.gpu.cases import SHAPE, STEP, expected, fitted, long, payloads, same
from tests.codec.gpu.conftest import DEVICE
from tests.codec.native import models
from tests.codec.test_ac import FIRST, encode
from tests.kvdata import related

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import decoder, levels  # not without Triton

BLOCKS, SIZE, UNTOUCHED = 9, 16, -7.0


def halves_first(layers, heads, dim, dtype):
    """[2, block, token, head, dim] of each layer: vLLM's FlashAttention, before."""
    own = [torch.full((2, BLOCKS, SIZE, heads, dim), UNTOUCHED, dtype=dtype, device=DEVICE) for _ in range(layers)]
    return own, [[cache[half].transpose(1, 2) for half in (0, 1)] for cache in own]


def blocks_first(layers, heads, dim, dtype):
    """[block, 2, token, head, dim]: vLLM's FlashInfer, before."""
    own = [torch.full((BLOCKS, 2, SIZE, heads, dim), UNTOUCHED, dtype=dtype, device=DEVICE) for _ in range(layers)]
    return own, [[cache[:, half].transpose(1, 2) for half in (0, 1)] for cache in own]


def apart(layers, heads, dim, dtype):
    """Keys and values in tensors of their own, [block, token, head, dim]."""
    own = [torch.full((BLOCKS, SIZE, heads, dim), UNTOUCHED, dtype=dtype, device=DEVICE) for _ in range(2 * layers)]
    return own, [[own[2 * at].transpose(1, 2), own[2 * at + 1].transpose(1, 2)] for at in range(layers)]


def together(layers, heads, dim, dtype):
    """[block, head, token, dim of key and value]: vLLM, now."""
    own = [torch.full((BLOCKS, heads, SIZE, 2 * dim), UNTOUCHED, dtype=dtype, device=DEVICE) for _ in range(layers)]
    return own, [keys_and_values(cache, BlockLayout.PLAIN) for cache in own]


LAYOUTS = (halves_first, blocks_first, apart, together)


def slots_of(seed, tokens):
    """Slots in shuffled blocks, one of them not wanted."""
    dice = np.random.default_rng(seed)
    numbers = dice.permutation(BLOCKS)[: -(-tokens // SIZE)]
    slots = (numbers[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:tokens]
    slots[tokens // 2 : tokens // 2 + 3] = -1
    return slots


def there(views, slots):
    """What a cache holds in some slots, [layer, K/V, head, token, dim]."""
    return torch.stack(
        [torch.stack([view[slots // SIZE, :, slots % SIZE].transpose(0, 1) for view in layer]) for layer in views]
    )


def check(own, views, slots, wanted):
    used = torch.from_numpy(np.flatnonzero(slots >= 0))
    at = torch.from_numpy(slots[slots >= 0]).to(DEVICE)
    assert same(there(views, at), wanted[:, :, :, used])
    for layer in views:
        for view in layer:
            view[at // SIZE, :, at % SIZE] = UNTOUCHED
    assert all(bool((cache == UNTOUCHED).all()) for cache in own)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_write_the_bits_of_a_contiguous_cache(layout):
    case = models.replace(long(21, 70), references=models.some_references(np.random.default_rng(3), 70))
    coded, dtype = payloads(case), torch.bfloat16
    own, views = layout(1, 1, 3, dtype)
    slots = slots_of(1, 70)
    job = case.job(coded, STEP, 4, torch.empty(case.shape(), dtype=dtype, device="meta"))
    decoder.decode_to_blocks([job], [BlockSlots(views, slots)])
    check(own, views, slots, expected(case, coded, 4, dtype))


def test_nothing_but_the_blocks_is_touched(guarded):
    case = long(22, 40)
    coded = payloads(case)
    (own,), views = together(1, 1, 3, torch.float32)
    job = case.job(coded, STEP, 0, torch.empty(case.shape(), device="meta"))
    slots = slots_of(3, 40)
    guarded(own, lambda: decoder.decode_to_blocks([job], [BlockSlots(views, slots)]))
    check([own], views, slots, expected(case, coded, 0, torch.float32))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("track", ["AC-L1", "Int8", "FP16"])
def test_every_level_decodes_to_blocks(track, kernels, monkeypatch):
    ran = []
    first = 0  # with sinks
    kv = related(SHAPE, 70, 5, first)
    context = GroupContext(SHAPE, first, 70, fitted())
    coded = list(map(memoryview, encode(kv, fitted(), track, first)))
    wanted = torch.empty(SHAPE.shape(70), dtype=torch.bfloat16)
    codec(track).decode(coded[-1], context, wanted, coded[:-1])
    own, views = blocks_first(SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim, torch.bfloat16)
    slots = slots_of(4, 70)
    monkeypatch.setattr(gpu, "runs_on", lambda _: kernels)
    for module, name in ((decoder, "decode_to_blocks"), (levels, "expand_to_blocks")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, whole=whole: (ran.append(given), whole(*given)))
    group = CodedGroup(coded[-1], track, context, coded[:-1])
    assert expand([group], [BlockSlots(views, slots)]) == [None]
    check(own, views, slots, wanted)
    assert len(ran) == kernels


@pytest.mark.parametrize("slots", [[0, 1, 1], [0, 1, BLOCKS * SIZE]])
def test_slots_that_are_not_there_or_taken_are_refused(slots):
    _, views = apart(1, 1, 3, torch.float32)
    with pytest.raises(FormatError, match="slot"):
        BlockSlots(views, np.array(slots))


def test_blocks_of_another_shape_are_refused():
    case = long(22, 5)
    _, views = apart(1, 1, 4, torch.float32)
    job = case.job(payloads(case), STEP, 0, torch.empty(case.shape(), device="meta"))
    with pytest.raises(FormatError, match="cannot hold a group"):
        decoder.decode_to_blocks([job], [BlockSlots(views, np.arange(5))])
    context = GroupContext(SHAPE, FIRST, 5, fitted())
    (error,) = expand([CodedGroup(memoryview(b""), "Int8", context)], [BlockSlots(views, np.arange(5))])
    assert isinstance(error, FormatError)
    assert "the place must have the shape" in str(error)
    _, unlike = apart(2, 1, 4, torch.float32)
    with pytest.raises(FormatError, match="must be views"):
        BlockSlots([views[0], [unlike[0][0][:, :, :8], unlike[0][1]]], np.arange(5))
