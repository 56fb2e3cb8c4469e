"""Small shared parts of the codecs: reading arrays from a payload, checking and placing numbers."""

from __future__ import annotations

import torch

from kvabr.types.errors import FormatError

_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""Bits of the exponent; all of them set in NaN and infinity alone."""


class Reader:
    """Takes arrays off a payload one after the other, checking that there is enough of it."""

    def __init__(self, payload: memoryview, what: str) -> None:
        self._payload, self._what, self._at = payload, what, 0

    def expect(self, size: int) -> None:
        """Refuse a payload that has not just so many bytes."""
        if len(self._payload) != size:
            there = len(self._payload)
            raise FormatError(f"{self._what}: {there} bytes of payload instead of {size}; truncated, or not ours")

    def bytes(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        if size < 0 or self._at + size > len(self._payload):
            raise FormatError(f"{self._what}: {len(self._payload)} bytes of payload are too few; truncated or not ours")
        piece = self._payload[self._at : self._at + size]
        self._at += size
        return piece

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The next array, as a view of the payload."""
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(shape, dtype=dtype)  # torch takes no empty buffers
        piece = self.bytes(count * dtype.itemsize)
        # A read-only buffer is fine: nothing here writes into it. bytearray() silences torch by copying only if needed.
        return torch.frombuffer(_writable(piece), dtype=torch.uint8).view(dtype).reshape(shape)

    def rest(self) -> memoryview:
        """All that is left."""
        return self.bytes(len(self._payload) - self._at)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._payload):
            raise FormatError(f"{self._what}: {len(self._payload) - self._at} bytes too many in the payload")


def finite(values: torch.Tensor, what: str) -> torch.Tensor:
    """Refuse numbers that are NaN or infinite: one such scale would poison a whole channel."""
    if values.dtype in _EXPONENT:
        # Comparing bits takes a tenth of the time that isfinite takes on 16-bit floats.
        mask = _EXPONENT[values.dtype]
        good = not values.numel() or int((values.view(torch.int16) & mask).amax()) < mask
    else:
        good = bool(torch.isfinite(values).all())
    if not good:
        raise FormatError(f"{what}: it holds a number that is not finite; the payload is not ours")
    return values


def place(out: torch.Tensor, values: torch.Tensor) -> None:
    """Copy decoded values into the caller's tensor; what FP16 cannot hold becomes its largest number, not infinity.

    Args:
        out: any float dtype, any strides.
        values: of the same shape, any float dtype; not needed afterwards, for they may be changed.
    """
    if out.dtype != values.dtype:
        values = values.float()  # torch casts between the 16-bit floats three times slower than by this detour
    if out.dtype == torch.float16 and values.dtype != torch.float16:
        top = torch.finfo(torch.float16).max
        # In float32: bfloat16 would round the bound up to what is infinity to FP16.
        values = values.clamp_(-top, top)
    out.copy_(values)


def raw(values: torch.Tensor) -> bytes:
    """The bytes of an array, little-endian, in row-major order."""
    return values.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _writable(piece: memoryview) -> memoryview | bytearray:
    return bytearray(piece) if piece.readonly else piece
