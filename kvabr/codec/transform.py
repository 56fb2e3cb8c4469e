"""The decorrelating transform of the AC tracks: from a group to rows of coefficients.

Keys without their rotary embedding, all without the channel's mean and in units of a norm that each layer's keys and
values have, go through a block's transform and then a stack's (`kvabr.codec.structure`). A decoder goes back with
integer matrices of 16 bits in which 1.0 is 2**14, each column of them 8-bit numbers times a gain, so every decoder gets
the same bits. The encoder uses the inverse of just these matrices, so that their being rounded costs nothing.
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
"""Largest index that fits: times `FRACTION`, 16 bits."""
_LONGEST = 8191
"""Largest element of a group over norm and step for which 32 bits hold all sums: 2**31 over `ONE` and `FRACTION`."""
LARGEST = 1.95
"""Largest entry of a block's matrix; what it really is, is in the norm."""
RUN = 4
"""Neighbouring columns of a stack's matrix with one gain: a decoder that multiplies bytes takes so many at a time."""
_TOKENS_PER_OUTLIER = 64
"""Tokens among which one is kept aside at most, and one more: a detector that finds more does not know this cache."""
_WORST_CONDITION = 1e-2
"""How far from the identity a matrix times its inverse may be."""


def rounded(matrix: torch.Tensor, *, run: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Round matrices to what a profile holds.

    Args:
        matrix: [..., row, column], float; what is 2.0 or more is cut off.
        run: how many neighbouring columns have the same gain.

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
    """The matrices that a decoder multiplies with, [..., row, column] int16."""
    return mantissa.short() * gain.short().unsqueeze(-2)


@dataclass(frozen=True, eq=False)
class Detector:
    """Tells the few tokens that a model uses as further sinks by their keys, which are far from the mean in some layer.

    Only an encoder needs it: such tokens are listed in the payload.
    """

    spread: torch.Tensor
    """[layer] float32, positive: how far a token's keys are from their mean, in root mean square over tokens."""
    threshold: float
    """How many times further the keys of an outlier are in some layer."""


@dataclass(frozen=True, eq=False)
class Coefficients:
    """A group, transformed."""

    rows: torch.Tensor
    """[row, token] float32, in units of the norm: over a step they are indices."""
    reach: torch.Tensor
    """[token] float32: the least step at which a decoder's integers hold everything of a token."""
    outlying: torch.Tensor
    """[token] bool: tokens to keep aside, see `Detector`."""


@dataclass(frozen=True, eq=False)
class Transform:
    """The arrays of a transform, as a profile holds them; CPU tensors."""

    structure: Structure
    mean: torch.Tensor
    """[layer, K/V, head, dim] float16."""
    norm: torch.Tensor
    """[layer, K/V] float32, positive."""
    block: tuple[torch.Tensor, torch.Tensor] | None
    """Mantissas [block, channel, component] int8 and gains [block, component] uint8; None: components are channels."""
    stack: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Of every stack, mantissas [component, coefficient] and gains [coefficient]; of no size if it transforms none."""
    detector: Detector

    @cached_property
    def block_matrices(self) -> torch.Tensor | None:
        """[block, channel, component] int16, `ONE` is 1.0; None if components are channels."""
        return None if self.block is None else expanded(*self.block)

    @cached_property
    def stack_matrices(self) -> tuple[torch.Tensor, ...]:
        """Of every stack, [component, coefficient] int16."""
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
        """How far rounding of the coefficients can take components and elements, in steps, at most."""
        shift = 1.0  # half a step of rounding; more where an encoder rounds towards zero
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
        """What blocks transform.

        Args:
            bare: [layer, K/V, head, token, dim] float32, keys without rotary embedding; not needed afterwards.

        Returns:
            [block, channel, token] float32, without the mean.
        """
        bare -= self.mean.float()[:, :, :, None]
        return bare.transpose(3, 4).reshape(self.structure.blocks, self.structure.width, bare.shape[3])

    def normed(self, channels: torch.Tensor) -> torch.Tensor:
        """Channels in units of the norm, in place: what `components` takes."""
        return channels.div_(self.norm.repeat_interleave(self.structure.per_layer, dim=1).reshape(-1, 1, 1))

    def key_power(self, channels: torch.Tensor) -> torch.Tensor:
        """How far the keys of each token are from their mean, squared: [layer, token] float32."""
        spec = self.structure.spec
        keys = channels.reshape(spec.layers, 2, -1, channels.shape[2])[:, 0]
        return keys.square().sum(dim=1)

    def outlying(self, channels: torch.Tensor) -> torch.Tensor:
        """The tokens to keep aside, [token] bool; of a cache that is far from the calibration only the loudest few."""
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
        """Transform what `centred` returned; it is not needed afterwards."""
        structure = self.structure
        outlying = self.outlying(channels)
        channels = self.normed(channels)
        rows = _empty(structure.rows, channels.shape[2])
        components, elements = self._slack
        # Not the largest of the magnitudes: they would be as large as the group.
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
            # A rounded index may be up to half above the number.
            reach = torch.maximum(reach, rows[first:last].abs().amax(dim=0) / (MAX_INDEX + 0.4))
        return Coefficients(rows, reach, outlying)

    def components(self, channels: torch.Tensor, stack: Stack) -> torch.Tensor:
        """The blocks of one stack, transformed: [block of the stack, component, token] float32; takes `normed` ones."""
        blocks = self.structure.blocks_of(stack)
        # Views where the blocks are evenly spaced, which they always are: no copy of what is copied next anyway.
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
    """Memory for float32 numbers: NumPy's, which asks for huge pages. Touching small ones takes 5 times as long."""
    return torch.from_numpy(np.empty(shape, dtype=np.float32))


def _gain(matrix: torch.Tensor) -> float:
    """How much larger than the largest of what is multiplied with [..., row, column] a product can be."""
    return float(matrix.float().abs().sum(dim=-1).max()) / ONE


def _inverse(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of an integer matrix in units of 1 / `ONE`, float32.

    Raises:
        FormatError: it has none.
    """
    if not len(matrix):
        return matrix.float()  # of a stack that transforms nothing
    square = matrix.double() / ONE
    inverse, failed = torch.linalg.inv_ex(square)
    off = float((square @ inverse - torch.eye(len(square), dtype=torch.float64)).abs().sum(dim=1).amax())
    if int(failed) or not off < _WORST_CONDITION:
        raise FormatError("profile: a matrix of its transform has no inverse; nothing can be encoded with it")
    out: torch.Tensor = inverse.float()
    return out
