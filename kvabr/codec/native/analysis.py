"""The encoder's transform by AVX-512: what `kvabr.codec.transform` does with torch, two to three times as fast.

Nothing here needs to be exact to the bit: a decoder never does it, and indices differ only where a coefficient lies as
good as in the middle between two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native import coder
from kvabr.codec.rope import backwards
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

_kvanalysis: Any
try:
    from kvabr.codec.native import _kvanalysis  # type: ignore[attr-defined,no-redef]
except ImportError:
    _kvanalysis = None

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NONE = np.empty(0, dtype=np.float32)

Floats = NDArray[np.float32]


def available() -> bool:
    """Whether it can be done, and the coder's path is of this kind, see `coder.active_path`."""
    return _kvanalysis is not None and coder.active_path() == "avx512" and bool(_kvanalysis.runs())


@dataclass(frozen=True, eq=False)
class Analysed:
    """What comes of a group."""

    rows: torch.Tensor
    """[row, token] float32."""
    largest: Floats
    """[3, token]: magnitude of the channels in units of the norm, of components that stacks take, and of rows."""
    power: Floats
    """[layer, token]: of the keys without their mean."""


class StackAnalysis:
    """The way from the elements of one stack to its rows."""

    def __init__(
        self,
        spec: KVSpec,
        kind: int,
        layers: range,
        block_heads: int,
        kept: int,
        mean: Floats,
        scale: Floats,
        block: Floats | None,
        stack: Floats,
    ) -> None:
        """Take the matrices, whose sizes have been checked.

        Args:
            spec: the cache's.
            kind: 0 for keys, 1 for values.
            layers: of the stack.
            block_heads: heads in a block.
            kept: components of each block that the stack takes.
            mean: [layer of the stack, head, dim].
            scale: [layer of the stack], one over the norm.
            block: [block, component, channel]; None if components are channels.
            stack: [coefficient, component]; of no size if nothing is kept.
        """
        self.spec = spec
        self._rope = spec.rope if kind == 0 else None
        self.kind, self.layers = kind, layers
        self.rows = len(layers) * spec.kv_heads * spec.head_dim
        self._handle = _kvanalysis.analysis(
            (kind, layers.start, len(layers)),
            (spec.kv_heads, spec.head_dim, block_heads),
            kept,
            0 if self._rope is None else self._rope.rotary_dim,
            0 if self._rope is None else int(self._rope.layout == "interleaved"),
            *(np.ascontiguousarray(each, dtype=np.float32) for each in (mean, scale)),
            b"" if block is None else np.ascontiguousarray(block, dtype=np.float32),
            np.ascontiguousarray(stack, dtype=np.float32),
        )

    def run(self, group: torch.Tensor, first_token: int, rows: Floats) -> tuple[Floats, Floats]:
        """Transform what of a group is of this stack; works beside other threads.

        Args:
            group: as `analyse` hands it on.
            first_token: position of its first token.
            rows: [row of the stack, token], where they go.

        Returns:
            As in `Analysed`, ``largest`` and ``power``, the latter of this stack's keys only.
        """
        tokens = group.shape[3]
        cos, sin = (_NONE, _NONE) if self._rope is None else backwards(self._rope, first_token, tokens)
        largest = np.zeros((3, tokens), dtype=np.float32)
        power = np.empty((len(self.layers) if self.kind == 0 else 0, tokens), dtype=np.float32)
        source = (group.data_ptr(), _DTYPES[group.dtype], group.stride(), tokens)
        _kvanalysis.analyse(self._handle, source, cos, sin, rows, largest, power)
        return largest, power


def analyse(stacks: Sequence[StackAnalysis], group: torch.Tensor, first_token: int) -> Analysed:
    """Transform a group, stacks side by side on as many threads as torch would take.

    Args:
        stacks: in the order of their rows; all that there are.
        group: [layer, K/V, head, token, dim] of just the spec that the stacks are for, any float dtype and strides.
        first_token: position of its first token.

    Raises:
        FormatError: the group has another shape.
    """
    wanted = stacks[0].spec.shape(group.shape[3] if group.ndim == 5 else 0)
    if tuple(group.shape) != wanted or not group.shape[3]:
        raise FormatError(f"a group of {tuple(group.shape)} cannot be transformed, only one of {wanted}")
    group = group.detach().cpu()
    if group.dtype not in _DTYPES:
        group = group.float()
    tokens = group.shape[3]
    # NumPy's memory and not torch's: it asks for huge pages, which takes a fifth of the time of touching small ones.
    rows = np.empty((sum(stack.rows for stack in stacks), tokens), dtype=np.float32)
    ends = np.cumsum([stack.rows for stack in stacks])

    def work(which: int) -> tuple[Floats, Floats]:
        stack = stacks[which]
        return stack.run(group, first_token, rows[ends[which] - stack.rows : ends[which]])

    threads = min(torch.get_num_threads(), len(stacks))
    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="kvabr-analyse") as pool:
            made = list(pool.map(work, range(len(stacks))))
    else:
        made = list(map(work, range(len(stacks))))
    power = np.zeros((group.shape[0], tokens), dtype=np.float32)
    for stack, (_, own) in zip(stacks, made, strict=True):
        if stack.kind == 0:
            power[stack.layers.start : stack.layers.stop] = own
    return Analysed(torch.from_numpy(rows), np.maximum.reduce([largest for largest, _ in made]), power)
