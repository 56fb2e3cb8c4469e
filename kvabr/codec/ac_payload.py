"""The payload of an AC track: tokens that are kept aside, and what the coder made.

    listed 4 | offsets 4 ... | scales | codes | far tokens | coded

The first tokens of a prompt, attention sinks, are kept aside in every payload that stands alone, and not listed. Listed
are tokens that the model uses as further sinks; and, the highest bit of their offset set, tokens so far out that a
decoder's integers cannot hold them: nothing is ever coded to noise. An enhancement lists what its finer step adds to
the latter.

    scales: FP16, [token, layer, K/V]; of all tokens kept aside that are not far, in order
    codes:  8 bits, [token, layer, K/V, head, dim]: times the scale they are the token
    far:    FP16, [token, layer, K/V, head, dim]

Eight bits are enough: at every depth the loss is that with sinks kept as they are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.base import GroupContext
from kvabr.codec.bits import Reader, finite, raw
from kvabr.types.errors import FormatError

_COUNT = struct.Struct("<I")
_TOP = 65504.0
"""FP16's largest number."""
_FAR = 1 << 31
"""Set in the offset of a token that is kept as FP16."""


@dataclass(frozen=True, eq=False)
class Parts:
    """A payload, taken apart."""

    tokens: NDArray[np.int64]
    """Offsets in the group of the tokens that this payload keeps aside; ascending."""
    listed: int
    """How many of them are not sinks."""
    values: torch.Tensor
    """[token, layer, K/V, head, dim] float32, within FP16's range."""
    coded: memoryview

    def place(self, out: torch.Tensor) -> None:
        """Put the tokens where they belong in a group."""
        if len(self.tokens):
            # Indexed assignment neither casts nor copies to another device by itself.
            values = self.values.to(out.device).permute(1, 2, 3, 0, 4).to(out.dtype)
            out[:, :, :, torch.from_numpy(self.tokens).to(out.device)] = values


def join(group: torch.Tensor, tokens: NDArray[np.int64], far: NDArray[np.bool_], sinks: int, coded: bytes) -> bytes:
    """Make a payload.

    Args:
        group: [layer, K/V, head, token, dim], any float dtype.
        tokens: offsets of those to keep aside, ascending; the sinks are the first of them.
        far: which of these are far out.
        sinks: how many of them are sinks; these are never far.
        coded: what the coder made.
    """
    listed = (tokens + np.where(far, _FAR, 0))[sinks:].astype("<u4")
    parts = [_COUNT.pack(len(listed)), listed.tobytes()]
    if len(tokens):
        chosen = group[:, :, :, torch.from_numpy(tokens).to(group.device)].permute(3, 0, 1, 2, 4)
        aside = chosen.float().clamp(-_TOP, _TOP).cpu()
        near = aside[torch.from_numpy(~far)]
        scale = (near.abs().amax(dim=(3, 4)) / 127).clamp(min=2.0**-24).half()
        codes = (near / scale.float()[..., None, None]).round_().clamp_(-127, 127).to(torch.int8)
        parts += [raw(part) for part in (scale, codes, aside[torch.from_numpy(far)].half()) if part.numel()]
    return b"".join((*parts, coded))


def split(payload: memoryview | bytes, context: GroupContext, sinks: int, what: str) -> Parts:
    """Take a payload apart.

    Args:
        payload: hostile until checked.
        context: what group it is.
        sinks: tokens of this group that are kept aside without being listed.
        what: name of the track, for errors.

    Raises:
        FormatError: truncated, or tokens that are not there, or listed twice.
    """
    reader = Reader(memoryview(payload), what)
    listed = int(_COUNT.unpack(reader.bytes(_COUNT.size))[0])
    if listed > context.tokens - sinks:
        raise FormatError(f"{what}: {listed} tokens kept aside in a group of {context.tokens}")
    offsets = np.frombuffer(reader.bytes(4 * listed), dtype="<u4").astype(np.int64)
    tokens = np.concatenate([np.arange(sinks), offsets % _FAR])
    far = torch.from_numpy(np.concatenate([np.zeros(sinks, dtype=bool), offsets >= _FAR]))
    if listed and (bool((np.diff(tokens) <= 0).any()) or int(tokens[-1]) >= context.tokens):
        raise FormatError(f"{what}: the list of tokens kept aside is not in order; the payload is not ours")
    spec, count = context.spec, int(far.sum())
    near = (len(tokens) - count, spec.layers, 2)
    each = (spec.kv_heads, spec.head_dim)
    scale = finite(reader.tensor(torch.float16, near), what).float()
    codes = reader.tensor(torch.int8, (*near, *each)).float()
    whole = finite(reader.tensor(torch.float16, (count, spec.layers, 2, *each)), what).float()
    values = torch.empty((len(tokens), spec.layers, 2, *each))
    values[~far] = (codes * scale[..., None, None]).clamp(-_TOP, _TOP)
    values[far] = whole
    return Parts(tokens, listed, values, reader.rest())
