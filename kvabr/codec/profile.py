"""The profile: side information of one model's AC tracks, fetched once and cached, like a player's init segment.

It holds what does not change from prompt to prompt: the mean of every channel, the norms, the transforms, and for every
depth the quantiser's step and the entropy coder's tables. `kvabr.codec.fit` makes one.

The file, format 2, is safetensors: arrays and one string, nothing executable.

    metadata    kvabr: JSON of format, spec, sinks, outlier, structure, depths {track: step, dead}
    mean        [layer, K/V, head, dim] float16
    norm        [layer, K/V] float32
    spread      [layer] float32
    block       [block, channel, component] int8, block.gain [block, component] uint8; absent without a transform
    stack.N     [component, coefficient] int8, stack.N.gain [coefficient] uint8; for every stack with a transform
    TRACK.class [row] uint8; TRACK.radius, TRACK.delta [class] uint8
    TRACK.freqs [class, context, symbol] int16
    TRACK.flags [flag context, row] int16; or [flag context, class] if all rows of a class are equal
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from kvabr.codec.native.model import MOST_RADIUS, CoderModel, StackModel, SynthesisModel
from kvabr.codec.quantiser import nested
from kvabr.codec.structure import Structure
from kvabr.codec.transform import Detector, Transform
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import KVSpec

MAX_PROFILE_BYTES = 1 << 29
MAX_SINKS = 64


@dataclass(frozen=True, eq=False)
class Depth:
    """The part of a profile that belongs to one track."""

    step: float
    """Step of the quantiser, in units of the norm."""
    coder: CoderModel
    dead: float = 0.0
    """Dead zone of the encoder's quantiser, see `kvabr.codec.quantiser.quantise`."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Side information for the AC tracks of one model."""

    spec: KVSpec
    sinks: int
    """Tokens at the beginning of a prompt that are stored separately: attention sinks differ from all others."""
    transform: Transform
    depths: Mapping[str, Depth]
    """By track name."""

    def __post_init__(self) -> None:
        if not isinstance(self.sinks, int) or not 0 <= self.sinks <= MAX_SINKS:
            raise FormatError(f"profile: {self.sinks!r} sinks, must be 0 to {MAX_SINKS}")
        for track, lower in nested({track: depth.step for track, depth in self.depths.items()}).items():
            depth = self.depths[track]
            if depth.coder.rows != self.transform.structure.rows or depth.coder.refines != (lower is not None):
                raise FormatError(f"profile: the tables of {track} are not for this cache")
            if not 0 <= depth.dead < 0.5:
                raise FormatError(f"profile: a dead zone of {depth.dead!r}")
            self.synthesis.scale(depth.step)

    def check(self, spec: KVSpec) -> None:
        """Raise unless the profile fits a cache of this spec. The group size does not matter.

        Raises:
            ForeignError: the profile was calibrated for another model.
        """
        if spec is not self.spec and replace(spec, group_tokens=self.spec.group_tokens) != self.spec:
            raise ForeignError(
                f"this profile was calibrated for {_title(self.spec)}, the cache is of {_title(spec)}; "
                "use that model's profile, or make one with `kvabr calibrate`"
            )

    def depth(self, track: str) -> Depth:
        """Return the profile's part for a track.

        Raises:
            FormatError: this profile has no such track.
        """
        try:
            return self.depths[track]
        except KeyError:
            raise FormatError(f"the profile has no {track}, only {', '.join(self.depths)}") from None

    @cached_property
    def synthesis(self) -> SynthesisModel:
        """Model of the decoder's way from coefficients to a cache."""
        transform, spec = self.transform, self.spec
        structure = transform.structure
        stacks = []
        for index, stack in enumerate(structure.stacks):
            mantissa, gain = (part.numpy() for part in transform.stack[index])
            stacks.append(StackModel(stack.kind, tuple(range(stack.first, stack.last)), stack.kept, mantissa, gain))
        shape = (spec.layers, 2, structure.per_layer, structure.width)
        block = transform.block
        return SynthesisModel(
            spec.layers,
            spec.kv_heads,
            spec.head_dim,
            spec.rope,
            structure.block_heads,
            None if block is None else block[0].numpy().reshape(*shape, structure.width),
            None if block is None else block[1].numpy().reshape(shape),
            tuple(stacks),
            transform.mean.float().numpy(),
            transform.norm.numpy(),
        )

    @cached_property
    def data(self) -> bytes:
        """The profile as a file."""
        return dump(self)

    def to_bytes(self) -> bytes:
        """Return the profile as a safetensors file."""
        return self.data

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hex: the profile's name."""
        return hashlib.sha256(self.data).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Parse a profile from an untrusted source.

        Raises:
            FormatError: not a profile, of another version, or with invalid arrays.
        """
        profile = load(data)
        profile.__dict__["data"] = bytes(data)
        return profile


def _title(spec: KVSpec) -> str:
    rope, turned = spec.rope, "no rotary embedding"
    if rope is not None:
        scaled = "" if rope.frequencies is None else f", scaled down to {min(rope.frequencies):g} a token"
        turned = f"a rotary embedding of base {rope.theta:g}{scaled}"
    return f"{spec.model} ({spec.layers} layers, {spec.kv_heads} KV heads of {spec.head_dim}, {spec.dtype}, {turned})"


FORMAT = "kvabr.profile/2"
_OLD = "kvabr.profile/1"
_TOP_NORM = 65504.0
"""FP16's largest number: with coarser units all elements of a cache would look alike."""
_TOP_STEP = 1024.0
_ARRAYS = ("class", "radius", "delta", "freqs", "flags")


def dump(profile: Profile) -> bytes:
    """Return the profile as a file; equal profiles give equal bytes."""
    transform = profile.transform
    arrays = {"mean": transform.mean, "norm": transform.norm, "spread": transform.detector.spread}
    if transform.block is not None:
        arrays |= {"block": transform.block[0], "block.gain": transform.block[1]}
    for index, (mantissa, gain) in enumerate(transform.stack):
        if not len(mantissa):
            continue
        arrays |= {f"stack.{index}": mantissa, f"stack.{index}.gain": gain}
    for track, depth in profile.depths.items():
        coder = depth.coder
        parts: tuple[NDArray[Any], ...] = (
            coder.row_class, coder.radius, coder.delta, coder.freqs, _flags_by_class(coder)
        )  # fmt: skip
        for name, part in zip(_ARRAYS, parts, strict=True):
            # Older versions of safetensors have no uint16 in torch; the numbers are at most 4,096.
            arrays[f"{track}.{name}"] = torch.from_numpy(part.astype("int16") if part.itemsize == 2 else part.copy())
    # One string only: safetensors writes several in random order, and the digest is the profile's name.
    facts = {
        "format": FORMAT,
        "spec": profile.spec.to_json(),
        "sinks": profile.sinks,
        "outlier": min(transform.detector.threshold, _TOP_NORM),
        "structure": transform.structure.to_json(),
        "depths": {track: {"step": depth.step, "dead": depth.dead} for track, depth in profile.depths.items()},
    }
    contiguous = {name: array.contiguous() for name, array in arrays.items()}
    return bytes(save_safetensors(contiguous, metadata={"kvabr": json.dumps(facts, sort_keys=True)}))


def load(data: bytes) -> Profile:
    """Parse the output of `dump` from an untrusted source.

    Raises:
        FormatError: not a profile, of another version, or with invalid arrays.
    """
    if len(data) > MAX_PROFILE_BYTES:
        raise FormatError(f"profile: {len(data)} bytes, more than the {MAX_PROFILE_BYTES} allowed")
    try:
        facts = _facts(data)
        arrays = load_safetensors(data)
        spec = KVSpec.from_json(facts["spec"])
        structure = Structure.from_json(spec, facts["structure"])
        transform = _transform(structure, arrays, _number(facts["outlier"], _TOP_NORM))
        depths = {
            str(track): Depth(_number(listed["step"], _TOP_STEP), _coder(arrays, track), float(listed["dead"]))
            for track, listed in facts["depths"].items()
        }
        profile = Profile(spec, facts["sinks"], transform, depths)
    except FormatError:
        raise
    # torch raises RuntimeError (of which RecursionError is a subclass) for an array without elements whose other axes
    # are impossibly long.
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise FormatError(f"profile: not a profile file ({error!r})") from error
    if arrays:
        raise FormatError(f"profile: unknown arrays {', '.join(sorted(arrays)[:4])}")
    return profile


def _transform(structure: Structure, arrays: dict[str, torch.Tensor], outlier: float) -> Transform:
    """Remove the arrays of the transform from ``arrays`` and check them."""
    spec, width, blocks = structure.spec, structure.width, structure.blocks
    mean = _take(arrays, "mean", torch.float16, (spec.layers, 2, spec.kv_heads, spec.head_dim))
    norm = _take(arrays, "norm", torch.float32, (spec.layers, 2))
    if not bool(torch.isfinite(mean).all()) or not bool(((norm > 0) & (norm <= _TOP_NORM)).all()):
        raise FormatError(f"profile: a mean is not finite, or a norm not in (0, {_TOP_NORM}]")
    spread = _take(arrays, "spread", torch.float32, (spec.layers,))
    if not bool(((spread > 0) & torch.isfinite(spread)).all()):
        raise FormatError("profile: a spread is not positive")
    block = None
    if "block" in arrays:
        mantissa = _take(arrays, "block", torch.int8, (blocks, width, width))
        block = mantissa, _take(arrays, "block.gain", torch.uint8, (blocks, width))
    stacks = []
    for index, stack in enumerate(structure.stacks):
        size = structure.width_of(stack)
        if not size:
            stacks.append((torch.zeros((0, 0), dtype=torch.int8), torch.zeros(0, dtype=torch.uint8)))
            continue
        mantissa = _take(arrays, f"stack.{index}", torch.int8, (size, size))
        stacks.append((mantissa, _take(arrays, f"stack.{index}.gain", torch.uint8, (size,))))
    return Transform(structure, mean, norm, block, tuple(stacks), Detector(spread, outlier))


def _coder(arrays: dict[str, torch.Tensor], track: str) -> CoderModel:
    """Remove the tables of one depth from ``arrays``; `CoderModel` checks their content."""
    rows = _take(arrays, f"{track}.class", torch.uint8, None)
    radius = _take(arrays, f"{track}.radius", torch.uint8, None)
    delta = _take(arrays, f"{track}.delta", torch.uint8, None)
    freqs = _take(arrays, f"{track}.freqs", torch.int16, None)
    flags = _take(arrays, f"{track}.flags", torch.int16, None)
    if freqs.dim() != 3 or freqs.shape[2] > 2 * MOST_RADIUS + 2:
        raise FormatError(f"profile: tables of shape {tuple(freqs.shape)}")
    chances, of_row = _unsigned(flags), rows.numpy()
    # Check the number of flag contexts before expanding by row: a small file must not demand more memory than a large
    # one could.
    contexts = 1 if freqs.shape[1] == 1 else 2
    if rows.dim() == 1 and chances.shape == (contexts, len(radius)) and len(radius) != len(rows) > 0:
        if int(rows.max()) >= len(radius):
            raise FormatError("profile: a coefficient is of a class that does not exist")
        chances = chances[:, of_row]
    return CoderModel(of_row, radius.numpy(), _unsigned(freqs), chances, delta.numpy())


def _flags_by_class(coder: CoderModel) -> NDArray[np.uint16]:
    """Return the flag probabilities, by class if they are equal within each class."""
    first = np.zeros(coder.classes, np.intp)
    first[coder.row_class[::-1]] = np.arange(coder.rows)[::-1]
    by_class = coder.flag_freq[:, first]
    same = coder.rows != coder.classes and np.array_equal(by_class[:, coder.row_class], coder.flag_freq)
    return by_class if same else coder.flag_freq


def _unsigned(array: torch.Tensor) -> NDArray[np.uint16]:
    if array.numel() and int(array.min()) < 0:
        raise FormatError("profile: a frequency is negative")
    return array.numpy().astype("uint16")


def _take(
    arrays: dict[str, torch.Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...] | None
) -> torch.Tensor:
    array = arrays.pop(name)
    if array.dtype != dtype or (shape is not None and tuple(array.shape) != shape):
        raise FormatError(f"profile: {name} is {array.dtype} {tuple(array.shape)}, must be {dtype} {shape or ''}")
    return array


def _number(value: Any, top: float) -> float:
    number = float(value)
    if not 0 < number <= top:
        raise FormatError(f"profile: {value!r} is not in (0, {top}]")
    return number


def _facts(data: bytes) -> dict[str, Any]:
    """Return the facts in the header of a profile; safetensors reads a header's strings only from files."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise FormatError("profile: truncated within its header")
    header = json.loads(data[8 : 8 + length])
    text = header.get("__metadata__") if isinstance(header, dict) else None
    facts = json.loads(text["kvabr"]) if isinstance(text, dict) else None
    if not isinstance(facts, dict):
        raise FormatError("profile: a safetensors file, but not a profile")
    if facts["format"] == _OLD:
        raise FormatError("profile: made by an older kvabr; make it again with `kvabr calibrate`")
    if facts["format"] != FORMAT:
        raise FormatError(f"profile: format {facts['format']!r}, this kvabr reads {FORMAT!r}; upgrade kvabr")
    return facts
