"""The decorrelating transform of the AC tracks, as in a profile: means, norms, and the matrices of blocks and stacks.

Keys lose their rotary embedding. All elements lose their channel's mean and are scaled by a norm per layer and K/V.
Then they pass through a block's transform and a stack's (`kvabr.codec.structure`). A decoder inverts this with 16-bit
integer matrices in which 1.0 is 2**14. Each matrix column is 8-bit numbers times a gain, so every decoder computes the
same bits. The encoder (`kvabr.codec.analysis`) uses the inverse of exactly these matrices, so rounding them costs
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.structure import Structure, checked, keep, need
from kvabr.types.kv import FP16_MAX

ONE = 1 << 14
"""1.0 in a matrix."""
FINE = 16
"""Coefficients are decoded in units of a step over this."""
FARTHEST = 2047
"""Larger indices are decoded as this one: times `FINE` it still fits 16 bits."""
LARGEST = 1.95
"""Largest entry of a block's matrix; the norm takes up the rest."""
RUN = 4
"""Neighbouring columns of a stack's matrix that share a gain: a decoder multiplies as many bytes at a time."""
_MOST_ENTRIES = 1 << 30
"""Maximum entries of all matrices together."""


class Matrices(NamedTuple):
    """Matrices as a profile stores them."""

    mantissa: NDArray[np.int8]
    """[..., row, column]."""
    gain: NDArray[np.uint8]
    """[..., column]."""

    @property
    def expanded(self) -> NDArray[np.int16]:
        """What a decoder multiplies with: mantissa times gain, `ONE` is 1.0."""
        return self.mantissa.astype(np.int16) * self.gain.astype(np.int16)[..., None, :]


NO_MATRIX = Matrices(np.zeros((0, 0), np.int8), np.zeros(0, np.uint8))


def rounded(matrix: torch.Tensor, *, run: int = 1) -> Matrices:
    """Round matrices to a profile's representation.

    Args:
        matrix: [..., row, column], float, not empty; entries of 2.0 or more are clipped.
        run: number of neighbouring columns that share a gain.
    """
    scaled = matrix.double() * ONE
    largest = scaled.abs().amax(dim=-2)
    if run > 1:
        padded = torch.nn.functional.pad(largest, (0, -largest.shape[-1] % run))
        runs = padded.reshape(*padded.shape[:-1], -1, run)
        largest = runs.amax(dim=-1).repeat_interleave(run, dim=-1)[..., : largest.shape[-1]]
    gain = (largest / 127).ceil().clamp(1, 255)
    mantissa = (scaled / gain.unsqueeze(-2)).round().clamp(-127, 127)
    return Matrices(mantissa.to(torch.int8).numpy(), gain.to(torch.uint8).numpy())


def _checked(name: str, it: Matrices, *shape: int) -> Matrices:
    gain = checked(f"{name}.gain", it.gain, np.uint8, *shape[:-2], shape[-1])
    return Matrices(checked(name, it.mantissa, np.int8, *shape), gain)


@dataclass(frozen=True, eq=False)
class Transform:
    """How a cache becomes coefficients, and coefficients a cache. Decoders rely on what the constructor checks.

    Raises:
        FormatError: the arrays are inconsistent.
    """

    structure: Structure
    mean: NDArray[np.float16]
    """[layer, K/V, head, dim]: mean of the cache without rotary embedding."""
    norm: NDArray[np.float32]
    """[layer, K/V]: scale of one unit of a coefficient."""
    block: Matrices | None
    """[block, channel, component]; None if components are channels."""
    stack: tuple[Matrices, ...]
    """[component, coefficient] of every stack; `NO_MATRIX` without a transform."""
    spread: NDArray[np.float32]
    """[layer]: distance of keys from their mean, root mean square over tokens; only encoders need it."""
    threshold: float
    """Multiple of the spread that makes a token an outlier, in any layer. A model uses a few tokens of every text as
    further sinks; their keys are far from the mean in some layer. A payload lists them."""

    def __post_init__(self) -> None:
        structure, shape = self.structure, self.structure.spec.shape(1)
        blocks, width = structure.blocks, structure.width
        need(len(self.stack) == len(structure.stacks), f"{len(self.stack)} matrices of {len(structure.stacks)} stacks")
        sizes = enumerate(map(structure.width_of, structure.stacks))
        stack = tuple(_checked(f"stack.{index}", self.stack[index], size, size) for index, size in sizes)
        object.__setattr__(self, "stack", stack)
        if self.block is not None:
            object.__setattr__(self, "block", _checked("block", self.block, blocks, width, width))
        keep(self, "mean", np.float16, *shape[:3], shape[4])
        keep(self, "norm", np.float32, *shape[:2])
        keep(self, "spread", np.float32, shape[0])
        # With a coarser norm than FP16's largest number all elements of a cache would look alike.
        need(bool(np.isfinite(self.mean).all()), "a mean is not finite")
        need(bool(((self.norm > 0) & (self.norm <= FP16_MAX)).all()), f"a norm is not in (0, {FP16_MAX}]")
        need(bool(((self.spread > 0) & np.isfinite(self.spread)).all()), "a spread is not positive")
        entries = sum(each.mantissa.size for each in (*self.stack, self.block or NO_MATRIX))
        need(entries <= _MOST_ENTRIES, f"{entries} numbers of transforms, at most {_MOST_ENTRIES}")

    def scale(self, step: float) -> NDArray[np.float32]:
        """Return the scale of the block transform's integer output, [layer, K/V] float32.

        Raises:
            FormatError: the step is not positive, or too large.
        """
        need(0 < step < 2.0**20, f"a step of {step!r}")
        return (self.norm.astype(np.float64) * step / (FINE * ONE)).astype(np.float32)
