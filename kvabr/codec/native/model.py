"""What a coder needs before the first byte: the probability tables of one depth, and the matrices behind indices.

All of it comes from a profile and is untrusted. The constructors check everything that decoding relies on, so decoders
need not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvabr.types.errors import FormatError
from kvabr.types.kv import RopeSpec

PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
"""Sum of the frequencies of a table."""
LANES = 64
"""Number of interleaved rANS states."""
TILE = 128
"""Tokens that share row flags."""
MOST_ROWS = 1 << 22
"""Maximum coefficients per token; the largest known caches have a tenth of it."""
MOST_RADIUS = 126
MOST_DELTA = 7
FARTHEST = 2047
"""Larger indices are decoded as this one: 16 times it still fits int16."""
ONE = 1 << 14
"""1.0 in the fixed point of the matrices."""
FINE = 16
"""Coefficients are in units of the step divided by this."""
_MOST_WIDTH = 1 << 14
_MOST_ENTRIES = 1 << 30
"""Maximum entries of all matrices together."""

Index = NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class CoderModel:
    """The probability tables of one depth.

    A row is one coefficient over the tokens of a group. Rows of a class share a table. A depth that refines another has
    three tables per class, for indices below of magnitude 0, 1, and 2 or more.

    Raises:
        FormatError: the arrays are inconsistent.
    """

    row_class: NDArray[np.uint8]
    """[row]: class of each row."""
    radius: NDArray[np.uint8]
    """[class]: symbol s stands for index s - radius; symbol 2 radius + 1 is the escape."""
    freqs: NDArray[np.uint16]
    """[class, context, symbol]: frequency out of 4,096. 0 is never used (such an index is escaped); the escape has at
    least 1."""
    flag_freq: NDArray[np.uint16]
    """[flag context, row]: probability, out of 4,096, that a row has a nonzero index in a tile. With three contexts
    there are two flag contexts, by whether the row below has one."""
    delta: NDArray[np.uint8]
    """[class]: offset of decoded indices from the middle of their interval towards zero, in units of step/16."""
    order: NDArray[np.uint32] = field(init=False)
    """[row]: the rows in coding order, class by class."""

    def __post_init__(self) -> None:
        _array(self, "row_class", np.uint8, 1)
        _array(self, "radius", np.uint8, 1)
        _array(self, "freqs", np.uint16, 3)
        _array(self, "flag_freq", np.uint16, 2)
        _array(self, "delta", np.uint8, 1)
        rows, classes = len(self.row_class), len(self.radius)
        _need(0 < rows <= MOST_ROWS, f"{rows} coefficients per token, must be 1 to {MOST_ROWS}")
        _need(0 < classes <= 256, f"{classes} classes, must be 1 to 256")
        _need(int(self.row_class.max()) < classes, "a coefficient is of a class that does not exist")
        widest = int(self.radius.max())
        _need(widest <= MOST_RADIUS, f"a radius of {widest}, must be at most {MOST_RADIUS}")
        contexts = self.freqs.shape[1]
        _need(contexts in (1, 3), f"{contexts} contexts, must be 1 or 3")
        wanted = (classes, contexts, 2 * widest + 2)
        _need(self.freqs.shape == wanted, f"tables of shape {self.freqs.shape}, must be {wanted}")
        _need(bool((self.freqs.sum(axis=2, dtype=np.int64) == TOTAL).all()), f"a table does not sum to {TOTAL}")
        _need(int(self.freqs.max()) < TOTAL, f"a symbol has all the probability; {TOTAL - 1} is the most")
        escape = 2 * self.radius.astype(np.int64) + 1
        at = np.broadcast_to(escape[:, None, None], (classes, contexts, 1))
        _need(bool((np.take_along_axis(self.freqs, at, axis=2) > 0).all()), "an escape has no probability")
        beyond = np.arange(wanted[2]) > escape[:, None]
        _need(not self.freqs[np.broadcast_to(beyond[:, None], wanted)].any(), "a symbol beyond the escape is used")
        flags = (1 if contexts == 1 else 2, rows)
        _need(self.flag_freq.shape == flags, f"flags of shape {self.flag_freq.shape}, must be {flags}")
        lowest, highest = int(self.flag_freq.min()), int(self.flag_freq.max())
        _need(lowest >= 1 and highest < TOTAL, f"a flag's probability must be 1 to {TOTAL - 1} of {TOTAL}")
        _need(self.delta.shape == (classes,), f"{self.delta.shape} deltas for {classes} classes")
        _need(int(self.delta.max()) <= MOST_DELTA, f"a delta of {int(self.delta.max())}, must be at most {MOST_DELTA}")
        order = np.argsort(self.row_class, kind="stable").astype(np.uint32)
        order.flags.writeable = False
        object.__setattr__(self, "order", order)

    @property
    def rows(self) -> int:
        """Coefficients per token."""
        return len(self.row_class)

    @property
    def classes(self) -> int:
        """Number of tables, or of triples of tables."""
        return len(self.radius)

    @property
    def contexts(self) -> int:
        """1, or 3 if it refines another depth."""
        return int(self.freqs.shape[1])

    @property
    def refines(self) -> bool:
        """Whether it is coded conditionally on the depth below."""
        return self.contexts == 3


@dataclass(frozen=True, eq=False)
class StackModel:
    """A run of layers, keys or values, whose first components are transformed together."""

    kv: int
    """0: keys, 1: values."""
    layers: tuple[int, ...]
    kept: int
    """Transformed components of every block; even."""
    mantissa: NDArray[np.int8]
    """[output, component], square of size layers x blocks of a layer x kept; empty if ``kept`` is 0."""
    gain: NDArray[np.uint8]
    """[component]: the matrix is mantissa * gain, where 16,384 is 1.0."""

    def __post_init__(self) -> None:
        _need(self.kv in (0, 1), f"a stack of kind {self.kv!r}, must be 0 (keys) or 1 (values)")
        _need(type(self.kept) is int and self.kept >= 0 and self.kept % 2 == 0, f"kept is {self.kept!r}, must be even")
        _array(self, "mantissa", np.int8, 2)
        _array(self, "gain", np.uint8, 1)

    @property
    def size(self) -> int:
        """Number of coefficients that the transform takes."""
        return len(self.gain)

    @cached_property
    def matrix(self) -> NDArray[np.int16]:
        """[output, component], 16,384 is 1.0."""
        return self.mantissa.astype(np.int16) * self.gain.astype(np.int16)


@dataclass(frozen=True, eq=False)
class SynthesisModel:
    """How coefficients become a cache: stack transforms, block transforms, norms, means, rotary embedding.

    A block is ``block_heads`` neighbouring heads of one layer's keys or values. Rows are ordered stack by stack: first
    the coefficients of the stack transform, then, for each of its layers and blocks, the components from ``kept`` on.

    Raises:
        FormatError: the arrays are inconsistent.
    """

    layers: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    block_heads: int
    block_mantissa: NDArray[np.int8] | None
    """[layer, K/V, block, channel, component]; None for no block transform."""
    block_gain: NDArray[np.uint8] | None
    """[layer, K/V, block, component]."""
    stacks: tuple[StackModel, ...]
    """Every layer's keys and values are in exactly one."""
    mean: NDArray[np.float32]
    """[layer, K/V, head, dim]: mean of the cache without rotary embedding."""
    norm: NDArray[np.float32]
    """[layer, K/V]: scale of one unit of a coefficient."""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_heads"):
            value = getattr(self, name)
            _need(type(value) is int and 0 < value <= 4096, f"{name} is {value!r}, must be 1 to 4096")
        _need(self.kv_heads % self.block_heads == 0, f"{self.kv_heads} heads do not divide into {self.block_heads}")
        _need(self.width <= _MOST_WIDTH, f"blocks {self.width} wide, at most {_MOST_WIDTH}")
        _need(self.rows <= MOST_ROWS, f"{self.rows} coefficients per token, at most {MOST_ROWS}")
        if self.rope is not None:
            self.rope.check(self.head_dim)
        shape = (self.layers, 2, self.blocks, self.width, self.width)
        _need((self.block_mantissa is None) == (self.block_gain is None), "a block transform without its gains")
        entries = 0
        if self.block_mantissa is not None:
            _array(self, "block_mantissa", np.int8, 5)
            _array(self, "block_gain", np.uint8, 4)
            assert self.block_gain is not None  # noqa: S101  # checked above
            found = self.block_mantissa.shape, self.block_gain.shape
            _need(found == (shape, shape[:-1]), f"block transforms of shapes {found}, must be {shape} and {shape[:-1]}")
            entries += self.block_mantissa.size
        _array(self, "mean", np.float32, 4)
        _array(self, "norm", np.float32, 2)
        wanted = (self.layers, 2, self.kv_heads, self.head_dim)
        _need(self.mean.shape == wanted, f"means of shape {self.mean.shape}, must be {wanted}")
        _need(self.norm.shape == wanted[:2], f"norms of shape {self.norm.shape}, must be {wanted[:2]}")
        # Bounds that keep all sums of decoded numbers finite.
        _need(bool((np.abs(self.mean) < 2.0**64).all()), "a mean is not finite, or absurd")
        _need(bool(((self.norm > 0) & (self.norm < 2.0**32)).all()), "a norm is not positive, or absurd")
        seen: set[tuple[int, int]] = set()
        for stack in self.stacks:
            size = len(stack.layers) * self.blocks * stack.kept
            _need(len(stack.layers) > 0, "a stack of no layers")
            _need(stack.kept <= self.width, f"a stack keeps {stack.kept} components of blocks of {self.width}")
            _need(size <= _MOST_WIDTH, f"a stack transform of {size}, at most {_MOST_WIDTH}")
            found2 = stack.mantissa.shape, stack.gain.shape
            matrix = (size, size) if size else (0, 0)
            _need(found2 == (matrix, (size,)), f"a stack transform of shapes {found2}, must be {matrix} and ({size},)")
            entries += stack.mantissa.size
            for layer in stack.layers:
                _need(type(layer) is int and 0 <= layer < self.layers, f"a stack has layer {layer!r}; there is none")
                _need((layer, stack.kv) not in seen, f"layer {layer} is in two stacks")
                seen.add((layer, stack.kv))
        _need(len(seen) == 2 * self.layers, "some layers are in no stack")
        _need(entries <= _MOST_ENTRIES, f"{entries} numbers of transforms, at most {_MOST_ENTRIES}")

    @property
    def width(self) -> int:
        """Channels of a block."""
        return self.block_heads * self.head_dim

    @property
    def blocks(self) -> int:
        """Blocks of one layer's keys or values."""
        return self.kv_heads // self.block_heads

    @property
    def rows(self) -> int:
        """Coefficients per token; as many as elements."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each stack, and the row after the last."""
        sizes = [len(stack.layers) * self.blocks * self.width for stack in self.stacks]
        return (0, *(sum(sizes[: n + 1]) for n in range(len(sizes))))

    def stack_rows(self, stack: int) -> slice:
        """Return the rows that go through this stack's transform."""
        first = self.starts[stack]
        return slice(first, first + self.stacks[stack].size)

    def trailing_rows(self, stack: int) -> slice:
        """Return the stack's other rows: [layer of the stack, block, component - kept], flattened."""
        return slice(self.starts[stack] + self.stacks[stack].size, self.starts[stack + 1])

    def scale(self, step: float) -> NDArray[np.float32]:
        """Return the scale of the block transform's integer output, [layer, K/V] float32.

        Raises:
            FormatError: the step is not positive, or too large.
        """
        _need(math.isfinite(step) and 0 < step < 2.0**20, f"a step of {step!r}")
        return (self.norm.astype(np.float64) * step / (FINE * ONE)).astype(np.float32)


def dequantise(model: CoderModel, index: Index) -> NDArray[np.int16]:
    """Return indices [row, token] as coefficients in units of step/16."""
    bounded = np.clip(index, -FARTHEST, FARTHEST).astype(np.int16)
    shift = model.delta[model.row_class].astype(np.int16)[:, None]
    return (FINE * bounded - np.sign(bounded) * shift).astype(np.int16)


def frequencies(counts: NDArray[Any]) -> NDArray[np.uint16]:
    """Turn histograms into tables.

    Args:
        counts: [..., symbol], not negative; the last symbol is the escape. At most 2,048 symbols.

    Returns:
        [..., symbol] uint16 that sums to 4,096. Symbols that were seen have at least 1, others 0, the escape at least
        1, and none has everything.
    """
    flat = np.asarray(counts, dtype=np.float64).reshape(-1, np.shape(counts)[-1])
    out = np.empty(flat.shape, dtype=np.uint16)
    for row, seen in zip(out, flat, strict=True):
        row[:] = _table(seen)
    return out.reshape(np.shape(counts))


def _table(seen: NDArray[np.float64]) -> NDArray[np.int64]:
    used = seen > 0
    used[-1] = True
    if used.sum() == 1:
        used[(len(seen) - 1) // 2] = True  # nothing seen: most likely zeros
    share = np.where(used, np.maximum(seen, 1e-9), 0)
    exact = share / share.sum() * TOTAL
    table = np.where(used, np.clip(np.floor(exact), 1, TOTAL - 1), 0).astype(np.int64)
    # Move units one by one to where they save most bits, or from where they cost fewest.
    while (short := TOTAL - int(table.sum())) != 0:
        change = 1 if short > 0 else -1
        able = used & (table + change >= 1) & (table + change < TOTAL)
        saved = share * np.log2(np.maximum(table + change, 1) / np.maximum(table, 1))
        table[int(np.where(able, saved, -np.inf).argmax())] += change
    return table


def _need(good: bool, otherwise: str) -> None:
    if not good:
        raise FormatError(f"profile: {otherwise}; the file is corrupt")


def _array(owner: object, name: str, dtype: type[np.generic], dims: int) -> None:
    """Replace an attribute by a private, contiguous, read-only copy, so that it stays as checked."""
    value = getattr(owner, name)
    good = isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == dims
    _need(good, f"{name} must be an array of {np.dtype(dtype).name} with {dims} axes")
    copy = np.array(value, dtype=dtype, order="C", copy=True)
    copy.flags.writeable = False
    object.__setattr__(owner, name, copy)


def check_indices(model: CoderModel, index: NDArray[Any], below: NDArray[Any] | None) -> tuple[Index, Index | None]:
    """Return indices as coders need them: int16, contiguous, [row, token].

    Raises:
        FormatError: another shape, beyond int16, or indices below are given or missing contrary to the model.
    """
    _below_or_not(model, below)
    if index.ndim != 2 or index.shape[0] != model.rows or index.shape[1] < 1:
        raise FormatError(f"indices of shape {index.shape}, must be [{model.rows}, tokens]")
    if below is not None and below.shape != index.shape:
        raise FormatError(f"indices below of shape {below.shape} for {index.shape}")
    return _int16(index), None if below is None else _int16(below)


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Step and dead zone of a quantiser, see `kvabr.codec.quantiser.quantise`."""

    step: float
    dead: float = 0.0


def check_rows(
    model: CoderModel, rows: NDArray[np.float32], lower: Quantiser | None, keep: NDArray[np.bool_]
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Return coefficients as coders need them, and a mask: -1 for tokens to code, 0 for others.

    Raises:
        FormatError: another shape, or a quantiser below is given or missing contrary to the model.
    """
    _below_or_not(model, lower)
    if rows.ndim != 2 or rows.shape[0] != model.rows or rows.shape[1] < 1 or keep.shape != rows.shape[1:]:
        raise FormatError(f"coefficients of shape {rows.shape}, must be [{model.rows}, tokens]")
    return np.ascontiguousarray(rows, dtype=np.float32), -keep.astype(np.int16)


def check_below(model: CoderModel, tokens: int, below: NDArray[Any] | None) -> Index | None:
    """Return the indices below as a decoder needs them.

    Raises:
        FormatError: as `check_indices`.
    """
    _below_or_not(model, below)
    if tokens < 1:
        raise FormatError(f"a group of {tokens} tokens")
    if below is not None and below.shape != (model.rows, tokens):
        raise FormatError(f"indices below of shape {below.shape}, must be {(model.rows, tokens)}")
    return None if below is None else _int16(below)


def check_chain(models: Sequence[CoderModel], payloads: Sequence[object], synthesis: SynthesisModel) -> None:
    """Raise unless the depths form a chain: a base, then depths that each refine the one before.

    Raises:
        FormatError: they do not, or do not fit the synthesis.
    """
    if not models or len(models) != len(payloads):
        raise FormatError(f"{len(payloads)} payloads for {len(models)} depths")
    if [model.refines for model in models] != [False] + [True] * (len(models) - 1):
        raise FormatError("the first depth must stand alone, and all others refine the one below")
    for model in models:
        if model.rows != synthesis.rows:
            raise FormatError(f"tables for {model.rows} coefficients, but the synthesis takes {synthesis.rows}")


def _below_or_not(model: CoderModel, below: object | None) -> None:
    if model.refines != (below is not None):
        raise FormatError("this depth " + ("needs" if model.refines else "takes no") + " indices below")


def _int16(index: NDArray[Any]) -> Index:
    if index.dtype != np.int16:
        if index.size and (int(index.min()) < -32767 or int(index.max()) > 32767):
            raise FormatError("an index is beyond 16 bits; keep such tokens exact")
        index = index.astype(np.int16)
    return np.ascontiguousarray(index)
