"""The decorrelating transform of the AC tracks: its arrangement of a cache's channels, and its matrices.

    block: heads of one layer's keys or values (of both side by side, if these are unlike in shape); a transform turns
           its channels into components, the largest first
    stack: blocks of several layers; a second transform turns the first components of all of them into coefficients
    row:   one coefficient of every token of a group

A group has the rows of its stacks in order: a stack's coefficients, then the remaining components of its blocks.

An encoder removes the rotary embedding of keys, subtracts each channel's mean, and divides by a norm per layer and K/V.
Then it applies the transforms of blocks and stacks. A decoder inverts this with 16-bit integer matrices (1.0 is 2**14);
a column is 8-bit numbers times a gain. So every decoder computes the same bits. The encoder (`kvabr.codec.analysis`)
uses the inverse of exactly these matrices, so rounding the matrices adds no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.columns import coded_spec
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX, KVSpec

MAX_ROWS = 1 << 22
"""Maximum coefficients per token; the largest known caches have a tenth as many."""
MAX_DIM = 1 << 12
"""Maximum channels of a head, counting keys and values together if these are side by side."""
MAX_WIDTH = 1 << 13
"""Maximum channels of a block; the size of its matrix is the square of this."""
MAX_STACK = 1 << 14
_USUAL_WIDTH = 512
"""Default channels of a block: larger blocks take too long for their benefit."""
ONE = 1 << 14
FINE = 16
"""Coefficients are decoded in units of a step divided by this."""
FARTHEST = 2047
"""Largest index that is decoded; larger ones are clamped, so that the product with `FINE` fits 16 bits."""
LARGEST = 1.95
"""Largest entry of a block's matrix; the norm contains the remaining factor."""
RUN = 4
"""Number of columns of a stack's matrix that share a gain: a decoder multiplies as many bytes at a time."""
MIN_GAIN, MAX_GAIN = 0.5, 2.0
_MAX_ENTRIES = 1 << 30


def need(good: bool, otherwise: str) -> None:
    """Raise `FormatError` with the message ``otherwise`` if ``good`` is False."""
    if not good:
        raise FormatError(f"profile: {otherwise}; the file is corrupt")


def checked(name: str, array: object, dtype: type[np.generic], *shape: int) -> NDArray[Any]:
    """Return a contiguous, read-only copy of an untrusted array; raise `FormatError` for another dtype or shape.

    A -1 in ``shape`` allows any length.
    """
    found = (array.dtype, array.shape) if isinstance(array, np.ndarray) else (type(array), ())
    good = found[0] == dtype and len(found[1]) == len(shape)
    good = good and all(wanted in (-1, size) for wanted, size in zip(shape, found[1], strict=True))
    need(good, f"{name} must be {np.dtype(dtype).name} {shape}, got {found[0]} {found[1]}")
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def keep(owner: object, name: str, dtype: type[np.generic], *shape: int) -> None:
    """Replace an attribute by its `checked` copy."""
    object.__setattr__(owner, name, checked(name, getattr(owner, name), dtype, *shape))


@dataclass(frozen=True, slots=True)
class Stack:
    """The keys, or the values, of a run of layers."""

    kind: int
    """0 for keys, 1 for values. If keys and values differ in shape, all channels are of kind 0."""
    first: int
    last: int
    kept: int
    """Number of components of each block that the stack transforms, even; 0: no transform."""

    @property
    def layers(self) -> range:
        """Layers of the stack."""
        return range(self.first, self.last)


@dataclass(frozen=True)
class Structure:
    """Blocks and stacks of one layer class. Every layer's keys and values are in exactly one stack."""

    spec: KVSpec
    """Spec of one layer class, see `coded`."""
    block_heads: int
    """Number of heads in a block; it divides the heads of a layer."""
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        spec, heads = self.coded, self.block_heads
        whole = type(heads) is int and heads > 0 and spec.kv_heads % heads == 0
        need(whole, f"blocks of {heads!r} heads do not divide the {spec.kv_heads} heads of a layer")
        need(self.dim <= MAX_DIM, f"channels per head must be at most {MAX_DIM}, got {self.dim}")
        need(self.width <= MAX_WIDTH, f"channels per block must be at most {MAX_WIDTH}, got {self.width}")
        need(self.rows <= MAX_ROWS, f"coefficients per token must be at most {MAX_ROWS}, got {self.rows}")
        seen: set[tuple[int, int]] = set()
        for stack in self.stacks:
            whole = type(stack.first) is int and type(stack.last) is int and stack.kind in range(self.halves)
            good = whole and 0 <= stack.first < stack.last <= spec.layers
            need(
                good,
                f"a stack has invalid layers {stack.first!r} to {stack.last!r} of {spec.layers}, or the invalid kind "
                f"{stack.kind!r}",
            )
            good = type(stack.kept) is int and 0 <= stack.kept <= self.width and stack.kept % 2 == 0
            need(good, f"components kept must be an even number up to {self.width}, got {stack.kept!r}")
            need(self.width_of(stack) <= MAX_STACK, f"a stack has more than {MAX_STACK} coefficients")
            parts = {(layer, stack.kind) for layer in stack.layers}
            need(not seen & parts, "a layer's keys or values are in two stacks")
            seen |= parts
        need(len(seen) == self.halves * spec.layers, "a layer's keys or values are in no stack")

    @cached_property
    def coded(self) -> KVSpec:
        """The spec to transform: `spec`, or the spec of a state's columns (`kvabr.codec.columns`)."""
        return coded_spec(self.spec)

    @cached_property
    def halves(self) -> int:
        """Number of kinds: 2 for keys and values; 1 if they differ in shape, or for one vector per token."""
        return self.coded.only.halves

    @cached_property
    def dim(self) -> int:
        """Number of channels of a head."""
        return self.coded.shape(1)[4]

    @cached_property
    def width(self) -> int:
        """Number of channels of a block."""
        return self.block_heads * self.dim

    @cached_property
    def per_layer(self) -> int:
        """Number of blocks of one layer's keys or values."""
        return self.coded.kv_heads // self.block_heads

    @cached_property
    def blocks(self) -> int:
        """Number of blocks. Their order is [layer, K/V, block of heads], row-major."""
        return self.coded.layers * self.halves * self.per_layer

    @property
    def rows(self) -> int:
        """Coefficients (elements) per token."""
        return self.coded.elements_per_token

    def blocks_of(self, stack: Stack) -> list[int]:
        """Return the blocks of a stack, in order."""
        return [
            (layer * self.halves + stack.kind) * self.per_layer + part
            for layer in stack.layers
            for part in range(self.per_layer)
        ]

    def width_of(self, stack: Stack) -> int:
        """Return the number of coefficients of a stack's transform."""
        return len(stack.layers) * self.per_layer * stack.kept

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """First row of every stack, then the total number of rows."""
        sizes = (len(stack.layers) * self.per_layer * self.width for stack in self.stacks)
        return tuple(accumulate(sizes, initial=0))

    def stack_rows(self, number: int) -> slice:
        """Return the rows of a stack's transform."""
        first = self.first_rows[number]
        return slice(first, first + self.width_of(self.stacks[number]))

    def trailing_rows(self, number: int) -> slice:
        """Return a stack's untransformed rows: [layer of the stack, block, component - kept], flattened."""
        return slice(self.stack_rows(number).stop, self.first_rows[number + 1])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values for `from_json`."""
        stacks = [["kv"[stack.kind], stack.first, stack.last, stack.kept] for stack in self.stacks]
        return {"block_heads": self.block_heads, "stacks": stacks}

    @classmethod
    def from_json(cls, spec: KVSpec, value: Any) -> Structure:
        """Parse untrusted `to_json`, or raise `FormatError`."""
        try:
            listed = value["stacks"]
            need(
                isinstance(listed, list) and len(listed) <= 2 * spec.layers, f"must have 1 to {2 * spec.layers} stacks"
            )
            stacks = [Stack(("k", "v").index(kind), first, last, kept) for kind, first, last, kept in listed]
            return cls(spec, value["block_heads"], tuple(stacks))
        except (TypeError, KeyError, ValueError) as error:
            raise FormatError(f"profile: its structure cannot be read ({error!r})") from error


def layered(spec: KVSpec, layers: int, kept: tuple[int, int], block_heads: int | None = None) -> Structure:
    """Return a structure with stacks of at most ``layers`` layers, spread evenly, keys and values separate.

    ``kept`` is the maximum number of components that a stack transforms per block, for keys and for values; their sum
    applies if these differ in shape. ``block_heads`` divides a layer's heads; None: blocks of up to `_USUAL_WIDTH`
    channels.
    """
    _, halves, all_heads, _, dim = coded_spec(spec).shape(1)
    heads = block_heads or max(
        heads
        for heads in range(1, all_heads + 1)
        if all_heads % heads == 0 and (heads == 1 or heads * dim <= _USUAL_WIDTH)
    )
    kinds = kept if halves == 2 else (sum(kept),)
    count = -(-spec.layers // max(1, layers))
    stacks = []
    for first, last in pairwise(spec.layers * index // count for index in range(count + 1)):
        blocks = (last - first) * (all_heads // heads)
        for kind, wanted in enumerate(kinds):
            most = min(wanted, heads * dim, MAX_STACK // blocks) if blocks > 1 else 0
            stacks.append(Stack(kind, first, last, most - most % 4))
    return Structure(spec, heads, tuple(stacks))


def plain(spec: KVSpec) -> Structure:
    """Return a structure without transforms, with one block per head."""
    return Structure(spec, 1, tuple(Stack(kind, 0, spec.layers, 0) for kind in range(coded_spec(spec).only.halves)))


class Matrices(NamedTuple):
    """Matrices in the form that a profile stores."""

    mantissa: NDArray[np.int8]
    gain: NDArray[np.uint8]

    @property
    def expanded(self) -> NDArray[np.int16]:
        """A decoder's matrix entries: mantissa times gain; 1.0 is `ONE`."""
        return self.mantissa.astype(np.int16) * self.gain.astype(np.int16)[..., None, :]


NO_MATRIX = Matrices(np.zeros((0, 0), np.int8), np.zeros(0, np.uint8))


def rounded(matrix: torch.Tensor, *, run: int = 1) -> Matrices:
    """Round non-empty matrices [..., row, column] to a profile's form; ``run`` columns share a gain."""
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
class Quiet:
    """Encoders' criterion for tokens with small values.

    A model attends to these tokens if no other token matters, so it is most sensitive to errors in these: a few tokens
    of a text cause most of the loss.
    """

    usual: NDArray[np.float32]
    """[layer]: root mean square distance of values from their mean."""
    threshold: float
    """A token is quiet if its distance, divided by `usual` and averaged over layers, is below this."""

    def __post_init__(self) -> None:
        need(bool(((self.usual > 0) & np.isfinite(self.usual)).all()), "usual distances of values must be positive")
        need(0 < self.threshold < 1, f"the threshold for quiet values must be between 0 and 1, got {self.threshold!r}")


@dataclass(frozen=True, eq=False)
class Transform:
    """The conversion of a cache to coefficients and back. The constructor checks everything that decoders rely on."""

    structure: Structure
    mean: NDArray[np.float16]
    """Mean of the cache without rotary embedding, [layer, K/V, head, dim]."""
    norm: NDArray[np.float32]
    """Size of one unit of a coefficient, [layer, K/V]."""
    block: Matrices | None
    """[block, channel, component]; None if channels are used as components."""
    stack: tuple[Matrices, ...]
    """[component, coefficient] for every stack; `NO_MATRIX` without a transform."""
    spread: NDArray[np.float32]
    """Root mean square distance of keys from their mean, [layer]; only encoders use it."""
    threshold: float
    """A token is an outlier if its keys are farther from the mean than this multiple of the spread, in any layer. A
    model uses a few tokens of every text as further sinks, with keys far from the mean in some layer.
    """
    quiet: Quiet | None = None

    def __post_init__(self) -> None:
        structure, shape = self.structure, self.structure.coded.shape(1)
        blocks, width = structure.blocks, structure.width
        need(len(self.stack) == len(structure.stacks), f"{len(self.stack)} matrices for {len(structure.stacks)} stacks")
        sizes = enumerate(map(structure.width_of, structure.stacks))
        stack = tuple(_checked(f"stack.{index}", self.stack[index], size, size) for index, size in sizes)
        object.__setattr__(self, "stack", stack)
        if self.block is not None:
            object.__setattr__(self, "block", _checked("block", self.block, blocks, width, width))
        keep(self, "mean", np.float16, *shape[:3], shape[4])
        keep(self, "norm", np.float32, *shape[:2])
        keep(self, "spread", np.float32, shape[0])
        if self.quiet is not None:
            need(structure.halves == 2, "quiet values need a transform with separate keys and values")
            object.__setattr__(
                self, "quiet", replace(self.quiet, usual=checked("quiet", self.quiet.usual, np.float32, shape[0]))
            )
        # A norm above FP16's largest number would make all elements look the same.
        need(bool(np.isfinite(self.mean).all()), "means must be finite")
        need(
            bool(((self.norm > 0) & (self.norm <= FP16_MAX)).all()), f"norms must be more than 0 and at most {FP16_MAX}"
        )
        need(bool(((self.spread > 0) & np.isfinite(self.spread)).all()), "spreads must be positive")
        entries = sum(each.mantissa.size for each in (*self.stack, self.block or NO_MATRIX))
        need(entries <= _MAX_ENTRIES, f"transforms must have at most {_MAX_ENTRIES} numbers, got {entries}")

    def scaled(self, factors: Sequence[float]) -> Transform:
        """Return a transform with larger units of coefficients: a factor for keys, and one for values if separate."""
        norm = (self.norm * np.array(factors, np.float32)).clip(max=FP16_MAX)
        return replace(self, norm=norm)

    def scale(self, step: float, gains: Sequence[float] = ()) -> NDArray[np.float32]:
        """Return the factors that convert the block transform's integers to elements, [layer, K/V] float32.

        ``gains`` are factors of decoded elements around their mean, by stack; empty: all 1.
        """
        need(0 < step < 2.0**20, f"steps must be more than 0 and less than 2**20, got {step!r}")
        scale = self.norm.astype(np.float64) * step / (FINE * ONE)
        if gains:
            stacks = self.structure.stacks
            need(len(gains) == len(stacks), f"{len(gains)} gains for {len(stacks)} stacks")
            need(
                all(MIN_GAIN <= gain <= MAX_GAIN for gain in gains),
                f"gains must be {MIN_GAIN} to {MAX_GAIN}, got {max(gains, key=abs)!r}",
            )
            for stack, gain in zip(stacks, gains, strict=True):
                scale[stack.first : stack.last, stack.kind] *= gain
        return scale.astype(np.float32)
