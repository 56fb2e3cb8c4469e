"""How vLLM keeps the recurrent states of a layer: the last inputs of its convolution, and the state itself.

They are published as transformers keeps them (`kvabr.engines.transformers.cache`), so that either engine plays what the
other has computed.

Reads vLLM's objects by the names of their fields, and imports nothing of vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

CONVOLUTION, RECURRENT = "convolution", "recurrent"
_TURNED = "GDN_ATTN"
"""Kind of layers whose recurrent state vLLM describes as [head, column, row]. Its kernels for GPUs keep it so, those
for CPUs as [head, row, column]."""
KNOWN = {"GDN_ATTN": (CONVOLUTION, RECURRENT), "MAMBA2": (CONVOLUTION, RECURRENT), "SHORT_CONV": (CONVOLUTION,)}
"""Roles of the states of a layer, by vLLM's kind of layer."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """How vLLM keeps one state of a layer, [block, ...], and how it is published, [head, row, column]."""

    role: str
    shape: tuple[int, ...]
    """Shape of a block."""
    dtype: torch.dtype
    offset: int = 0
    """Bytes of the layer's other states before it in a block."""
    turned: bool = False
    """Whether rows and columns are exchanged."""

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the state in all blocks of a layer, [block, ...], out of vLLM's tensor of bytes, [block, 1, 1, byte].

        Raises a `RuntimeError` if the blocks are too small.
        """
        end = self.offset + math.prod(self.shape) * self.dtype.itemsize
        return cache[:, 0, 0, self.offset : end].view(self.dtype).view(-1, *self.shape)

    @property
    def published(self) -> tuple[int, int, int]:
        """Heads, rows and columns as published.

        A convolution of n inputs has n columns, of which the first, the oldest input, is never read again: vLLM keeps
        n - 1, transformers all.
        """
        if self.role == CONVOLUTION:
            return 1, max(self.shape), 1 + min(self.shape)
        heads, rows, columns = self.shape
        return (heads, columns, rows) if self.turned else (heads, rows, columns)

    def view(self, states: torch.Tensor, block: int) -> torch.Tensor:
        """Return a block of vLLM's tensor as a view of what is published, [head, row, column].

        Of a convolution these are all columns but the first.
        """
        state = states[block]
        if self.role == CONVOLUTION:
            return (state if self.shape[0] > self.shape[1] else state.transpose(0, 1))[None]
        return state.transpose(1, 2) if self.turned else state

    def write(self, states: torch.Tensor, block: int, kv: torch.Tensor) -> None:
        """Copy a published state into a block."""
        self.view(states, block).copy_(kv[..., 1:] if self.role == CONVOLUTION else kv)

    def read(self, states: torch.Tensor, block: int, out: torch.Tensor) -> None:
        """Copy a block into ``out``, as it is published."""
        if self.role == CONVOLUTION:
            out[..., 0], out = 0, out[..., 1:]
        out.copy_(self.view(states, block))


def forms_of(spec: Any, *, cpu: bool) -> tuple[StateForm, ...] | None:
    """Return the states of a layer that vLLM describes with a ``MambaSpec``; None if their kind is not known.

    ``cpu`` says whether vLLM computes on a CPU.
    """
    kind = getattr(spec.mamba_type, "name", "")
    roles, shapes = KNOWN.get(kind), [tuple(map(int, shape)) for shape in spec.shapes]
    if roles is None or len(roles) != len(shapes):
        return None
    forms, offset = [], 0
    for role, shape, dtype in zip(roles, shapes, spec.dtypes, strict=True):
        if len(shape) != (2 if role == CONVOLUTION else 3):
            return None
        turned = kind == _TURNED and role == RECURRENT
        if turned and cpu:
            shape = (shape[0], shape[2], shape[1])  # noqa: PLW2901  # as it is in memory
        forms.append(StateForm(role, shape, dtype, offset, turned=turned and not cpu))
        offset += math.prod(shape) * dtype.itemsize
    return tuple(forms)
