"""The built-in codecs and their payload layouts. Does not import torch.

A token-separable payload is a head, shared by all tokens of the group, followed by units. A unit holds one token, or a
few tokens that share scales. All units have the same size, except that the last may hold fewer tokens. Decoding a run
of tokens takes only the head and the run's units. To add a codec, write its file and add a line to `BUILTIN`; plug-ins
override `kvabr.codec.base.Codec.layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvabr.types.kv import ITEM_BYTES, KVSpec

BLOCK = 32
"""Elements that share a scale in FP4: tokens of a key channel, or channels of a token's values."""
_SPAN = 128
"""Minimum channels per scale in the values of Int8 and Int4."""


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Sizes of the parts of one payload."""

    tokens: int
    head_bytes: int
    unit_tokens: int
    unit_bytes: int
    last_bytes: int
    """Size of the last unit: ``unit_bytes``, or less if it holds fewer tokens."""

    @property
    def units(self) -> int:
        """Number of units."""
        return -(-self.tokens // self.unit_tokens)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole payload."""
        return self.head_bytes + (self.units - 1) * self.unit_bytes + self.last_bytes

    def runs(self, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield runs of units of equal size, as (first token, token after the last).

        Runs have at most ``max_tokens`` tokens, but at least one unit. A shorter last unit is a separate run.
        """
        step = max(1, max_tokens // self.unit_tokens) * self.unit_tokens
        whole = self.tokens - self.tokens % self.unit_tokens
        for first in range(0, whole, step):
            yield first, min(first + step, whole)
        if whole < self.tokens:
            yield whole, self.tokens


class Builtin(NamedTuple):
    """One built-in codec."""

    path: str
    layout: Callable[[KVSpec, int], PayloadLayout] | None = None
    """Payload layout by spec and number of tokens; None if not token-separable."""


def cast_layout(spec: KVSpec, tokens: int) -> PayloadLayout:
    """Return the layout of FP16 and BF16: no head, one token per unit."""
    return _layout(tokens, 0, 1, lambda count: 2 * count * spec.elements_per_token)


def raw_layout(spec: KVSpec, tokens: int) -> PayloadLayout:
    """Return the layout of Raw: no head, one token per unit, elements of the class's own type."""
    return _layout(tokens, 0, 1, lambda count: ITEM_BYTES[spec.dtype] * count * spec.elements_per_token)


def fp8_layout(spec: KVSpec, tokens: int) -> PayloadLayout:
    """Return the layout of FP8: a 2-byte scale per channel in the head, one token per unit."""
    return _layout(tokens, 2 * spec.elements_per_token, 1, lambda count: count * spec.elements_per_token)


def fp4_layout(spec: KVSpec, tokens: int) -> PayloadLayout:
    """Return the layout of FP4: no head; a unit holds the tokens of one block of keys."""
    keys, values = (spec.kv_heads * dim for dim in spec.only.split)

    def size(count: int) -> int:
        return spec.layers * (keys + -(-count * values // BLOCK) + -(-count * (keys + values) // 2))

    return _layout(tokens, 0, BLOCK, size)


def head_blocks(kv_heads: int, dim: int) -> int:
    """Return the number of blocks in a token's values: whole heads, with at least `_SPAN` channels per block."""
    blocks = max(1, kv_heads * dim // _SPAN)
    while kv_heads % blocks:
        blocks -= 1
    return blocks if dim else 0


def _affine_layout(bits: int, spec: KVSpec, tokens: int) -> PayloadLayout:
    """Return the layout of Int8 or Int4: offsets and scales of key channels in the head, those of values in units.

    A unit is one token, or several tokens that share a scale if each has fewer than `_SPAN` channels.
    """
    keys, values = (spec.kv_heads * dim for dim in spec.only.split)
    scales = 4 * spec.layers * head_blocks(spec.kv_heads, spec.only.split[1])
    together = -(-_SPAN // values) if values else 1

    def size(count: int) -> int:
        return scales + spec.layers * -(-count * (keys + values) * bits // 8)

    return _layout(tokens, 4 * spec.layers * keys, together, size)


def _layout(tokens: int, head_bytes: int, unit_tokens: int, size: Callable[[int], int]) -> PayloadLayout:
    return PayloadLayout(tokens, head_bytes, unit_tokens, size(unit_tokens), size(tokens % unit_tokens or unit_tokens))


BUILTIN = {
    "FP16": Builtin("kvabr.codec.floats:Fp16", cast_layout),
    "BF16": Builtin("kvabr.codec.floats:Bf16", cast_layout),
    "FP8": Builtin("kvabr.codec.floats:Fp8", fp8_layout),
    "Int8": Builtin("kvabr.codec.affine:Int8", partial(_affine_layout, 8)),
    "FP4": Builtin("kvabr.codec.fp4:Fp4", fp4_layout),
    "Int4": Builtin("kvabr.codec.affine:Int4", partial(_affine_layout, 4)),
    "AC-5x": Builtin("kvabr.codec.ac:Ac5x"),
    "AC-L0": Builtin("kvabr.codec.ac:AcL0"),
    "AC-L1": Builtin("kvabr.codec.ac:AcL1"),
    "AC-L2": Builtin("kvabr.codec.ac:AcL2"),
    "AC-L3": Builtin("kvabr.codec.ac:AcL3"),
    "Raw": Builtin("kvabr.codec.raw:Raw", raw_layout),
}
"""Built-in codecs by track name: the draft's levels in the draft's order, layers (base first), then others."""
