"""Copies to a device by way of pinned memory, on a stream of their own: kernels run meanwhile, and nothing waits.

Memory comes from torch's pools, which reuse it as soon as it is no longer needed.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_TYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}
_ALIGN = 16
"""Of every array, in bytes."""


class Staged(NamedTuple):
    """Where an array is on the device."""

    at: int
    """In bytes, a multiple of 16."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class Staging:
    """Small arrays that go to a device together: first `add` all, then `send`, then `view` them there."""

    def __init__(self, device: torch.device) -> None:
        """Begin with nothing."""
        self._device, self._size = device, 0
        self._pieces: list[tuple[int, NDArray[np.uint8]]] = []
        self._there = torch.empty(0, dtype=torch.uint8)

    def add(self, array: NDArray[Any]) -> Staged:
        """Take an array, which must not change before `send`."""
        piece = Staged(self._size, _TYPES[array.dtype.name], array.shape)
        self._pieces.append((self._size, np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        self._size += -(-array.nbytes // _ALIGN) * _ALIGN
        return piece

    def send(self) -> None:
        """Begin to copy all."""
        here = pinned(self._size, self._device)
        numbers = here.numpy()
        for at, piece in self._pieces:
            numbers[at : at + len(piece)] = piece
        self._there = sent(here, self._device)

    def view(self, piece: Staged) -> torch.Tensor:
        """Return an array on the device, after `send`."""
        size = int(np.prod(piece.shape, dtype=np.int64)) * piece.dtype.itemsize
        return self._there[piece.at : piece.at + size].view(piece.dtype).reshape(piece.shape)


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Return bytes on the host that a device copies from by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def sent(here: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy pinned bytes; return those on the device. What the current stream does next waits for them."""
    if device.type != "cuda":
        return here
    current, beside = torch.cuda.current_stream(device), _beside(device)
    with torch.cuda.stream(beside):
        there = here.to(device, non_blocking=True)
    there.record_stream(current)
    current.wait_stream(beside)
    return there


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies to a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
