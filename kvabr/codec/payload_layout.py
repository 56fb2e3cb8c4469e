"""Where each token lies in the payload of a token-separable level, from shapes alone: an origin need not load torch.

    head | unit | unit | ... | unit

The head is what all tokens of the group share. A unit is all that its tokens add, and they are as few as the level
allows: one, but where tokens share scales. All units have the same size, except that the last may hold fewer tokens.
So a run of tokens decodes from the head and the run's own units. The codecs cut payloads by these same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvabr.types.kv import KVSpec

BLOCK = 32
"""Elements that share a scale in FP4: tokens of one channel's keys, channels of one token's values."""
_SPAN = 128
"""Channels that share a scale of Int8's and Int4's values, at least."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of one payload's parts."""

    tokens: int
    """Tokens in the group."""
    head_bytes: int
    unit_tokens: int
    unit_bytes: int
    last_bytes: int
    """Bytes of the last unit: ``unit_bytes``, or less if it holds fewer tokens."""

    @property
    def units(self) -> int:
        """How many there are."""
        return -(-self.tokens // self.unit_tokens)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all parts."""
        return self.head_bytes + (self.units - 1) * self.unit_bytes + self.last_bytes

    def runs(self, most_tokens: int) -> Iterator[tuple[int, int]]:
        """Cut the group into runs of units of one size: first token, and the one after the last.

        A run has ``most_tokens`` at most if a unit has; a last unit of fewer tokens is a run of its own.
        """
        step = max(1, most_tokens // self.unit_tokens) * self.unit_tokens
        whole = self.tokens - self.tokens % self.unit_tokens
        for first in range(0, whole, step):
            yield first, min(first + step, whole)
        if whole < self.tokens:
            yield whole, self.tokens


def cast(spec: KVSpec, tokens: int) -> Layout:
    """FP16 and BF16: no head, a token a unit."""
    return _layout(tokens, 0, 1, lambda count: 2 * count * spec.elements_per_token)


def fp8(spec: KVSpec, tokens: int) -> Layout:
    """FP8: a scale of 2 bytes per channel in the head, a token a unit."""
    return _layout(tokens, 2 * spec.elements_per_token, 1, lambda count: count * spec.elements_per_token)


def int8(spec: KVSpec, tokens: int) -> Layout:
    """Int8: see `affine`."""
    return affine(spec, tokens, 8)


def int4(spec: KVSpec, tokens: int) -> Layout:
    """Int4: see `affine`."""
    return affine(spec, tokens, 4)


def affine(spec: KVSpec, tokens: int, bits: int) -> Layout:
    """Integers: offset and scale of the keys' channels in the head, those of the values in their unit.

    A unit is one token, but in a cache whose tokens have fewer than `_SPAN` channels: there several share a scale.
    """
    scales = 4 * spec.layers * head_blocks(spec.kv_heads, spec.head_dim)
    together = -(-_SPAN // (spec.kv_heads * spec.head_dim))

    def size(count: int) -> int:
        return scales + count * spec.elements_per_token * bits // 8  # keys and values are as many: no half bytes

    return _layout(tokens, 2 * spec.elements_per_token, together, size)


def head_blocks(kv_heads: int, head_dim: int) -> int:
    """Into how many blocks of whole heads a token's values are cut: as many as have `_SPAN` channels each."""
    blocks = max(1, kv_heads * head_dim // _SPAN)
    while kv_heads % blocks:
        blocks -= 1
    return blocks


def fp4(spec: KVSpec, tokens: int) -> Layout:
    """FP4: no head; a unit is the tokens that a block of keys has."""
    channels = spec.kv_heads * spec.head_dim

    def size(count: int) -> int:
        return spec.layers * (channels + -(-count * channels // BLOCK) + count * channels)

    return _layout(tokens, 0, BLOCK, size)


_LEVELS = {"FP16": cast, "BF16": cast, "FP8": fp8, "Int8": int8, "FP4": fp4, "Int4": int4}


def level_layout(track: str, spec: KVSpec, tokens: int) -> Layout | None:
    """The layout of one of the draft's levels; None if it is not token-separable, or a plug-in's."""
    made = _LEVELS.get(track)
    return None if made is None else made(spec, tokens)


def _layout(tokens: int, head_bytes: int, unit_tokens: int, size: Callable[[int], int]) -> Layout:
    return Layout(tokens, head_bytes, unit_tokens, size(unit_tokens), size(tokens % unit_tokens or unit_tokens))
