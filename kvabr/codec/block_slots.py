"""The blocks of an engine's paged cache, and which token of a group belongs where in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.types.errors import FormatError


@dataclass(frozen=True, eq=False)
class BlockSlots:
    """A paged cache, and where in it the tokens of a group belong.

    All views have the same shape, strides, dtype and device; they may be of one tensor or of many. So vLLM's layouts
    [2, block, token, head, dim], [block, 2, token, head, dim], [block, head, token, 2 dim] and separate tensors of keys
    and of values are all the same here, once permuted.
    """

    layers: Sequence[Sequence[torch.Tensor]]
    """Of each layer the keys and the values, or the one vector per token: [block, head, token, dim], any strides."""
    slots: NDArray[np.int64]
    """[token]: its block times tokens per block, plus its place in the block; negative: not written. No two are equal,
    unless negative."""

    def __post_init__(self) -> None:
        views = [view for layer in self.layers for view in layer]
        first = views[0]
        alike = all(
            (view.shape, view.stride(), view.dtype, view.device)
            == (first.shape, first.stride(), first.dtype, first.device)
            for view in views
        )
        if first.dim() != 4 or not alike or len({len(layer) for layer in self.layers}) != 1:
            raise FormatError("the layers of a paged cache are not views [block, head, token, dim] of the same strides")
        slots = np.asarray(self.slots, np.int64)
        used = slots[slots >= 0]
        if slots.ndim != 1 or len(np.unique(used)) != len(used):
            raise FormatError("two tokens have the same slot of a paged cache")
        if len(used) and int(used.max()) >= first.shape[0] * first.shape[2]:
            raise FormatError(f"slot {int(used.max())} of a paged cache of {first.shape[0]} x {first.shape[2]} tokens")
        object.__setattr__(self, "slots", slots)

    @property
    def first(self) -> torch.Tensor:
        """One of the views."""
        return self.layers[0][0]

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a group of this shape, [layer, K/V, head, token, dim], belongs here."""
        _, heads, _, dim = self.first.shape
        return tuple(shape) == (len(self.layers), len(self.layers[0]), heads, len(self.slots), dim)

    def write(self, group: torch.Tensor, tokens: NDArray[np.int64] | None = None) -> None:
        """Copy a group, [layer, K/V, head, token, dim], or only some of its tokens; the slow way, by torch.

        Args:
            group: in the dtype of the blocks, on any device.
            tokens: offsets in the group of the tokens that ``group`` has; None: all.
        """
        slots = self.slots if tokens is None else self.slots[tokens]
        used = torch.from_numpy(np.flatnonzero(slots >= 0))
        at = torch.from_numpy(slots[slots >= 0])
        size = self.first.shape[2]
        block, place = ((at // size).to(self.first.device), (at % size).to(self.first.device))
        there = group[:, :, :, used.to(group.device)].to(self.first.device)
        for views, halves in zip(self.layers, there, strict=True):
            for view, part in zip(views, halves, strict=True):
                view[block, :, place] = part.transpose(0, 1)
