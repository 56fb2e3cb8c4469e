"""Where groups belong in an engine's memory, written by torch: whole blocks, parts of them, and codes."""

import numpy as np
import pytest
import torch

from kvabr.codec.block_slots import BlockLayers, BlockSlots, TensorPlace

BLOCK, HEADS, DIM = 4, 2, 8


def paged(dtype, layers=3):
    """[block, head, token, dim of key and value] of each layer, all zeros; and its halves."""
    own = [torch.zeros(9, HEADS, BLOCK, 2 * DIM).to(dtype) for _ in range(layers)]
    return own, BlockLayers([(cache[..., :DIM], cache[..., DIM:]) for cache in own])


def group_of(tokens, dtype, layers=3):
    return torch.randint(-9, 9, (layers, 2, HEADS, tokens, DIM)).to(dtype)


def numbers(tensor):
    return tensor.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "slots",
    [
        np.arange(8, 16),
        np.array([28, 29, 30, 31, 4, 5, 6, 7]),  # whole blocks, in any order
        np.array([-1, -1, 10, 11, 0, 1, 2, 3]),  # not all of it is wanted, or whole
        np.array([-1, -1, -1, -1, 12, 13, 14, 15]),
        np.array([5, 0, -1, 35, 17, 3, 2, 1]),
    ],
    ids=["in order", "blocks", "a part of a block", "the second block", "anywhere"],
)
def test_tokens_are_written_to_their_slots_and_nowhere_else(slots, dtype):
    own, layers = paged(dtype)
    group = group_of(len(slots), dtype)
    BlockSlots(layers, slots).write(group)
    wanted = [torch.zeros(9, HEADS, BLOCK, 2 * DIM) for _ in own]
    for token, slot in enumerate(slots):
        if slot >= 0:
            for layer, cache in enumerate(wanted):
                cache[slot // BLOCK, :, slot % BLOCK] = numbers(group[layer, :, :, token]).transpose(0, 1).flatten(1)
    assert all(torch.equal(numbers(cache), want) for cache, want in zip(own, wanted, strict=True))


def test_some_tokens_of_a_group_go_to_their_own_slots():
    own, layers = paged(torch.float32)
    group, tokens = group_of(2, torch.float32), np.array([1, 5])
    BlockSlots(layers, np.arange(8)).write(group, tokens)
    assert torch.equal(own[0][0, :, 1, :DIM], group[0, 0, :, 0])
    assert torch.equal(own[2][1, :, 1, DIM:], group[2, 1, :, 1])
    assert not own[0][0, :, 0].any()


def test_a_tensor_is_a_place_too():
    out = torch.zeros(3, 2, HEADS, 8, DIM)
    place, group = TensorPlace(out), group_of(8, torch.float32)
    assert place.fits(group.shape)
    assert not place.fits(group[:2].shape)
    place.direct.write(group)
    assert torch.equal(out, group)
    place.write(2 * group)
    assert torch.equal(out, 2 * group)
