"""The encoder's transform with AVX-512: the same as `kvabr.codec.transform` in torch, two to three times as fast.

Results need not be exact to the bit, since decoders never run this. Indices differ only where a coefficient lies almost
exactly between two of them.
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
    """Return whether the module is built, the processor supports it, and `coder.active_path` is its kind."""
    return _kvanalysis is not None and coder.active_path() == "avx512" and bool(_kvanalysis.runs())


@dataclass(frozen=True, eq=False)
class Analysed:
    """The transform of a group."""

    rows: torch.Tensor
    """[row, token] float32."""
    largest: Floats
    """[3, token]: largest magnitude of the channels in units of the norm, of components that stacks take, and of rows.
   """
    power: Floats
    """[layer, token]: power of the keys without their mean."""


class StackAnalysis:
    """The transform from the elements of one stack to its rows."""

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
        """Prepare the matrices, whose sizes have been checked.

        Args:
            spec: the cache's spec.
            kind: 0 for keys, 1 for values.
            layers: layers of the stack.
            block_heads: heads in a block.
            kept: components of each block that the stack takes.
            mean: [layer of the stack, head, dim].
            scale: [layer of the stack], one over the norm.
            block: [block, component, channel]; None if components are channels.
            stack: [coefficient, component]; empty if nothing is kept.
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
        """Transform this stack's part of a group; releases the GIL.

        Args:
            group: as `analyse` passes it.
            first_token: position of its first token.
            rows: [row of the stack, token], written.

        Returns:
            ``largest`` and ``power`` as in `Analysed`, the latter only of this stack's keys.
        """
        tokens = group.shape[3]
        cos, sin = (_NONE, _NONE) if self._rope is None else backwards(self._rope, first_token, tokens)
        largest = np.zeros((3, tokens), dtype=np.float32)
        power = np.empty((len(self.layers) if self.kind == 0 else 0, tokens), dtype=np.float32)
        source = (group.data_ptr(), _DTYPES[group.dtype], group.stride(), tokens)
        _kvanalysis.analyse(self._handle, source, cos, sin, rows, largest, power)
        return largest, power


def analyse(stacks: Sequence[StackAnalysis], group: torch.Tensor, first_token: int) -> Analysed:
    """Transform a group, with stacks in parallel on as many threads as torch would use.

    Args:
        stacks: all stacks, in the order of their rows.
        group: [layer, K/V, head, token, dim] of the stacks' spec, any float dtype and strides.
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
    # NumPy's memory and not torch's: it uses huge pages, whose first use takes a fifth of the time.
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
