"""Memory for a cache: a tensor like any other, whatever pages it lies on."""

from __future__ import annotations

import gc

import pytest
import torch

from kvabr.client.resources import allocate


@pytest.mark.parametrize("tokens", [1, 127, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_a_tensor_of_its_own(tokens: int, dtype: torch.dtype) -> None:
    shape = (2, 2, 8, tokens, 64)
    one, other = allocate(shape, dtype), allocate(shape, dtype)
    assert (tuple(one.shape), one.dtype, one.is_contiguous()) == (shape, dtype, True)
    one.fill_(1)
    other.fill_(2)
    assert bool((one == 1).all())
    assert bool((other == 2).all())


def test_a_view_keeps_its_memory() -> None:
    last = allocate((1 << 23,), torch.float16).fill_(3)[-8:]
    gc.collect()
    assert last.tolist() == [3.0] * 8


def test_too_much_is_refused() -> None:
    with pytest.raises(RuntimeError, match="bytes cannot be allocated"):
        allocate((1 << 50,), torch.float16)
