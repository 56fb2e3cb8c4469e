"""One group to one frame and back: the path that publisher and player share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.container import FrameHeader, HasDigest, pack, unpack
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX


def clean(kv: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Replace invalid elements: NaN by zero, infinity and what exceeds FP16 by FP16's largest number.

    Args:
        kv: any shape, any float dtype.

    Returns:
        The tensor itself if nothing is replaced, and the number of replaced elements.
    """
    # The largest magnitude is finite only if all elements are, and is found ten times faster than isfinite.
    if not kv.numel() or bool(kv.abs().amax() <= FP16_MAX):
        return kv, 0
    bad = ~(kv.abs() <= FP16_MAX)
    return torch.nan_to_num(kv, nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX).clamp(-FP16_MAX, FP16_MAX), int(bad.sum())


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
        kv: [layer, K/V, head, token, dim], any float dtype; invalid elements are replaced as by `clean`.
        track: name of the codec.
        context: which group it is.
        chunk: its chained prompt digest.
        group: its index.
        below: payloads of the tracks that this one refines, base first.

    Raises:
        FormatError: the shape differs from the context's.
    """
    wanted = context.spec.shape(context.tokens)
    if tuple(kv.shape) != wanted or not kv.is_floating_point():
        raise FormatError(
            f"group {group}: cannot encode {kv.dtype} of {tuple(kv.shape)}; floats of {wanted} are needed"
        )
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
        frame: the bytes; untrusted.
        track: the requested track.
        context: which group it is.
        chunk: its chained prompt digest.
        group: its index.
        out: [layer, K/V, head, token, dim], any float dtype, any strides.
        below: payloads of the tracks that this one refines, base first.
        digest: expected SHA-256 of the frame, hex; anything else is not decoded. None if it was compared before, or
            is unknown.
        has_digest: compares ``digest`` for a caller that knows the frame's; None to compute it here.

    Raises:
        ForeignError: a valid frame of something else.
        FormatError: corrupt, truncated, a different digest, or not a payload of this codec; or ``out`` has another
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
    """Return the payload of a frame that has been checked before."""
    return unpack(frame)[1]
