"""Building blocks of codecs: reading, checking and placing arrays, and `Separable`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.builtin import PayloadLayout
from kvabr.codec.uncopied import uncopied
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX, KVSpec

_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


class PayloadReader:
    """Reads arrays from a payload in sequence, checking bounds."""

    def __init__(self, payload: memoryview, what: str) -> None:
        self._payload, self._what, self._at = payload, what, 0

    def expect(self, size: int) -> None:
        """Raise unless the payload has exactly ``size`` bytes."""
        if len(self._payload) != size:
            there = len(self._payload)
            raise FormatError(
                f"{self._what}: {there} bytes of payload, expected {size}; truncated, or of another version"
            )

    def bytes(self, size: int) -> memoryview:
        """Return the next ``size`` bytes."""
        if size < 0 or self._at + size > len(self._payload):
            raise FormatError(f"{self._what}: {len(self._payload)} bytes of payload are too few; truncated")
        piece = self._payload[self._at : self._at + size]
        self._at += size
        return piece

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the next array, a read-only view of the payload."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)  # torch rejects empty buffers
        piece = self.bytes(count * dtype.itemsize)
        return torch.frombuffer(uncopied(piece), dtype=torch.uint8).view(dtype).reshape(shape)

    def rest(self) -> memoryview:
        """Return the remaining bytes of the payload."""
        return self.bytes(len(self._payload) - self._at)


def finite(values: torch.Tensor, what: str) -> torch.Tensor:
    """Return ``values``; raise if any is NaN or infinite, since one such scale would ruin a whole channel."""
    if values.dtype in _EXPONENT:
        # For 16-bit floats, comparing bits takes a tenth of the time of isfinite.
        mask = _EXPONENT[values.dtype]
        good = not values.numel() or int((values.view(torch.int16) & mask).amax()) < mask
    else:
        good = bool(torch.isfinite(values).all())
    if not good:
        raise not_finite(what)
    return values


def not_finite(what: str) -> FormatError:
    """Return the error for a payload with NaN or infinity."""
    return FormatError(f"{what}: contains a number that is not finite; the payload is corrupt")


def half_scale(scale: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """Convert scales, positive float32, to float16; round to nearest, but round up for states.

    A state's scales may be so small that half precision is coarse; rounding down would clip the largest numbers.
    """
    nearest = scale.half()
    if spec.only.kind != "state":
        return nearest
    more = (nearest.view(torch.int16) + 1).view(torch.float16)
    return torch.where((nearest.float() < scale) & (nearest < FP16_MAX), more, nearest)


def keys_and_values(kv: torch.Tensor, spec: KVSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of keys and values, [layer, head, ..., dim], of a tensor [layer, K/V, head, ..., dim].

    See `LayerClass.split`; the view of values is empty if a class has a single vector per token.
    """
    keys = spec.only.split[0]
    return (kv[:, 0], kv[:, 1]) if spec.only.halves == 2 else (kv[:, 0, ..., :keys], kv[:, 0, ..., keys:])


def by_unit(part: torch.Tensor, units: int) -> torch.Tensor:
    """Return a run of keys or values, [layer, head, token, dim], as float32 [unit, layer, token, channel]."""
    layers, heads, tokens, dim = part.shape
    return part.float().reshape(layers, heads, units, tokens // units, dim).permute(2, 0, 3, 1, 4).flatten(3)


def to_layers(numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Copy keys or values, arranged as by `by_unit`, into ``out``, [layer, head, unit, token, dim].

    May modify ``numbers``.
    """
    layers, heads, units, tokens, dim = out.shape
    if dim:
        place(out, numbers.reshape(units, layers, tokens, heads, dim).permute(1, 3, 0, 2, 4))


def join_codes(keys: torch.Tensor, values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the codes of a run's keys and values, uint8 [unit, layer, ...], into bytes, [unit, byte].

    In each layer, the codes of keys precede those of values. With 4 bits, byte i holds code i of the first half of the
    codes in its low bits, and code i of the second half in its high bits.
    """
    codes = torch.cat((keys.flatten(2), values.flatten(2)), dim=2)
    if bits == 4:
        codes = pad(codes, (0, codes.shape[2] % 2))
        low, high = codes.chunk(2, dim=2)
        codes = low | high << 4
    return codes.flatten(1)


def split_codes(units: torch.Tensor, layers: int, sizes: tuple[int, int], bits: int) -> tuple[torch.Tensor, ...]:
    """Undo `join_codes`; return the codes of keys and of values, [unit, layer, code]; ``sizes``: codes per layer."""
    codes = units.view(len(units), layers, -1)
    if bits == 4:
        halves = codes & 15, codes >> 4
        if sizes[0] == sizes[1]:
            return halves
        codes = torch.cat(halves, dim=2)[:, :, : sum(sizes)]
    return codes.split_with_sizes(list(sizes), dim=2)


def place(out: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into the caller's tensor; saturate instead of overflowing. May modify ``values``."""
    if out.dtype != values.dtype:
        values = values.float()  # clamping float32 is three times as fast for 16-bit floats
    if out.dtype == torch.float16 and values.dtype != torch.float16:
        # Clamp in float32: bfloat16 would round the bound up, to infinity in FP16.
        values = values.clamp_(-FP16_MAX, FP16_MAX)
    out.copy_(values)


def raw(values: torch.Tensor) -> bytes:
    """Return the bytes of an array, little-endian, in row-major order."""
    # Flatten first: `view` rejects the strides that a dimension of 1 may have.
    return values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


_RUN_ELEMENTS = 1 << 20
"""Maximum elements per run: small enough for the processor's cache, large enough to amortise torch's calls."""


class Separable(Codec):
    """A codec with payloads of a head and units (`kvabr.codec.builtin.PayloadLayout`).

    Subclasses define the head, and convert runs of tokens to units and back.
    """

    def head(self, group: torch.Tensor, spec: KVSpec) -> torch.Tensor:  # noqa: ARG002
        """Return the data that all tokens of a group [layer, K/V, head, token, dim] share: float16, any shape."""
        return group.new_empty(0, dtype=torch.float16)

    @abstractmethod
    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int, spec: KVSpec) -> torch.Tensor:
        """Compress a run of whole units; return the bytes of each unit as [unit, ...] of any dtype and shape.

        ``run`` is [layer, K/V, head, token, dim], any float dtype, any strides; ``head`` is a result of `head`;
        ``spec`` is that of the layer class, see `keys_and_values`.
        """

    @abstractmethod
    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor, spec: KVSpec) -> None:
        """Decompress a run of whole units into ``out``; raise `FormatError` for units that no encoder writes.

        ``units`` are [unit, byte] uint8, untrusted and read-only; ``head`` is float16, flat, finite; ``out`` is [layer,
        K/V, head, unit, token, dim], any float dtype, any strides.
        """

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        layout = self._layout(context)
        head = self.head(group, context.spec)
        parts = [raw(head)]
        for first, last in layout.runs(_max_tokens(context, group.device)):
            run = group[:, :, :, first:last]
            parts.append(raw(self.encode_units(run, head, min(layout.unit_tokens, last - first), context.spec)))
        return b"".join(parts)

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        layout = self._layout(context)
        reader = PayloadReader(payload, self.name)
        reader.expect(layout.payload_bytes)
        # Move the payload, which is smaller than the decoded tensor. Check the head first: on a device this would
        # synchronise.
        head = finite(reader.tensor(torch.float16, (layout.head_bytes // 2,)), self.name).to(out.device)
        for first, last in layout.runs(_max_tokens(context, out.device)):
            tokens = min(layout.unit_tokens, last - first)
            size = layout.unit_bytes if tokens == layout.unit_tokens else layout.last_bytes
            units = reader.tensor(torch.uint8, ((last - first) // tokens, size)).to(out.device)
            run = out[:, :, :, first:last]
            self.decode_units(units, head, run.view(*run.shape[:3], -1, tokens, run.shape[4]), context.spec)

    def _layout(self, context: GroupContext) -> PayloadLayout:
        layout = self.layout(context.spec, context.tokens)
        if layout is None:
            raise FormatError(f"{self.name} derives from Separable but has no layout; override `layout`")
        return layout


def _max_tokens(context: GroupContext, device: torch.device) -> int:
    if device.type != "cpu":
        return context.tokens
    return max(1, _RUN_ELEMENTS // context.spec.elements_per_token)
