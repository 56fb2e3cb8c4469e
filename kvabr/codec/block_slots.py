"""Where a group's tokens go in an engine's memory: blocks of a paged cache, or one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX


class Place(Protocol):
    """Destination memory of one group, see `kvabr.codec.paged`."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""

    @property
    def device(self) -> torch.device:
        """Device of the memory."""

    @property
    def whole(self) -> torch.Tensor | None:
        """The memory as one tensor [layer, K/V, head, token, dim]; None if it consists of several."""

    @property
    def direct(self) -> BlockSlots | None:
        """The memory as slots for kernels to write; None if they cannot."""

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True if a group of this shape, [layer, K/V, head, token, dim], fits."""

    def write(self, group: torch.Tensor) -> None:
        """Copy a decoded group of `dtype` on `device` to this memory."""


class CacheTensor:
    """A tensor, [layer, K/V, head, token, dim] of any strides, to hold several groups."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @cached_property
    def layers(self) -> BlockLayers:
        """The tensor, as one block per layer."""
        layers, halves, *_ = self.tensor.shape
        if self.tensor.stride(0) == halves * self.tensor.stride(1):
            views = self.tensor.view(layers * halves, 1, *self.tensor.shape[2:]).unbind()
            return BlockLayers.uniform(views[first : first + halves] for first in range(0, len(views), halves))
        return BlockLayers([[half[None] for half in layer.unbind()] for layer in self.tensor.unbind()])

    def place(self, first: int, tokens: int) -> TensorPlace:
        """Return the place of ``tokens`` tokens from ``first`` on."""
        return TensorPlace(self.tensor[:, :, :, first : first + tokens], self, first)


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """A tensor, [layer, K/V, head, token, dim] of any strides; a `Place`."""

    whole: torch.Tensor
    cache: CacheTensor | None = None
    first: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def direct(self) -> BlockSlots:
        """The tensor, or the larger one that contains it, as one block per layer."""
        cache = self.cache or CacheTensor(self.whole)
        return BlockSlots(cache.layers, np.arange(self.first, self.first + self.whole.shape[3]))

    def fits(self, shape: Sequence[int]) -> bool:
        return tuple(shape) == tuple(self.whole.shape)

    def write(self, group: torch.Tensor) -> None:
        self.whole.copy_(group)


class BlockLayers(tuple[tuple[torch.Tensor, ...], ...]):  # noqa: SLOT001  # it keeps what it computes
    """Layers of a paged cache, checked on creation, each with keys and values or one vector per token.

    Views are [block, head, token, dim] of any strides.
    """

    def __new__(cls, layers: Sequence[Sequence[torch.Tensor]]) -> Self:
        made = super().__new__(cls, map(tuple, layers))
        kinds = {(view.shape, view.dtype, view.device) for layer in made for view in layer}
        if len(kinds) != 1 or made[0][0].dim() != 4 or len(set(map(len, made))) != 1:
            raise FormatError(
                "the layers of a paged cache must be views [block, head, token, dim] of the same shape, dtype and "
                "device"
            )
        return made

    @classmethod
    def uniform(cls, layers: Iterable[tuple[torch.Tensor, ...]]) -> Self:
        """Return layers of views that differ only in their addresses."""
        made = super().__new__(cls, layers)
        made.__dict__["alike"] = True
        return made

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """Byte addresses, [layer, K/V] flattened."""
        return np.array([view.data_ptr() for layer in self for view in layer], np.int64)

    @cached_property
    def alike(self) -> bool:
        """True if all views have the same strides, which kernels require."""
        return len({view.stride() for layer in self for view in layer}) == 1


@dataclass(frozen=True, eq=False)
class BlockSlots:
    """The slots of a group's tokens in a paged cache; a `Place`.

    All views have the same shape, dtype and device. vLLM's layouts [2, block, token, head, dim], [block, 2, token,
    head, dim], [block, head, token, 2 dim] and separate tensors differ only in strides once permuted. A tensor, or the
    layers of a `DynamicCache`, count as one block.
    """

    layers: Sequence[Sequence[torch.Tensor]]
    slots: NDArray[np.int64]
    """Slot of each token, [token]: block number * tokens per block + index in the block. Negative: token is not
    written. All others are unique.
    """

    def __post_init__(self) -> None:
        layers = self.layers if isinstance(self.layers, BlockLayers) else BlockLayers(self.layers)
        object.__setattr__(self, "layers", layers)
        first = layers[0][0]
        slots = np.asarray(self.slots, np.int64)
        used = slots[slots >= 0]
        if slots.ndim != 1 or (bool((np.diff(used) <= 0).any()) and len(np.unique(used)) != len(used)):
            raise FormatError("slots of a paged cache must be distinct, but two tokens have the same one")
        if len(used) and int(used.max()) >= first.shape[0] * first.shape[2]:
            raise FormatError(f"slots must be below {first.shape[0]} x {first.shape[2]}, got {int(used.max())}")
        object.__setattr__(self, "slots", slots)

    @property
    def first(self) -> torch.Tensor:
        """The first layer's first view."""
        return self.layers[0][0]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def whole(self) -> None:
        """None: blocks are not one tensor."""

    @property
    def direct(self) -> BlockSlots | None:
        """These slots if all layers have the same strides, which kernels require; else None."""
        return self if self.checked.alike else None

    @property
    def checked(self) -> BlockLayers:
        """`layers` as `BlockLayers`."""
        assert isinstance(self.layers, BlockLayers)  # noqa: S101  # see `__post_init__`
        return self.layers

    @classmethod
    def of_blocks(cls, layers: Sequence[Sequence[torch.Tensor]], numbers: Sequence[int]) -> BlockSlots:
        """Return the slots of all tokens in the given blocks, in order."""
        layers = layers if isinstance(layers, BlockLayers) else BlockLayers(layers)
        size = layers[0][0].shape[2]
        return cls(layers, (np.asarray(numbers, np.int64)[:, None] * size + np.arange(size)).reshape(-1))

    def fits(self, shape: Sequence[int]) -> bool:
        _, heads, _, dim = self.first.shape
        return tuple(shape) == (len(self.layers), len(self.layers[0]), heads, len(self.slots), dim)

    def write(self, group: torch.Tensor, tokens: NDArray[np.int64] | None = None) -> None:
        """Copy a group, [layer, K/V, head, token, dim], or some of its tokens, with torch (slowly).

        ``group`` may have any float dtype and device; FP16 blocks clamp it. ``tokens`` are the offsets of the tokens to
        copy (None: all). Raise `FormatError` for another shape.
        """
        if tokens is None:
            self._check(group.shape)
        slots = self.slots if tokens is None else self.slots[tokens]
        size, device = self.first.shape[2], self.device
        used = np.flatnonzero(slots >= 0)
        if not len(used):
            return
        group = _cast(group.to(device), self.dtype)
        # Move float8 as bytes: torch cannot index that type.
        codes = group.dtype.itemsize == 1
        blocks = _whole_blocks(slots, used, size)
        if blocks is not None:
            group = group[:, :, :, used[0] : used[-1] + 1]
            group = group.reshape(*group.shape[:3], len(blocks), size, group.shape[4])
            number = torch.from_numpy(blocks).to(device)
            for view, part in self._pairs(group, codes=codes):
                view.index_copy_(0, number, part.transpose(0, 1))
            return
        at = torch.from_numpy(slots[used]).to(device)
        block, place = at // size, at % size
        if len(used) < len(slots):
            group = group[:, :, :, torch.from_numpy(used).to(device)]
        for view, part in self._pairs(group, codes=codes):
            view[block, :, place] = part.transpose(0, 1)

    def read(self, out: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Copy the tokens to one tensor, or one per layer, of any float dtype; every token must have a slot.

        The shape is [layer, K/V, head, token, dim]. Raise `FormatError` for another shape.
        """
        size, device, codes = self.first.shape[2], self.device, self.dtype.itemsize == 1
        self._check((len(out), *out[0].shape))
        blocks = _whole_blocks(self.slots, np.arange(len(self.slots)), size) if len(self.slots) else None
        at = torch.from_numpy(self.slots if blocks is None else blocks).to(device)
        for views, halves in zip(self.layers, out, strict=True):
            for view, part in zip(views, halves, strict=True):
                own, to = (view.view(torch.uint8), part.view(torch.uint8)) if codes else (view, part)
                if blocks is None:
                    to.copy_(_cast(own[at // size, :, at % size], to.dtype).transpose(0, 1))
                else:
                    to.unflatten(1, (len(blocks), size)).copy_(_cast(own.index_select(0, at), to.dtype).transpose(0, 1))

    def _check(self, shape: Sequence[int]) -> None:
        if not self.fits(shape):
            raise FormatError(f"the shape must be that of {len(self.slots)} tokens of this cache, got {tuple(shape)}")

    def _pairs(self, group: torch.Tensor, *, codes: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if codes:
            group = group.view(torch.uint8)
        return [
            (view.view(torch.uint8) if codes else view, part)
            for views, halves in zip(self.layers, group, strict=True)
            for view, part in zip(views, halves, strict=True)
        ]


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast, and clamp to FP16's range."""
    if values.dtype is dtype or values.dtype.itemsize == 1:
        return values
    converted = values.to(dtype)
    return converted.clamp_(-FP16_MAX, FP16_MAX) if dtype is torch.float16 else converted


def _whole_blocks(slots: NDArray[np.int64], used: NDArray[np.intp], size: int) -> NDArray[np.int64] | None:
    begin, end = int(used[0]), int(used[-1]) + 1
    if end - begin != len(used) or len(used) % size:
        return None
    rows = slots[begin:end].reshape(-1, size)
    blocks = rows[:, 0] // size
    return blocks if np.array_equal(rows, blocks[:, None] * size + np.arange(size)) else None
