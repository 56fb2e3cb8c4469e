"""One group to one frame and back: the path that the publisher and the player share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.container import FrameHeader, HasDigest, pack, unpack
from kvabr.types.errors import FormatError

_TOP = 65504.0
"""FP16's largest number."""


def clean(kv: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Replace what no cache should hold: NaN by zero, infinity and what FP16 cannot hold by FP16's largest number.

    Args:
        kv: any shape, any float dtype.

    Returns:
        The tensor itself if there is nothing to replace, and how many numbers were replaced.
    """
    # The largest magnitude is not finite if any element is not, and is found ten times faster than isfinite is.
    if not kv.numel() or bool(kv.abs().amax() <= _TOP):
        return kv, 0
    bad = ~(kv.abs() <= _TOP)
    return torch.nan_to_num(kv, nan=0.0, posinf=_TOP, neginf=-_TOP).clamp(-_TOP, _TOP), int(bad.sum())


def encode_group(
    kv: torch.Tensor,
    track: str,
    context: GroupContext,
    chunk: str,
    group: int,
    below: Sequence[bytes] = (),
) -> bytes:
    """Compress and frame one group.

    Args:
        kv: [layer, K/V, head, token, dim], any float dtype; numbers that no cache should hold are replaced as `clean`
            does.
        track: name of the codec.
        context: what group it is.
        chunk: its chained prompt digest.
        group: its index.
        below: payloads of the tracks that this one refines, base first.

    Raises:
        FormatError: another shape than the context says.
    """
    wanted = context.spec.shape(context.tokens)
    if tuple(kv.shape) != wanted or not kv.is_floating_point():
        raise FormatError(f"group {group}: {tuple(kv.shape)} {kv.dtype} cannot be encoded, only floats of {wanted}")
    payload = codec(track).encode(clean(kv)[0], context, below)
    return pack(
        payload,
        track=track,
        spec_digest=context.spec.digest(),
        chunk=chunk,
        group=group,
        first_token=context.first_token,
        tokens=context.tokens,
    )


def decode_group(
    frame: bytes | memoryview,
    track: str,
    context: GroupContext,
    chunk: str,
    group: int,
    out: torch.Tensor,
    below: Sequence[memoryview] = (),
    *,
    digest: str | None = None,
    has_digest: HasDigest | None = None,
) -> None:
    """Check and decompress one frame.

    Args:
        frame: the bytes; hostile until checked.
        track: the track that was asked for.
        context: what group it is.
        chunk: its chained prompt digest.
        group: its index.
        out: [layer, K/V, head, token, dim], any float dtype, any strides.
        below: payloads of the tracks that this one refines, base first.
        digest: SHA-256 that the frame must have, hex; what has another one is not decoded. None if it was compared
            before, or is not known.
        has_digest: compares ``digest``, for a caller that remembers the frame's; None: it is computed here.

    Raises:
        ForeignError: a good frame of something else.
        FormatError: corrupt, truncated, with another digest, or not what its codec makes; or ``out`` has another
            shape.
    """
    wanted = context.spec.shape(context.tokens)
    if tuple(out.shape) != wanted or not out.is_floating_point():
        raise FormatError(
            f"group {group}: {tuple(out.shape)} {out.dtype} cannot take it, floats of {wanted} are needed"
        )
    expect = FrameHeader(track, context.spec.digest(), chunk, group, context.first_token, context.tokens, 0)
    _, payload = unpack(frame, expect, digest, has_digest)
    codec(track).decode(payload, context, out, below)


def payload_of(frame: bytes | memoryview) -> memoryview:
    """The payload of a frame that was checked before."""
    return unpack(frame)[1]
