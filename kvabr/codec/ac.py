"""AC (5x): quantised in a domain where a cache is quiet, then entropy coded against the profile's tables.

The rotary embedding is undone, the channel's mean removed, each head turned to its principal components (an
orthonormal transform: it saves a tenth of the bits and changes no error), and these quantised with one step for a whole
layer's keys and one for its values: noise of equal power everywhere costs the model less than noise in proportion to
each channel.
The first tokens of a prompt are kept exact. Indices are coded class by class with an ANS coder (constriction).

    words 4 | ANS words | escapes 4 | escaped indices | exact tokens as FP16
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

import constriction
import numpy as np
import torch

from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.bits import Reader, finite, place, raw
from kvabr.codec.profile import ESCAPE, RADIUS, Profile
from kvabr.codec.rope import rotate
from kvabr.errors import FormatError

_COUNT = struct.Struct("<I")
_LARGEST = 2.0**100
_FARTHEST = 1 << 24
"""Indices beyond this are clipped: float32 has no finer steps there."""


class Ac5x(Codec):
    """The draft's arithmetic-coded level: at least five times smaller than FP16."""

    name: ClassVar[str] = "AC-5x"
    needs_profile: ClassVar[bool] = True

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        """Quantise and code."""
        profile = _profile(context)
        exact = _exact_tokens(profile, context)
        # Within bounds that no cache comes near, so that turning two elements of a pair cannot overflow.
        plain = group[:, :, :, exact:].float().clamp(-_LARGEST, _LARGEST)
        plain[:, 0] = rotate(plain[:, 0], context.spec.rope, context.first_token + exact, undo=True)
        plain -= profile.mean.float()[:, :, :, None]
        plain = plain @ profile.analysis
        plain /= profile.step[:, :, None, None, None]
        index = plain.round_().clamp_(-_FARTHEST, _FARTHEST).int()
        tokens = context.tokens - exact
        rows = index.transpose(3, 4).reshape(profile.table.numel(), tokens)[profile.order]
        outside = rows.abs() > RADIUS
        symbols = torch.where(outside, ESCAPE, rows + RADIUS).int().reshape(-1).numpy()
        coder = constriction.stream.stack.AnsCoder()
        end = len(symbols)
        # A stack gives back last what was put in first, so the last class goes in first.
        for model, size in zip(reversed(_models(profile)), reversed(profile.class_sizes), strict=True):
            begin = end - size * tokens
            if end > begin:
                coder.encode_reverse(symbols[begin:end], model)
            end = begin
        words = coder.get_compressed().astype("<u4").tobytes()
        escaped = rows[outside].numpy().astype("<i4").tobytes()
        head = group[:, :, :, :exact].clamp(-65504, 65504).half()
        return b"".join(
            (_COUNT.pack(len(words) // 4), words, _COUNT.pack(len(escaped) // 4), escaped, raw(head) if exact else b"")
        )

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        """Decode, scale, add the mean, rotate."""
        profile, spec = _profile(context), context.spec
        exact = _exact_tokens(profile, context)
        tokens = context.tokens - exact
        reader = Reader(payload, self.name)
        words = np.frombuffer(reader.bytes(4 * _COUNT.unpack(reader.bytes(4))[0]), dtype="<u4").astype(np.uint32)
        escaped = np.frombuffer(reader.bytes(4 * _COUNT.unpack(reader.bytes(4))[0]), dtype="<i4")
        head = reader.tensor(torch.float16, spec.shape(exact)) if exact else None
        reader.end()
        rows = _unstack(profile, words, tokens).reshape(profile.table.numel(), tokens)
        _insert(rows, escaped, self.name)
        # Component by component as they come, then to their places: one pass over long rows instead of short ones.
        plain = torch.empty(rows.shape)
        plain[profile.order] = rows.float().sub_(RADIUS).mul_(profile.step_in_order)
        parts = plain.reshape(spec.layers, 2, spec.kv_heads, spec.head_dim, tokens).transpose(3, 4)
        values = (parts @ profile.synthesis).add_(profile.mean.float()[:, :, :, None])
        place(out[:, 0, :, exact:], rotate(values[:, 0], spec.rope, context.first_token + exact))
        place(out[:, 1, :, exact:], values[:, 1])
        if head is not None:
            out[:, :, :, :exact] = finite(head, self.name)


def _insert(rows: torch.Tensor, escaped: np.ndarray, what: str) -> None:
    """Put the escaped indices in the places that wait for them, offset as the others are."""
    places = (rows.view(-1) == ESCAPE).nonzero().view(-1)
    if len(places) != len(escaped):
        raise FormatError(f"{what}: {len(places)} escapes announced, {len(escaped)} there")
    if len(escaped):
        if escaped.min() < -_FARTHEST or escaped.max() > _FARTHEST:
            raise FormatError(f"{what}: an escaped index is beyond what an encoder writes; the payload is not ours")
        rows.view(-1)[places] = torch.from_numpy(escaped.astype(np.int32)) + RADIUS


def _unstack(profile: Profile, words: np.ndarray, tokens: int) -> torch.Tensor:
    """All symbols, in the profile's order of channels."""
    symbols = np.empty(sum(profile.class_sizes) * tokens, dtype=np.int32)
    try:
        coder = constriction.stream.stack.AnsCoder(words)
        at = 0
        for model, size in zip(_models(profile), profile.class_sizes, strict=True):
            if size * tokens:
                symbols[at : at + size * tokens] = coder.decode(model, size * tokens)
                at += size * tokens
        empty = coder.is_empty()
    except (ValueError, RuntimeError, AssertionError) as error:
        raise FormatError(f"AC-5x: the entropy coded part cannot be decoded ({error})") from error
    if not empty:
        raise FormatError("AC-5x: the entropy coded part has words left over; corrupt, or coded with another profile")
    return torch.from_numpy(symbols)


def _models(profile: Profile) -> list[constriction.stream.model.Categorical]:
    """The coder's models, made once per profile."""
    models: list[constriction.stream.model.Categorical] | None = profile.__dict__.get("_ans_models")
    if models is None:
        shares = profile.counts.numpy().astype(np.float64)
        shares /= shares.sum(axis=1, keepdims=True)
        models = [constriction.stream.model.Categorical(row, perfect=False) for row in shares]
        profile.__dict__["_ans_models"] = models
    return models


def _profile(context: GroupContext) -> Profile:
    if context.profile is None:
        raise FormatError("AC-5x needs the model's profile; this asset came without one")
    context.profile.check(context.spec)
    return context.profile


def _exact_tokens(profile: Profile, context: GroupContext) -> int:
    return min(context.tokens, max(0, profile.sinks - context.first_token))
