"""Asynchronous copies to a device through pinned memory, on a separate stream; memory is from torch's pools."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.uncopied import uncopied
from kvabr.types.once import once

_TYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}
_ALIGN = 16
_MIN_APART = 512 << 10
"""Minimum size in bytes of pinned payloads to copy directly; gathering smaller ones is cheaper than a copy each."""


SCRATCH_BYTES = 4 << 30
"""Maximum bytes of scratch memory for groups coded at once; one group is always allowed."""


@cache
def scratch_bytes(device: torch.device) -> int:
    """Return the scratch memory in bytes: up to a quarter of the memory that is free at the first call."""
    if device.type != "cuda":
        return SCRATCH_BYTES
    return min(SCRATCH_BYTES, torch.cuda.mem_get_info(device)[0] // 4)


class Staged(NamedTuple):
    """Offset and size of an array on the device."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Staging:
    """Arrays copied to a device in one transfer: first `add` all, then `send`, then `view` them on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._size = device, 0
        self._pieces: list[tuple[int, NDArray[np.uint8]]] = []
        self._here: NDArray[np.uint8] | None = None
        self._pinned = self._there = torch.empty(0, dtype=torch.uint8)

    def add(self, array: NDArray[Any]) -> Staged:
        """Add an array. It must not change before `send`."""
        piece = Staged(self._size, _TYPES[array.dtype.name], array.shape)
        self._pieces.append((self._size, np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        self._size += -(-array.nbytes // _ALIGN) * _ALIGN
        return piece

    def reserve(self, size: int) -> Staged:
        """Reserve ``size`` bytes. Write them to the memory that `here` returns."""
        piece = Staged(self._size, torch.uint8, (size,))
        self._size += -(-size // _ALIGN) * _ALIGN
        return piece

    def here(self, piece: Staged) -> NDArray[np.uint8]:
        """Return the host memory of reserved bytes. No array can be added after this call."""
        if self._here is None:
            self._pinned = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._here = self._pinned.numpy()
            for at, each in self._pieces:
                self._here[at : at + len(each)] = each
        return self._here[piece.at : piece.at + piece.shape[0]]

    def send(self, *, first: bool = False) -> None:
        """Start the copy; later work on the current stream waits for it.

        The ``first`` copy runs on the current stream, which starts faster.
        """
        self.here(Staged(0, torch.uint8, (0,)))
        self._there = self._pinned
        if first:
            self._there = self._pinned.to(self._device, non_blocking=True)
        elif self._device.type == "cuda":
            with torch.cuda.stream(_beside(self._device)):
                self._there = self._pinned.to(self._device, non_blocking=True)
            _await_copies(self._there, self._device)

    def view(self, piece: Staged) -> torch.Tensor:
        """Return an array on the device; valid after `send`."""
        size = math.prod(piece.shape) * piece.dtype.itemsize
        return self._there[piece.at : piece.at + size].view(piece.dtype).view(piece.shape)


def _await_copies(there: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        current = torch.cuda.current_stream(device)
        there.record_stream(current)
        current.wait_stream(_beside(device))


def lie_apart(payloads: Sequence[bytes | memoryview]) -> bool:
    """Return True if payloads should be copied directly: all are in pinned memory, and large on average."""
    return sum(map(len, payloads)) >= _MIN_APART * len(payloads) and all(map(_is_pinned, payloads))


def _is_pinned(payload: bytes | memoryview) -> bool:
    under = getattr(payload, "obj", None)
    while (below := getattr(under, "base", getattr(under, "obj", None))) is not None:  # arrays, and views of memory
        under = below
    return getattr(under, "pinned", False)


def sent_apart(payloads: Sequence[bytes | memoryview], places: Sequence[int], device: torch.device) -> torch.Tensor:
    """Start to copy payloads directly to their offsets on the device; later work waits as for `Staging.send`.

    The last element of ``places`` is the total size in bytes.
    """
    with torch.cuda.stream(_beside(device)) if device.type == "cuda" else nullcontext():
        there = torch.empty(places[-1], dtype=torch.uint8, device=device)
        for at, payload in zip(places, payloads, strict=False):
            here = torch.frombuffer(uncopied(memoryview(payload)), dtype=torch.uint8)
            there[at : at + len(here)].copy_(here, non_blocking=True)
    _await_copies(there, device)
    return there


def pin(address: int, size: int) -> Callable[[], object] | None:
    """Pin memory for all devices; see `kvabr.store.buffers.Pin`."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, size, 0)):  # over the system's limit
        with suppress(RuntimeError):  # clear the error for later calls on this thread
            torch.zeros(1, device="cuda").add_(1)
        return None
    return partial(runtime.cudaHostUnregister, address)


@contextmanager
def settled(devices: Iterable[torch.device]) -> Iterator[None]:
    """On an error, wait for all copies to devices, since the caller may free memory in use."""
    try:
        yield
    except BaseException:
        used = set(devices)
        for device in used:
            if device.type == "cuda":
                _beside(device).synchronize()  # the current stream may not wait for it yet
        await_streams(used)
        raise


def await_streams(devices: Iterable[torch.device]) -> None:
    """Wait for the current streams of devices."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


@once
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
