"""The decorrelating transform of the AC tracks: from a group to rows of coefficients.

Keys lose their rotary embedding. All elements lose their channel's mean and are scaled by a norm per layer and K/V.
Then they pass through a block's transform and a stack's (`kvabr.codec.structure`). A decoder inverts this with 16-bit
integer matrices in which 1.0 is 2**14. Each matrix column is 8-bit numbers times a gain, so every decoder computes the
same bits. The encoder uses the inverse of exactly these matrices, so rounding them costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvabr.codec.native import analysis
from kvabr.codec.rope import rotate
from kvabr.codec.structure import Stack, Structure
from kvabr.types.errors import FormatError

ONE = 1 << 14
"""1.0 in a matrix."""
FRACTION = 16
"""Coefficients are decoded in units of a step over this."""
MAX_INDEX = 2047
"""Largest index: times `FRACTION` it fits 16 bits."""
_LONGEST = 8191
"""Largest element of a group over norm and step for which 32 bits hold all sums: 2**31 over `ONE` and `FRACTION`."""
LARGEST = 1.95
"""Largest entry of a block's matrix; the norm takes up the rest."""
RUN = 4
"""Neighbouring columns of a stack's matrix that share a gain: a decoder multiplies as many bytes at a time."""
_TOKENS_PER_OUTLIER = 64
"""At most one in this many tokens, plus one, is stored separately: a detector that finds more does not fit the
cache."""
_WORST_CONDITION = 1e-2
"""Maximum deviation of a matrix times its inverse from the identity."""


def rounded(matrix: torch.Tensor, *, run: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Round matrices to a profile's representation.

    Args:
        matrix: [..., row, column], float; entries of 2.0 or more are clipped.
        run: number of neighbouring columns that share a gain.

    Returns:
        Mantissas [..., row, column] int8, and gains [..., column] uint8.
    """
    if not matrix.numel():
        return matrix.to(torch.int8), torch.zeros(matrix.shape[:-2] + matrix.shape[-1:], dtype=torch.uint8)
    scaled = matrix.double() * ONE
    largest = scaled.abs().amax(dim=-2)
    if run > 1:
        padded = torch.nn.functional.pad(largest, (0, -largest.shape[-1] % run))
        runs = padded.reshape(*padded.shape[:-1], -1, run)
        largest = runs.amax(dim=-1).repeat_interleave(run, dim=-1)[..., : largest.shape[-1]]
    gain = (largest / 127).ceil().clamp(1, 255)
    mantissa = (scaled / gain.unsqueeze(-2)).round().clamp(-127, 127)
    return mantissa.to(torch.int8), gain.to(torch.uint8)


def expanded(mantissa: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return the matrices that a decoder multiplies with, [..., row, column] int16."""
    return mantissa.short() * gain.short().unsqueeze(-2)


@dataclass(frozen=True, eq=False)
class Detector:
    """Detects the few tokens that a model uses as further sinks: their keys are far from the mean in some layer.

    Only encoders need it; a payload lists such tokens.
    """

    spread: torch.Tensor
    """[layer] float32, positive: distance of keys from their mean, root mean square over tokens."""
    threshold: float
    """Multiple of the spread that makes a token an outlier, in any layer."""


@dataclass(frozen=True, eq=False)
class Coefficients:
    """A transformed group."""

    rows: torch.Tensor
    """[row, token] float32, in units of the norm; divided by a step they are indices."""
    reach: torch.Tensor
    """[token] float32: smallest step at which a decoder's integers can hold the token."""
    outlying: torch.Tensor
    """[token] bool: tokens to store separately, see `Detector`."""


@dataclass(frozen=True, eq=False)
class Transform:
    """The arrays of a transform, as in a profile; CPU tensors."""

    structure: Structure
    mean: torch.Tensor
    """[layer, K/V, head, dim] float16."""
    norm: torch.Tensor
    """[layer, K/V] float32, positive."""
    block: tuple[torch.Tensor, torch.Tensor] | None
    """Mantissas [block, channel, component] int8 and gains [block, component] uint8; None if components are channels.
   """
    stack: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Mantissas [component, coefficient] and gains [coefficient] of every stack; empty without a transform."""
    detector: Detector

    @cached_property
    def block_matrices(self) -> torch.Tensor | None:
        """[block, channel, component] int16, `ONE` is 1.0; None if components are channels."""
        return None if self.block is None else expanded(*self.block)

    @cached_property
    def stack_matrices(self) -> tuple[torch.Tensor, ...]:
        """[component, coefficient] int16 of every stack."""
        return tuple(expanded(*pair) for pair in self.stack)

    @cached_property
    def _block_inverse(self) -> torch.Tensor | None:
        """[block, component, channel] float32."""
        matrices = self.block_matrices
        return None if matrices is None else torch.stack([_inverse(matrix) for matrix in matrices])

    @cached_property
    def _stack_inverse(self) -> tuple[torch.Tensor, ...]:
        return tuple(map(_inverse, self.stack_matrices))

    @cached_property
    def _slack(self) -> tuple[float, float]:
        """Maximum effect of rounding the coefficients on components and elements, in steps."""
        shift = 1.0  # half a step of rounding; more if an encoder rounds towards zero
        stacks, blocks = [matrix for matrix in self.stack_matrices if len(matrix)], self.block_matrices
        components = max((_gain(matrix) for matrix in stacks), default=1.0)
        elements = 1.0 if blocks is None else _gain(blocks)
        return shift * components, shift * components * elements

    def analyse(self, group: torch.Tensor, first_token: int) -> Coefficients:
        """Transform a group.

        Args:
            group: [layer, K/V, head, token, dim], any float dtype, any strides, finite.
            first_token: position of its first token.
        """
        if analysis.available():
            return self._analysed(analysis.analyse(self._stack_analyses, group, first_token))
        bare = _empty(*group.shape[:3], *group.shape[:2:-1]).transpose(3, 4)
        bare[:, 1] = group[:, 1]
        bare[:, 0] = rotate(group[:, 0].float().cpu(), self.structure.spec.rope, first_token, undo=True)
        return self.coefficients(self.centred(bare))

    def centred(self, bare: torch.Tensor) -> torch.Tensor:
        """Subtract the mean and arrange elements in blocks.

        Args:
            bare: [layer, K/V, head, token, dim] float32, keys without rotary embedding; overwritten.

        Returns:
            [block, channel, token] float32.
        """
        bare -= self.mean.float()[:, :, :, None]
        return bare.transpose(3, 4).reshape(self.structure.blocks, self.structure.width, bare.shape[3])

    def normed(self, channels: torch.Tensor) -> torch.Tensor:
        """Scale channels by the norm, in place; `components` takes the result."""
        return channels.div_(self.norm.repeat_interleave(self.structure.per_layer, dim=1).reshape(-1, 1, 1))

    def key_power(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of each token's keys from their mean, [layer, token] float32."""
        spec = self.structure.spec
        keys = channels.reshape(spec.layers, 2, -1, channels.shape[2])[:, 0]
        return keys.square().sum(dim=1)

    def outlying(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the tokens to store separately, [token] bool; only the loudest few if the calibration does not fit."""
        return self._outlying(self.key_power(channels))

    def _outlying(self, power: torch.Tensor) -> torch.Tensor:
        loudness = (power.sqrt() / self.detector.spread[:, None]).amax(dim=0)
        most = 1 + len(loudness) // _TOKENS_PER_OUTLIER
        threshold = max(self.detector.threshold, float(loudness.topk(min(most + 1, len(loudness))).values[-1]))
        return loudness > (threshold if len(loudness) > most else self.detector.threshold)

    @cached_property
    def _stack_analyses(self) -> tuple[analysis.StackAnalysis, ...]:
        structure, matrices = self.structure, self.block_matrices
        made = []
        for index, stack in enumerate(structure.stacks):
            layers, blocks = slice(stack.first, stack.last), structure.blocks_of(stack)
            inverse = None if matrices is None else torch.stack([_inverse(matrices[block]) for block in blocks]).numpy()
            made.append(
                analysis.StackAnalysis(
                    structure.spec,
                    stack.kind,
                    range(stack.first, stack.last),
                    structure.block_heads,
                    stack.kept,
                    self.mean[layers, stack.kind].float().numpy(),
                    self.norm[layers, stack.kind].reciprocal().numpy(),
                    inverse,
                    _inverse(self.stack_matrices[index]).numpy(),
                )
            )
        return tuple(made)

    def _analysed(self, made: analysis.Analysed) -> Coefficients:
        components, elements = self._slack
        # As in `coefficients`.
        most = (max(1.0, _LONGEST - elements), max(1.0, MAX_INDEX - components), MAX_INDEX + 0.4)
        reach = (torch.from_numpy(made.largest) / torch.tensor(most)[:, None]).amax(dim=0)
        return Coefficients(made.rows, reach, self._outlying(torch.from_numpy(made.power)))

    def coefficients(self, channels: torch.Tensor) -> Coefficients:
        """Transform the output of `centred`, which is overwritten."""
        structure = self.structure
        outlying = self.outlying(channels)
        channels = self.normed(channels)
        rows = _empty(structure.rows, channels.shape[2])
        components, elements = self._slack
        # Not the maximum of abs(): that would allocate another group.
        loudest = torch.maximum(channels.amax(dim=(0, 1)), -channels.amin(dim=(0, 1)))
        reach = loudest / max(1.0, _LONGEST - elements)
        for index, (stack, first) in enumerate(self._stacks()):
            parts = self.components(channels, stack)
            kept, size = stack.kept, structure.width_of(stack)
            if kept:
                across = parts[:, :kept].reshape(size, -1)
                reach = torch.maximum(reach, across.abs().amax(dim=0) / max(1.0, MAX_INDEX - components))
                torch.mm(self._stack_inverse[index], across, out=rows[first : first + size])
            rest = parts[:, kept:]
            last = first + size + rest.shape[0] * rest.shape[1]
            rows[first + size : last].view(rest.shape).copy_(rest)
            # A rounded index may be up to half a step above the coefficient.
            reach = torch.maximum(reach, rows[first:last].abs().amax(dim=0) / (MAX_INDEX + 0.4))
        return Coefficients(rows, reach, outlying)

    def components(self, channels: torch.Tensor, stack: Stack) -> torch.Tensor:
        """Transform `normed` channels of one stack's blocks: [block of the stack, component, token] float32."""
        blocks = self.structure.blocks_of(stack)
        # Blocks are evenly spaced in practice, so these are views and nothing is copied twice.
        step = blocks[1] - blocks[0] if len(blocks) > 1 else 1
        even = blocks == list(range(blocks[0], blocks[-1] + 1, step))
        chosen = channels[blocks[0] : blocks[-1] + 1 : step] if even else channels[blocks]
        inverse = self._block_inverse
        if inverse is None:
            return chosen
        return torch.bmm(inverse[blocks[0] : blocks[-1] + 1 : step] if even else inverse[blocks], chosen)

    def _stacks(self) -> Iterator[tuple[Stack, int]]:
        return zip(self.structure.stacks, self.structure.first_rows, strict=False)


def _empty(*shape: int) -> torch.Tensor:
    """Allocate float32 memory with NumPy, which requests huge pages: first use of small pages takes 5 times as long."""
    return torch.from_numpy(np.empty(shape, dtype=np.float32))


def _gain(matrix: torch.Tensor) -> float:
    """Return the largest factor by which multiplying with [..., row, column] can increase magnitudes."""
    return float(matrix.float().abs().sum(dim=-1).max()) / ONE


def _inverse(matrix: torch.Tensor) -> torch.Tensor:
    """Return the inverse of an integer matrix in units of 1 / `ONE`, float32.

    Raises:
        FormatError: it has none.
    """
    if not len(matrix):
        return matrix.float()  # a stack without a transform
    square = matrix.double() / ONE
    inverse, failed = torch.linalg.inv_ex(square)
    off = float((square @ inverse - torch.eye(len(square), dtype=torch.float64)).abs().sum(dim=1).amax())
    if int(failed) or not off < _WORST_CONDITION:
        raise FormatError("profile: a matrix of its transform has no inverse; nothing can be encoded with it")
    out: torch.Tensor = inverse.float()
    return out
