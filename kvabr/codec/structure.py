"""How the AC tracks arrange the channels of a cache: heads form blocks, blocks form stacks, and both form rows.

    block: heads of one layer's keys or values; a transform turns its channels into components, the largest first
    stack: blocks of several layers; a second transform turns the first components of all of them into coefficients
    row:   one coefficient of every token of a group

The rows of a group are those of its stacks in order. The rows of a stack are its coefficients, followed by the
remaining components of each of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

MAX_ROWS = 1 << 22
"""Maximum coefficients per token; the largest known caches have a tenth of it."""
MAX_WIDTH = 1 << 13
"""Maximum channels of a block; its matrix has the square of that."""
MAX_STACK = 1 << 14
"""Maximum coefficients of a stack."""
_USUAL_WIDTH = 512
"""Default maximum of a block's channels: wider ones take too long to transform for what they save."""


def need(good: bool, otherwise: str) -> None:
    """Raise a `FormatError` unless a part of a profile is good."""
    if not good:
        raise FormatError(f"profile: {otherwise}; the file is corrupt")


def checked(name: str, array: object, dtype: type[np.generic], *shape: int) -> NDArray[Any]:
    """Return a private, contiguous, read-only copy of an untrusted array, so that it stays as checked.

    ``shape`` is the shape that it must have, with -1 for any length.
    """
    found = (array.dtype, array.shape) if isinstance(array, np.ndarray) else (type(array), ())
    good = found[0] == dtype and len(found[1]) == len(shape)
    good = good and all(wanted in (-1, size) for wanted, size in zip(shape, found[1], strict=True))
    need(good, f"{name} is {found[0]} {found[1]}, must be {np.dtype(dtype).name} {shape}")
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def keep(owner: object, name: str, dtype: type[np.generic], *shape: int) -> None:
    """Replace an attribute by what `checked` returns for it."""
    object.__setattr__(owner, name, checked(name, getattr(owner, name), dtype, *shape))


@dataclass(frozen=True, slots=True)
class Stack:
    """The keys, or the values, of a run of layers."""

    kind: int
    """0: keys, 1: values."""
    first: int
    last: int
    """The layer after the last."""
    kept: int
    """Components of each block that the stack transforms, an even number; 0 for no transform."""

    @property
    def layers(self) -> range:
        """Layers of the stack."""
        return range(self.first, self.last)


@dataclass(frozen=True)
class Structure:
    """Blocks and stacks of one model's cache. Every layer's keys and values are in exactly one stack.

    Raises:
        FormatError: they are not, or a size is out of bounds.
    """

    spec: KVSpec
    block_heads: int
    """Heads in a block; divides the heads of a layer."""
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        spec, heads = self.spec, self.block_heads
        whole = type(heads) is int and heads > 0 and spec.kv_heads % heads == 0
        need(whole, f"blocks of {heads!r} heads do not divide the {spec.kv_heads} of a layer")
        need(self.width <= MAX_WIDTH, f"blocks of {self.width} channels, at most {MAX_WIDTH} are allowed")
        need(self.rows <= MAX_ROWS, f"{self.rows} coefficients per token, at most {MAX_ROWS} are allowed")
        seen: set[tuple[int, int]] = set()
        for stack in self.stacks:
            whole = type(stack.first) is int and type(stack.last) is int and stack.kind in (0, 1)
            good = whole and 0 <= stack.first < stack.last <= spec.layers
            need(good, f"a stack of layers {stack.first!r} to {stack.last!r} of {spec.layers}, kind {stack.kind!r}")
            good = type(stack.kept) is int and 0 <= stack.kept <= self.width and stack.kept % 2 == 0
            need(good, f"{stack.kept!r} components kept of {self.width}, must be an even number")
            need(self.width_of(stack) <= MAX_STACK, f"a stack has more than {MAX_STACK} coefficients")
            parts = {(layer, stack.kind) for layer in stack.layers}
            need(not seen & parts, "a layer's keys or values are in two stacks")
            seen |= parts
        need(len(seen) == 2 * spec.layers, "a layer's keys or values are in no stack")

    @cached_property
    def width(self) -> int:
        """Channels of a block."""
        return self.block_heads * self.spec.head_dim

    @cached_property
    def per_layer(self) -> int:
        """Blocks of one layer's keys, or values."""
        return self.spec.kv_heads // self.block_heads

    @cached_property
    def blocks(self) -> int:
        """Number of blocks: [layer, K/V, block of heads], row-major."""
        return self.spec.layers * 2 * self.per_layer

    @property
    def rows(self) -> int:
        """Coefficients per token; as many as elements."""
        return self.spec.elements_per_token

    def blocks_of(self, stack: Stack) -> list[int]:
        """Return the blocks of a stack, in order."""
        return [
            (layer * 2 + stack.kind) * self.per_layer + part for layer in stack.layers for part in range(self.per_layer)
        ]

    def width_of(self, stack: Stack) -> int:
        """Return the number of coefficients that a stack's transform produces."""
        return len(stack.layers) * self.per_layer * stack.kept

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """First row of every stack, and the total number of rows."""
        sizes = (len(stack.layers) * self.per_layer * self.width for stack in self.stacks)
        return tuple(accumulate(sizes, initial=0))

    def stack_rows(self, number: int) -> slice:
        """Return the rows that go through a stack's transform."""
        first = self.first_rows[number]
        return slice(first, first + self.width_of(self.stacks[number]))

    def trailing_rows(self, number: int) -> slice:
        """Return a stack's other rows: [layer of the stack, block, component - kept], flattened."""
        return slice(self.stack_rows(number).stop, self.first_rows[number + 1])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` reads them back."""
        stacks = [["kv"[stack.kind], stack.first, stack.last, stack.kept] for stack in self.stacks]
        return {"block_heads": self.block_heads, "stacks": stacks}

    @classmethod
    def from_json(cls, spec: KVSpec, value: Any) -> Structure:
        """Parse the output of `to_json` from an untrusted source, or raise a `FormatError`."""
        try:
            listed = value["stacks"]
            need(isinstance(listed, list) and len(listed) <= 2 * spec.layers, f"not 1 to {2 * spec.layers} stacks")
            stacks = [Stack(("k", "v").index(kind), first, last, kept) for kind, first, last, kept in listed]
            return cls(spec, value["block_heads"], tuple(stacks))
        except (TypeError, KeyError, ValueError) as error:
            raise FormatError(f"profile: its structure cannot be read ({error!r})") from error


def layered(spec: KVSpec, layers: int, kept: tuple[int, int], block_heads: int | None = None) -> Structure:
    """Return a structure with stacks of at most ``layers`` layers, spread evenly, keys and values separate.

    Args:
        spec: the cache's spec.
        layers: maximum number of layers in a stack.
        kept: maximum number of components of each block of keys, and of values, that its stack transforms.
        block_heads: heads in a block; None for as many as have `_USUAL_WIDTH` channels.

    Raises:
        FormatError: such blocks do not divide a layer.
    """
    heads = block_heads or max(
        heads
        for heads in range(1, spec.kv_heads + 1)
        if spec.kv_heads % heads == 0 and (heads == 1 or heads * spec.head_dim <= _USUAL_WIDTH)
    )
    count = -(-spec.layers // max(1, layers))
    stacks = []
    for first, last in pairwise(spec.layers * index // count for index in range(count + 1)):
        blocks = (last - first) * (spec.kv_heads // heads)
        for kind in (0, 1):
            most = min(kept[kind], heads * spec.head_dim, MAX_STACK // blocks) if blocks > 1 else 0
            stacks.append(Stack(kind, first, last, most - most % 4))
    return Structure(spec, heads, tuple(stacks))


def plain(spec: KVSpec) -> Structure:
    """Return a structure without transforms: every head is its own block."""
    return Structure(spec, 1, (Stack(0, 0, spec.layers, 0), Stack(1, 0, spec.layers, 0)))
