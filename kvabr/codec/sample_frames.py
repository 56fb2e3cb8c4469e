"""Frames of a typical cache, generated from a spec and a profile alone, to time decoders.

AC's decoding time depends on live rows and symbols, so indices are drawn from the profile's tables.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.ac import payload_head
from kvabr.codec.base import GroupContext
from kvabr.codec.builtin import BUILTIN
from kvabr.codec.container import pack
from kvabr.codec.group import encode_group, frame_header
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import TOTAL, CoderModel
from kvabr.codec.quantiser import RATIO, SINGLE
from kvabr.codec.quantiser import below as track_below
from kvabr.types.errors import FormatError
from kvabr.types.naming import LAYERS

CHUNK = "0" * 64
_DRAWN = 8
"""Number of tokens drawn at random; the others repeat these, which takes the same time to decode."""
_NOTHING_LISTED = struct.pack("<I", 0)


@dataclass(slots=True)
class SampleFrames:
    """Reproducible frames of one group, starting after the profile's sinks."""

    context: GroupContext
    _drawn: dict[str, _Drawn] = field(default_factory=dict)

    def frame(self, track: str) -> bytes:
        """Return the frame on a track; raise `FormatError` for codecs that are not built in."""
        if track not in BUILTIN:
            raise FormatError(f"{track} is not a built-in track, so there is no sample of it")
        context = self.context
        if track not in (*LAYERS, SINGLE):
            shape = context.spec.shape(context.tokens)
            row = torch.linspace(-4.0, 4.0, shape[-1])
            return encode_group(row.expand(shape), track, context, CHUNK, 0)
        if context.profile is None:
            raise FormatError(f"{track} needs the model's profile")
        model, lower = context.profile.of(context.spec).depth(track).coder, track_below(track)
        below = None if lower is None else self._of(lower).indices(context.tokens)
        coded = coder.encode_indices(model, self._of(track).indices(context.tokens), below)
        header = frame_header(track, context, CHUNK, 0)
        return pack(payload_head(coded) + _NOTHING_LISTED + coded, header)

    def _of(self, track: str) -> _Drawn:
        if track not in self._drawn:
            assert self.context.profile is not None  # noqa: S101  # `frame` checked it
            lower = track_below(track)
            below = None if lower is None else self._of(lower)
            model = self.context.profile.of(self.context.spec).depth(track).coder
            self._drawn[track] = _draw(model, min(_DRAWN, self.context.tokens), below)
        return self._drawn[track]


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    index: NDArray[np.int16]
    """Indices, [row, token]; later tokens repeat them."""
    more: NDArray[np.int16]
    """Added to the first token, [row], so that every live row has a nonzero index."""

    def indices(self, tokens: int) -> NDArray[np.int16]:
        out = np.tile(self.index, (1, -(-tokens // self.index.shape[1])))[:, :tokens]
        out[:, 0] += self.more
        return out


def _draw(model: CoderModel, tokens: int, below: _Drawn | None) -> _Drawn:
    dice = np.random.default_rng(0)
    base = np.zeros((model.rows, tokens), dtype=np.int16) if below is None else below.index
    more = np.zeros(model.rows, dtype=np.int16) if below is None else below.more
    chance = model.flag_freq[0]
    if below is not None:
        chance = np.where(base.any(axis=1) | (more != 0), model.flag_freq[1], chance)
    live = np.flatnonzero(dice.integers(TOTAL, size=model.rows) < chance)
    which, under = model.row_class[live], base[live]
    context = np.minimum(np.abs(under), model.contexts - 1)
    cumulated = np.cumsum(model.freqs, axis=2, dtype=np.int32)
    slot = dice.integers(TOTAL, size=context.shape)
    values = np.zeros(context.shape, dtype=np.int16)
    for one in np.unique(which):
        rows = which == one
        symbol = (slot[rows][:, :, None] >= cumulated[one][context[rows]]).sum(axis=2)
        radius = int(model.radius[one])
        values[rows] = np.minimum(symbol, 2 * radius) - radius
    index, more = RATIO * base, RATIO * more
    index[live] += values * np.where(under < 0, -1, 1).astype(np.int16)
    more[live[~values.any(axis=1)]] += 1
    return _Drawn(index, more)
