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
from itertools import pairwise
from typing import Any

from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

MAX_WIDTH = 1 << 13
"""Maximum channels of a block; its matrix has the square of that."""
MAX_STACK = 1 << 14
"""Maximum coefficients of a stack."""
_USUAL_WIDTH = 512
"""Default maximum of a block's channels: wider ones take too long to transform for what they save."""


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


@dataclass(frozen=True)
class Structure:
    """Blocks and stacks of one model's cache. Every layer's keys and values are in exactly one stack."""

    spec: KVSpec
    block_heads: int
    """Heads in a block; divides the heads of a layer."""
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        spec = self.spec
        if not isinstance(self.block_heads, int) or self.block_heads < 1 or spec.kv_heads % self.block_heads:
            raise FormatError(
                f"profile: blocks of {self.block_heads!r} heads do not divide the {spec.kv_heads} of a layer"
            )
        if self.width > MAX_WIDTH:
            raise FormatError(f"profile: blocks of {self.width} channels, at most {MAX_WIDTH} are allowed")
        seen: set[tuple[int, int]] = set()
        for stack in self.stacks:
            whole = isinstance(stack.first, int) and isinstance(stack.last, int)
            if stack.kind not in (0, 1) or not whole or not 0 <= stack.first < stack.last <= spec.layers:
                raise FormatError(f"profile: a stack of layers {stack.first!r} to {stack.last!r} of {spec.layers}")
            if not isinstance(stack.kept, int) or not 0 <= stack.kept <= self.width or stack.kept % 2:
                raise FormatError(f"profile: {stack.kept!r} components kept of {self.width}, must be an even number")
            parts = {(layer, stack.kind) for layer in range(stack.first, stack.last)}
            if seen & parts:
                raise FormatError("profile: a layer's keys or values are in two stacks")
            seen |= parts
        if len(seen) != 2 * spec.layers:
            raise FormatError("profile: a layer's keys or values are in no stack")
        if max(map(self.width_of, self.stacks)) > MAX_STACK:
            raise FormatError(f"profile: a stack has more than {MAX_STACK} coefficients")

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

    @cached_property
    def rows(self) -> int:
        """Coefficients per token; as many as elements."""
        return self.blocks * self.width

    def blocks_of(self, stack: Stack) -> list[int]:
        """Return the blocks of a stack, in order."""
        return [
            (layer * 2 + stack.kind) * self.per_layer + part
            for layer in range(stack.first, stack.last)
            for part in range(self.per_layer)
        ]

    def width_of(self, stack: Stack) -> int:
        """Return the number of coefficients that a stack's transform produces."""
        return len(self.blocks_of(stack)) * stack.kept

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """First row of every stack, and the total number of rows."""
        first = [0]
        for stack in self.stacks:
            first.append(first[-1] + len(self.blocks_of(stack)) * self.width)
        return tuple(first)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` reads them back."""
        stacks = [["kv"[stack.kind], stack.first, stack.last, stack.kept] for stack in self.stacks]
        return {"block_heads": self.block_heads, "stacks": stacks}

    @classmethod
    def from_json(cls, spec: KVSpec, value: Any) -> Structure:
        """Parse the output of `to_json` from an untrusted source.

        Raises:
            FormatError: not a valid structure for this spec.
        """
        try:
            listed = value["stacks"]
            if not isinstance(listed, list) or len(listed) > 2 * spec.layers:
                raise FormatError(f"profile: not 1 to {2 * spec.layers} stacks")
            stacks = [Stack(("k", "v").index(kind), first, last, kept) for kind, first, last, kept in listed]
            return cls(spec, value["block_heads"], tuple(stacks))
        except (TypeError, KeyError, ValueError) as error:
            raise FormatError(f"profile: its structure cannot be read ({error!r})") from error


def layered(spec: KVSpec, layers: int, kept: tuple[int, int], block_heads: int | None = None) -> Structure:
    """Return a structure with stacks of ``layers`` layers, keys and values separate.

    Args:
        spec: the cache's spec.
        layers: maximum number of layers in a stack; layers are spread evenly.
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
    cuts = [spec.layers * index // count for index in range(count + 1)]
    stacks = []
    for first, last in pairwise(cuts):
        blocks = (last - first) * (spec.kv_heads // heads)
        for kind in (0, 1):
            most = min(kept[kind], heads * spec.head_dim, MAX_STACK // blocks) if blocks > 1 else 0
            stacks.append(Stack(kind, first, last, most - most % 4))
    return Structure(spec, heads, tuple(stacks))


def plain(spec: KVSpec) -> Structure:
    """Return a structure without transforms: every head is its own block."""
    return Structure(spec, 1, (Stack(0, 0, spec.layers, 0), Stack(1, 0, spec.layers, 0)))
