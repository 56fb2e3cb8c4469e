"""Conversion of one group to one frame and back, for publishers and players."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from kvabr.codec import gpu
from kvabr.codec.base import Codec, GroupContext, codec
from kvabr.codec.container import FrameHeader, HasDigest, pack, unpack
from kvabr.codec.gpu.level_job import LevelJob
from kvabr.codec.payload import place
from kvabr.codec.quantised import all_finite, check_type, codes_of, is_quantised, numbers_of, special
from kvabr.codec.rope import rotate
from kvabr.types.errors import FormatError, NotFiniteError
from kvabr.types.kv import KVSpec
from kvabr.types.units import Unit


def largest(kv: torch.Tensor, spec: KVSpec, first_token: int = 0) -> float:
    """Return the largest magnitude in a tensor [layer, K/V, head, token, dim] of a layer class; 0 for float8 codes.

    ``first_token`` (a row for a state) is used only in the error message.

    Raises:
        NotFiniteError: a number is NaN or infinite.
    """
    if not kv.numel():
        return 0.0
    if is_quantised(kv.dtype):
        if all_finite(kv):
            return 0.0
    else:
        # The extremes are finite only if all elements are; computing them is ten times faster than isfinite.
        found = float(torch.stack(torch.aminmax(kv)).abs().amax())
        if math.isfinite(found):
            return found
    bad = special(kv) if is_quantised(kv.dtype) else ~torch.isfinite(kv)
    layer, half = (int(each) for each in bad.nonzero()[0, :2])
    tokens = bad[layer, half].any(dim=2).any(dim=0).nonzero()
    first, last = (first_token + int(tokens[at, 0]) for at in (0, -1))
    number = spec.only.layers[layer]
    part = "vectors" if spec.only.halves == 1 else ("keys", "values")[half]
    raise NotFiniteError(
        f"{spec.model}: the {part} of layer {number} are NaN or infinite between tokens {first} and {last}; the "
        "prefill failed, so its cache is not published: check the model, or use another element type (bfloat16)",
        layer=number,
        half=part,
        first=first,
        last=last,
    )


def holds(track: str, spec: KVSpec, magnitude: float) -> bool:
    """Return True if a track keeps numbers of a layer class, up to this magnitude, within its loss."""
    return magnitude <= codec(track).largest(spec)


def check_holds(track: str, spec: KVSpec, magnitude: float) -> None:
    """Raise `FormatError` if this magnitude is too large for a track, see `holds`."""
    if not holds(track, spec, magnitude):
        raise FormatError(
            f"{spec.model}: the cache has a number of magnitude {magnitude:g}, but track {track} ends at "
            f"{codec(track).largest(spec):g}; use BF16 or Raw ({spec.dtype})"
        )


def cut(cache: Sequence[torch.Tensor], unit: Unit, spec: KVSpec) -> torch.Tensor:
    """Return a view of one unit's tokens, [layer, K/V, head, token, dim], in a cache of one tensor per layer class.

    A state's tensor has its snapshots one after the other; the axis of tokens has their rows.
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
    """Compress and frame one group.

    ``kv`` is [layer, K/V, head, token, dim], any float dtype; float8 for a quantised class. ``chunk`` is its chained
    prompt digest, ``group`` its index in its track; ``below`` are the payloads of the tracks below, base first.

    Raises:
        FormatError: another shape than the context's, or numbers too large for the track.
        NotFiniteError: a number is NaN or infinite.
    """
    check_shape(kv, context, f"group {group}: cannot encode")
    check_holds(track, context.spec, largest(kv, context.spec, context.first_token))
    payload = encode_payload(kv, track, context, below)
    return framed(payload, track, context, chunk, group)


def encode_payload(kv: torch.Tensor, track: str, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:
    """Compress a group like `encode_group`, but without checking it with `largest` and `check_holds`."""
    made = codec(track)
    if is_quantised(kv.dtype) and not made.takes_codes:
        kv = numbers_of(kv, context.spec)
    return made.encode(kv, context, below)


def framed(payload: bytes, track: str, context: GroupContext, chunk: str, group: int) -> bytes:
    """Frame a result of `encode_payload`."""
    return pack(payload, frame_header(track, context, chunk, group))


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
    """Check and decompress one frame; see `encode_group`, `Codec.decode` and `unpack` for the arguments.

    ``at`` overrides `GroupContext.at`.

    Raises:
        ForeignError: a valid frame of another group.
        FormatError: a corrupt or truncated frame, another digest, another codec's payload, or a wrong shape of ``out``.
    """
    _, payload = unpack(frame, frame_header(track, context, chunk, group), digest, has_digest)
    decode_payload(payload, track, context if at is None else replace(context, at=at), group, out, below)


def decode_payload(
    payload: memoryview,
    track: str,
    context: GroupContext,
    group: int,
    out: torch.Tensor,
    below: Sequence[memoryview] = (),
) -> None:
    """Decompress the payload of a checked frame; arguments and errors are as for `decode_group`."""
    decode_by(codec(track), payload, context, group, out, below)


def decode_by(
    made: Codec,
    payload: memoryview,
    context: GroupContext,
    group: int,
    out: torch.Tensor,
    below: Sequence[memoryview] = (),
) -> None:
    """Decompress with a given codec, otherwise like `decode_payload`."""
    check_shape(out, context, f"group {group}: cannot decode into")
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


def has_kernel(made: Codec, device: torch.device) -> bool:
    """Return True if `gpu.expand` can decode this codec's payloads on this device."""
    return bool(vars(type(made)).get("has_kernel")) and gpu.runs_on(device)


def check_shape(kv: torch.Tensor, context: GroupContext, what: str) -> None:
    """Raise `FormatError` if a tensor does not have the shape and type of a group; ``what`` begins the message."""
    wanted = context.spec.shape(context.tokens)
    if tuple(kv.shape) != wanted or not kv.dtype.is_floating_point:
        raise FormatError(f"{what} {kv.dtype} of {tuple(kv.shape)}; floats of {wanted} are needed")
    check_type(kv, context.spec, what)
    if context.free and context.spec.rope is None:
        raise FormatError(f"{what} without a position: the spec does not say how keys are rotated")


def frame_header(track: str, context: GroupContext, chunk: str, group: int) -> FrameHeader:
    """Return the header of a group's frame."""
    spec = context.spec
    return FrameHeader(spec.track_name(track), spec.digest(), chunk, group, context.first_token, context.tokens)


def payload_of(frame: bytes | memoryview) -> memoryview:
    """Return the payload of a checked frame."""
    return unpack(frame)[1]
