"""The encoder's side of the transform: from a group to rows of coefficients.

With AVX-512, native code does it two to three times as fast as torch. Results need not be exact to the bit, since
decoders never run this: indices differ only where a coefficient lies almost exactly between two of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DTYPES, check_cache
from kvabr.codec.rope import backwards, rope_first, rope_shape, rotate
from kvabr.codec.threads import encoder_threads
from kvabr.codec.transform import FARTHEST, NO_MATRIX, ONE, Matrices, Stack, Structure, Transform
from kvabr.types.errors import FormatError

_kvanalysis: Any
try:
    from kvabr.codec.native import _kvanalysis  # type: ignore[attr-defined,no-redef]
except ImportError:
    _kvanalysis = None

_LONGEST = 8191
"""Largest element of a group over norm and step for which 32 bits hold all sums: 2**31 over `ONE` and `FINE`."""
_TOKENS_PER_QUIET = 64
"""At most one in this many tokens, plus one, is stored separately because it is quiet, or because a column of a state
stands out."""
_WORST_CONDITION = 1e-2
"""Maximum deviation of a matrix times its inverse from the identity."""


def native_available() -> bool:
    """Return whether the module is built, the processor supports it, and `coder.active_path` is its kind."""
    return _kvanalysis is not None and coder.active_path() == "avx512" and bool(_kvanalysis.runs())


@dataclass(frozen=True, eq=False)
class Coefficients:
    """A transformed group."""

    rows: torch.Tensor
    """[row, token] float32, in units of the norm; divided by a step they are indices."""
    reach: torch.Tensor
    """[token] float32: smallest step at which a decoder's integers can hold the token."""
    largest: torch.Tensor
    """[token] float32: magnitude of the token's largest coefficient."""
    outlying: torch.Tensor
    """[token] bool: tokens to store separately, see `Transform.threshold`."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """An encoder's use of a transform."""

    transform: Transform

    @property
    def structure(self) -> Structure:
        """The transform's blocks and stacks."""
        return self.transform.structure

    def prepare(self) -> None:
        """Invert the matrices now, which takes about a second, not with the first group."""
        _ = self._native if native_available() else (self._block_inverse, self._stack_inverse)

    def _block_inverses(self, blocks: Iterable[int]) -> torch.Tensor:
        """Return the inverse matrices of some blocks, [block, component, channel] float32."""
        mantissa, gain = self.transform.block or NO_MATRIX
        return torch.stack([_inverse(Matrices(mantissa[block], gain[block])) for block in blocks])

    @cached_property
    def _block_inverse(self) -> torch.Tensor | None:
        return None if self.transform.block is None else self._block_inverses(range(self.structure.blocks))

    @cached_property
    def _stack_inverse(self) -> tuple[torch.Tensor, ...]:
        return tuple(map(_inverse, self.transform.stack))

    @cached_property
    def _limits(self) -> torch.Tensor:
        """[3, 1]: largest elements over the norm, stacks' components, and rows that decode, in steps.

        The first two leave room for what rounding, by up to a step, does to components and elements; a rounded index
        may be half a step above a row.
        """
        components = max((_gain(each) for each in self.transform.stack if each.gain.size), default=1.0)
        elements = components * (1.0 if self.transform.block is None else _gain(self.transform.block))
        return torch.tensor([[max(1.0, _LONGEST - elements)], [max(1.0, FARTHEST - components)], [FARTHEST + 0.4]])

    def analyse(self, group: torch.Tensor, first_token: int | None) -> Coefficients:
        """Transform a group [layer, K/V, head, token, dim] of finite floats, any dtype and strides.

        Its keys are rotated from ``first_token`` on; None: they are not.
        """
        check_cache(self.transform, group)
        if native_available():
            return self._analyse_natively(group.detach().cpu(), first_token)
        bare = _empty(*group.shape[:3], *group.shape[:2:-1]).transpose(3, 4)
        bare[:, 1:] = group[:, 1:]
        bare[:, 0] = rotate(group[:, 0].float().cpu(), self.structure.coded.rope, first_token, undo=True)
        return self.coefficients(self.centred(bare))

    def centred(self, bare: torch.Tensor) -> torch.Tensor:
        """Subtract the mean and arrange elements in blocks, [block, channel, token] float32.

        ``bare`` is [layer, K/V, head, token, dim] float32, keys without rotary embedding; overwritten.
        """
        bare -= torch.from_numpy(self.transform.mean.astype(np.float32))[:, :, :, None]
        return bare.transpose(3, 4).reshape(self.structure.blocks, self.structure.width, bare.shape[3])

    def normed(self, channels: torch.Tensor) -> torch.Tensor:
        """Scale channels by the norm, in place; `components` takes the result."""
        norm = self.transform.norm.reshape(-1, 1).repeat(self.structure.per_layer, axis=0)
        return channels.div_(torch.from_numpy(norm)[:, None])

    def key_power(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of each token's keys from their mean, [layer, token] float32."""
        keys = channels.reshape(self.structure.coded.layers, self.structure.halves, -1, channels.shape[2])[:, 0]
        return keys.square().sum(dim=1)

    def value_power(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of each token's values from their mean, [layer, token] float32."""
        values = channels.reshape(self.structure.spec.layers, self.structure.halves, -1, channels.shape[2])[:, -1]
        return values.square().sum(dim=1)

    def outlying(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the tokens to store separately, [token] bool, from the output of `centred`."""
        values = None if self.transform.quiet is None else self.value_power(channels)
        return self._outlying(self.key_power(channels), values)

    def _outlying(self, keys: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        """Return the tokens to store separately: all that are loud, but of quiet ones only the most quiet few.

        ``keys`` and ``values`` are powers, [layer, token]; the latter only if they count.
        """
        loudness = (keys.sqrt() / torch.from_numpy(self.transform.spread.copy())[:, None]).amax(dim=0)
        state = self.structure.spec.only.kind == "state"
        out = _beyond(loudness, self.transform.threshold) if state else loudness > self.transform.threshold
        quiet = self.transform.quiet
        if quiet is not None and values is not None:
            out |= _beyond(-quietness(values, torch.from_numpy(quiet.usual.copy())), -quiet.threshold)
        return out

    def coefficients(self, channels: torch.Tensor) -> Coefficients:
        """Transform the output of `centred`, which is overwritten."""
        structure = self.structure
        outlying = self.outlying(channels)
        channels = self.normed(channels)
        rows = _empty(structure.rows, channels.shape[2])
        largest = torch.zeros((3, channels.shape[2]))
        # Not the maximum of abs(): that would allocate another group.
        largest[0] = torch.maximum(channels.amax(dim=(0, 1)), -channels.amin(dim=(0, 1)))
        for number, stack in enumerate(structure.stacks):
            parts, kept = self.components(channels, stack), stack.kept
            if kept:
                across = parts[:, :kept].reshape(structure.width_of(stack), -1)
                largest[1] = torch.maximum(largest[1], across.abs().amax(dim=0))
                torch.mm(self._stack_inverse[number], across, out=rows[structure.stack_rows(number)])
            rest = parts[:, kept:]
            rows[structure.trailing_rows(number)].view(rest.shape).copy_(rest)
        largest[2] = torch.maximum(rows.amax(dim=0), -rows.amin(dim=0))
        return Coefficients(rows, (largest / self._limits).amax(dim=0), largest[2], outlying)

    def components(self, channels: torch.Tensor, stack: Stack) -> torch.Tensor:
        """Transform `normed` channels of one stack's blocks: [block of the stack, component, token] float32."""
        blocks = self.structure.blocks_of(stack)
        # Blocks are evenly spaced in practice, so these are views and nothing is copied twice.
        step = blocks[1] - blocks[0] if len(blocks) > 1 else 1
        even = blocks == list(range(blocks[0], blocks[-1] + 1, step))
        which = slice(blocks[0], blocks[-1] + 1, step) if even else blocks
        inverse = self._block_inverse
        return channels[which] if inverse is None else torch.bmm(inverse[which], channels[which])

    @cached_property
    def _native(self) -> tuple[Any, ...]:
        """The extension module's handle of every stack."""
        transform, structure, spec, made = self.transform, self.structure, self.structure.coded, []
        for stack, matrix in zip(structure.stacks, transform.stack, strict=True):
            which = slice(stack.first, stack.last), stack.kind
            blocks = structure.blocks_of(stack)
            first = rope_first(None if stack.kind else spec.rope)
            handle = _kvanalysis.analysis(
                (stack.kind, stack.first, len(stack.layers)),
                (spec.kv_heads, structure.dim, structure.block_heads, *([first] if first else [])),
                stack.kept,
                *rope_shape(None if stack.kind else spec.rope),
                np.ascontiguousarray(transform.mean[which], dtype=np.float32),
                1 / transform.norm[which],
                b"" if transform.block is None else self._block_inverses(blocks).numpy(),
                np.ascontiguousarray(_inverse(matrix)),
            )
            made.append(handle)
        return tuple(made)

    def _analyse_natively(self, group: torch.Tensor, first_token: int | None) -> Coefficients:
        """Do it with stacks in parallel, on as many threads as torch or `encoding_on` says; releases the GIL."""
        structure, tokens = self.structure, group.shape[3]
        if group.dtype not in DTYPES:
            group = group.float()
        source = group.data_ptr(), DTYPES[group.dtype], group.stride(), tokens
        rows, power = _empty(structure.rows, tokens).numpy(), np.zeros((structure.coded.layers, tokens), np.float32)

        def work(number: int) -> NDArray[np.float32]:
            stack, first, last = structure.stacks[number], *structure.first_rows[number : number + 2]
            turns = backwards(None if stack.kind else structure.coded.rope, first_token, tokens)
            largest, own = np.zeros((3, tokens), np.float32), power[stack.first : 0 if stack.kind else stack.last]
            _kvanalysis.analyse(self._native[number], source, *turns, rows[first:last], largest, own)
            return largest

        numbers = range(len(self._native))
        threads = min(encoder_threads() or torch.get_num_threads(), len(numbers))
        if threads > 1:
            with ThreadPoolExecutor(threads, thread_name_prefix="kvabr-analyse") as pool:
                largest = np.maximum.reduce(list(pool.map(work, numbers)))
        else:
            largest = np.maximum.reduce(list(map(work, numbers)))
        peaks = torch.from_numpy(largest)
        reach = (peaks / self._limits).amax(dim=0)
        values: torch.Tensor | None = None
        if self.transform.quiet is not None:
            mean = torch.from_numpy(self.transform.mean[:, 1].astype(np.float32))
            values = (group[:, 1].float() - mean[:, :, None]).square_().sum(dim=(1, 3))
        return Coefficients(torch.from_numpy(rows), reach, peaks[2], self._outlying(torch.from_numpy(power), values))


def quietness(power: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """Return the distance of each token's values from their mean, in units of the usual one, mean over layers.

    Args:
        power: squared distances, [layer, token].
        usual: [layer].
    """
    return (power.sqrt() / usual[:, None]).mean(dim=0)


def _beyond(score: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return which tokens, [token] bool, score more than a threshold: the highest of them, if these are many."""
    most = 1 + len(score) // _TOKENS_PER_QUIET
    if len(score) > most:
        threshold = max(threshold, float(score.topk(most + 1).values[-1]))
    return score > threshold


def _empty(*shape: int) -> torch.Tensor:
    """Allocate float32 memory with NumPy, which requests huge pages: first use of small pages takes 5 times as long."""
    return torch.from_numpy(np.empty(shape, dtype=np.float32))


def _gain(matrix: Matrices) -> float:
    """Return the largest factor by which multiplying with a matrix can increase magnitudes."""
    return float(torch.from_numpy(matrix.expanded).float().abs().sum(dim=-1).max()) / ONE


def _inverse(matrix: Matrices) -> torch.Tensor:
    """Return the inverse of one matrix, float32; raise a `FormatError` if it has none."""
    if not matrix.gain.size:
        return torch.zeros(matrix.mantissa.shape)  # a stack without a transform
    square = torch.from_numpy(matrix.expanded).double() / ONE
    inverse, failed = torch.linalg.inv_ex(square)
    off = float((square @ inverse - torch.eye(len(square), dtype=torch.float64)).abs().sum(dim=1).amax())
    if int(failed) or not off < _WORST_CONDITION:
        raise FormatError("profile: a matrix of its transform has no inverse; nothing can be encoded with it")
    out: torch.Tensor = inverse.float()
    return out
