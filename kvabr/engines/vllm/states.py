"""Recurrent states in vLLM's form: a layer's last inputs of the convolution, and its state.

They are published in transformers' form (`kvabr.engines.transformers.cache`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

CONVOLUTION, RECURRENT = "convolution", "recurrent"
_TRANSPOSED = "GDN_ATTN"
"""Type of layers that vLLM describes as [head, column, row]; GPUs store this, but CPUs [head, row, column]."""
KNOWN = {"GDN_ATTN": (CONVOLUTION, RECURRENT), "MAMBA2": (CONVOLUTION, RECURRENT), "SHORT_CONV": (CONVOLUTION,)}


@dataclass(frozen=True, slots=True)
class StateForm:
    """Form of one state: [block, ...] in vLLM, and [head, row, column] as published."""

    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    """Offset of the state in a block, in bytes."""
    turned: bool = False

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return a view of the state in all blocks, [block, ...], of vLLM's tensor [block, 1, 1, byte].

        Raise `RuntimeError` if the blocks are too small.
        """
        end = self.offset + math.prod(self.shape) * self.dtype.itemsize
        return cache[:, 0, 0, self.offset : end].view(self.dtype).view(-1, *self.shape)

    @property
    def published(self) -> tuple[int, int, int]:
        """Numbers of heads, rows and columns, as published.

        A convolution of n inputs has n columns; vLLM omits the first (the oldest), which is never read again.
        """
        if self.role == CONVOLUTION:
            return 1, max(self.shape), 1 + min(self.shape)
        heads, rows, columns = self.shape
        return (heads, columns, rows) if self.turned else (heads, rows, columns)

    def view(self, states: torch.Tensor, block: int) -> torch.Tensor:
        """Return a view of the state in a block, [head, row, column]; for a convolution without the first column."""
        state = states[block]
        if self.role == CONVOLUTION:
            return (state if self.shape[0] > self.shape[1] else state.transpose(0, 1))[None]
        return state.transpose(1, 2) if self.turned else state

    def write(self, states: torch.Tensor, block: int, kv: torch.Tensor) -> None:
        """Copy a published state into a block."""
        self.view(states, block).copy_(kv[..., 1:] if self.role == CONVOLUTION else kv)

    def read(self, states: torch.Tensor, block: int, out: torch.Tensor) -> None:
        """Copy a block into ``out``, as published."""
        if self.role == CONVOLUTION:
            out[..., 0], out = 0, out[..., 1:]
        out.copy_(self.view(states, block))


def forms_of(spec: Any, *, cpu: bool) -> tuple[StateForm, ...] | None:
    """Return the states of a layer with a ``MambaSpec``; None for an unknown kind."""
    kind = getattr(spec.mamba_type, "name", "")
    roles, shapes = KNOWN.get(kind), [tuple(map(int, shape)) for shape in spec.shapes]
    if roles is None or len(roles) != len(shapes):
        return None
    forms, offset = [], 0
    for role, shape, dtype in zip(roles, shapes, spec.dtypes, strict=True):
        if len(shape) != (2 if role == CONVOLUTION else 3):
            return None
        turned = kind == _TRANSPOSED and role == RECURRENT
        if turned and cpu:
            shape = (shape[0], shape[2], shape[1])  # noqa: PLW2901  # as it is in memory
        forms.append(StateForm(role, shape, dtype, offset, turned=turned and not cpu))
        offset += math.prod(shape) * dtype.itemsize
    return tuple(forms)
