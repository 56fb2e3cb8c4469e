"""How the AC tracks put the channels of a cache together: heads into blocks, blocks into stacks, and rows of both.

    block: heads of one layer's keys or values; a transform turns its channels into components, the largest first
    stack: blocks of several layers; a second transform turns the first components of all of them into coefficients
    row:   one coefficient of every token of a group

The rows of a group are those of its stacks in order; the rows of a stack are its coefficients, and then what each of
its blocks has beyond its first components.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

MAX_WIDTH = 1 << 13
"""Channels of a block, at most: its matrix has the square of them."""
MAX_STACK = 1 << 14
"""Coefficients of a stack, at most."""
_USUAL_WIDTH = 512
"""Channels of a block, unless said otherwise: wider ones take too long to transform for what they save."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The keys, or the values, of a run of layers."""

    kind: int
    """0: keys, 1: values."""
    first: int
    last: int
    """The layer after the last."""
    kept: int
    """Components of each block that the stack transforms, an even number; 0 if it transforms none."""


@dataclass(frozen=True)
class Structure:
    """Blocks and stacks of one model's cache. Every layer's keys and values are in just one stack."""

    spec: KVSpec
    block_heads: int
    """Heads in a block; they divide the heads of a layer."""
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        spec = self.spec
        if not isinstance(self.block_heads, int) or self.block_heads < 1 or spec.kv_heads % self.block_heads:
            raise FormatError(f"profile: blocks of {self.block_heads!r} heads, of {spec.kv_heads} in a layer")
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
        """Blocks in all: [layer, K/V, block of heads], row-major."""
        return self.spec.layers * 2 * self.per_layer

    @cached_property
    def rows(self) -> int:
        """Coefficients of a token, as many as it has elements."""
        return self.blocks * self.width

    def blocks_of(self, stack: Stack) -> list[int]:
        """The blocks of a stack, in order."""
        return [
            (layer * 2 + stack.kind) * self.per_layer + part
            for layer in range(stack.first, stack.last)
            for part in range(self.per_layer)
        ]

    def width_of(self, stack: Stack) -> int:
        """Coefficients that the transform of a stack makes."""
        return len(self.blocks_of(stack)) * stack.kept

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """The first row of every stack, and the number of rows."""
        first = [0]
        for stack in self.stacks:
            first.append(first[-1] + len(self.blocks_of(stack)) * self.width)
        return tuple(first)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back."""
        stacks = [["kv"[stack.kind], stack.first, stack.last, stack.kept] for stack in self.stacks]
        return {"block_heads": self.block_heads, "stacks": stacks}

    @classmethod
    def from_json(cls, spec: KVSpec, value: Any) -> Structure:
        """Read `to_json` back from an untrusted source.

        Raises:
            FormatError: it cannot be a structure of this spec.
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
    """Stacks of so many layers, keys and values apart.

    Args:
        spec: the cache's spec.
        layers: layers in a stack, at most; they are spread evenly.
        kept: components of each block of keys, and of values, that its stack transforms, at most.
        block_heads: heads in a block; None: as many as have `_USUAL_WIDTH` channels.

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
    """No transform: every head a block of its own."""
    return Structure(spec, 1, (Stack(0, 0, spec.layers, 0), Stack(1, 0, spec.layers, 0)))
