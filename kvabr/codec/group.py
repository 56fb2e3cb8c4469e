"""One group to one frame and back: the path that publisher and player share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from kvabr.codec import gpu
from kvabr.codec.base import Codec, GroupContext, codec
from kvabr.codec.container import FrameHeader, HasDigest, opened, pack, unpack
from kvabr.codec.gpu.level_job import LevelJob
from kvabr.codec.payload import place
from kvabr.codec.quantised import check_type, clean_codes, codes_of, is_kept, is_quantised, numbers_of
from kvabr.codec.rope import rotate
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX, KVSpec
from kvabr.types.sealing import AssetKey
from kvabr.types.units import Unit

FLOAT32_MAX = 3.4028234663852886e38
"""float32's largest number."""


def clean(kv: torch.Tensor, top: float = FP16_MAX) -> tuple[torch.Tensor, int]:
    """Replace NaN by zero, and what exceeds ``top`` by it; return how many elements were replaced, too.

    The tensor, of any shape and float dtype, is returned itself if nothing is replaced.
    """
    if is_quantised(kv.dtype):
        return clean_codes(kv)
    if kv.dtype == torch.uint8:
        return kv, 0
    # The extremes are finite only if all elements are, and are found ten times faster than isfinite.
    if not kv.numel() or bool(torch.stack(torch.aminmax(kv)).abs().amax() <= top):
        return kv, 0
    bad = ~(kv.abs() <= top)
    return torch.nan_to_num(kv, nan=0.0, posinf=top, neginf=-top).clamp(-top, top), int(bad.sum())


def largest_number(part: KVSpec) -> float:
    """Return the bound of `clean` for one class: FP16's largest number, but float32's for states of that type."""
    return FLOAT32_MAX if part.only.kind == "state" and part.dtype == "float32" else FP16_MAX


def cut(cache: Sequence[torch.Tensor], unit: Unit, spec: KVSpec) -> torch.Tensor:
    """Return a view of one unit of a cache, a tensor per layer class, [layer, K/V, head, token, dim] of all tokens.

    The tensor of a state has its snapshots one behind the other, with rows in the place of tokens.
    """
    first = unit.group * unit.tokens if spec.parts[unit.part].only.kind == "state" else unit.first
    return cache[unit.part][:, :, :, first : first + unit.tokens]


def encode_group(
    kv: torch.Tensor,
    track: str,
    context: GroupContext,
    chunk: str,
    group: int,
    below: Sequence[bytes] = (),
) -> bytes:
    """Compress and frame one group; raise a `FormatError` if its shape differs from the context's.

    Args:
        kv: [layer, K/V, head, token, dim], any float dtype, float8 or uint8 if the class is kept in it; invalid
            elements are replaced as by `clean`.
        track: name of the codec.
        context: which group it is.
        chunk: its chained prompt digest.
        group: its index in its track.
        below: payloads of the tracks that this one refines, base first.
    """
    check_shape(kv, context, f"group {group}: cannot encode")
    payload = encode_payload(clean(kv, largest_number(context.spec))[0], track, context, below)
    return framed(payload, track, context, chunk, group)


def encode_payload(kv: torch.Tensor, track: str, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:
    """Compress what `clean` returned, as `encode_group` does."""
    made = codec(track)
    _check_carried(made, context.spec)
    if is_quantised(kv.dtype) and not made.takes_codes:
        kv = numbers_of(kv, context.spec)
    return made.encode(kv, context, below)


def framed(payload: bytes, track: str, context: GroupContext, chunk: str, group: int) -> bytes:
    """Frame what `encode_payload` returned."""
    header = frame_header(track, context, chunk, group)
    return pack(payload, header, codec(track).frame_version(payload), context.key)


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
    at: int | None = None,
) -> None:
    """Check and decompress one frame; the arguments are those of `encode_group`, `Codec.decode` and `unpack`.

    ``at`` stands for the context's, `GroupContext.at`.

    Raises:
        ForeignError: a valid frame of something else.
        SealedError: sealed, and the context has no key, or another.
        FormatError: corrupt, truncated, a different digest, not a payload of this codec, or ``out`` has another shape.
    """
    _, payload = unpack(frame, frame_header(track, context, chunk, group), digest, has_digest)
    payload = opened(frame, payload, context.key)
    decode_payload(payload, track, context if at is None else replace(context, at=at), group, out, below)


def decode_payload(
    payload: memoryview,
    track: str,
    context: GroupContext,
    group: int,
    out: torch.Tensor,
    below: Sequence[memoryview] = (),
) -> None:
    """Decompress the payload of a frame that has been checked; arguments and errors as for `decode_group`."""
    decode_by(codec(track), payload, context, group, out, below)


def decode_by(
    made: Codec,
    payload: memoryview,
    context: GroupContext,
    group: int,
    out: torch.Tensor,
    below: Sequence[memoryview] = (),
) -> None:
    """Do what `decode_payload` does with a codec that need not be a track's."""
    check_shape(out, context, f"group {group}: cannot decode into")
    _check_carried(made, context.spec)
    rotated = context.free and context.at is not None and not made.rotates
    if not rotated and (made.takes_codes or not is_quantised(out.dtype)):
        if has_kernel(made, out.device):
            gpu.expand(LevelJob(made.name, payload, context.spec, out, partial(made.decode, payload, context)))
        else:
            made.decode(payload, context, out, below)
        return
    numbers = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    made.decode(payload, context, numbers, below)
    if rotated:
        numbers[:, 0] = rotate(numbers[:, 0], context.spec.rope, context.at)
    if is_quantised(out.dtype):
        out.copy_(codes_of(numbers, context.spec))
    else:
        place(out, numbers)


def _check_carried(made: Codec, spec: KVSpec) -> None:
    if spec.only.packing and not made.takes_codes:
        raise FormatError(
            f"{made.name} codes numbers, and {spec.only.title} of {spec.model} is packed: only Raw carries it"
        )


def has_kernel(made: Codec, device: torch.device) -> bool:
    """Return whether `gpu.expand` decodes what a codec encoded, on this device."""
    return bool(vars(type(made)).get("has_kernel")) and gpu.runs_on(device)


def check_shape(kv: torch.Tensor, context: GroupContext, what: str) -> None:
    """Raise a `FormatError` unless a tensor has the shape and type of a group; ``what`` begins the message."""
    wanted = context.spec.shape(context.tokens)
    if tuple(kv.shape) != wanted or not is_kept(kv.dtype):
        raise FormatError(f"{what} {kv.dtype} of {tuple(kv.shape)}; floats of {wanted} are needed")
    check_type(kv, context.spec, what)
    if context.free and context.spec.rope is None:
        raise FormatError(f"{what} without a position: the spec does not say how keys are rotated")


def frame_header(track: str, context: GroupContext, chunk: str, group: int) -> FrameHeader:
    """Return the header that the frame of a group must have; ``track`` is its level."""
    spec = context.spec
    return FrameHeader(spec.track_name(track), spec.digest(), chunk, group, context.first_token, context.tokens)


def payload_of(frame: bytes | memoryview, key: AssetKey | None = None) -> memoryview:
    """Return the payload of a frame that has been checked before; ``key`` opens it."""
    return opened(frame, unpack(frame)[1], key)
