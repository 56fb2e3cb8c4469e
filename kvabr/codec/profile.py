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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kvabr.codec.analysis import Analysis
from kvabr.codec.native.coder_model import MOST_RADIUS, CoderModel, Quantiser
from kvabr.codec.quantiser import nested
from kvabr.codec.transform import NO_MATRIX, Matrices, Structure, Transform
from kvabr.types.catalog import MAX_PROFILE_BYTES
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import FP16_MAX, KVSpec

_MAX_HEADER_BYTES = 256 << 10
MAX_SINKS = 64
FORMAT = "kvabr.profile/2"
_OLD = "kvabr.profile/1"
MAX_STEP = 1024.0
_NOT_A_FILE = SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError
_Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Depth(Quantiser):
    """The part of a profile that belongs to one track: its quantiser, in units of the norm, and its tables."""

    coder: CoderModel


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
            self.transform.scale(depth.step)

    def check(self, spec: KVSpec) -> None:
        """Raise a `ForeignError` unless the profile fits a cache of this spec. The group size does not matter."""
        if spec is not self.spec and not spec.same_cache(self.spec):
            raise ForeignError(
                f"this profile was calibrated for {_title(self.spec)}, the cache is of {_title(spec)}; "
                "use that model's profile, or make one with `kvabr calibrate`"
            )

    def depth(self, track: str) -> Depth:
        """Return the profile's part for a track; raise a `FormatError` if it has none."""
        try:
            return self.depths[track]
        except KeyError:
            raise FormatError(f"the profile has no {track}, only {', '.join(self.depths)}") from None

    @cached_property
    def analysis(self) -> Analysis:
        """The encoder's use of the transform."""
        return Analysis(self.transform)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hex: the profile's name."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def _file(self) -> bytes:
        transform = self.transform
        arrays: _Arrays = {"mean": transform.mean, "norm": transform.norm, "spread": transform.spread}
        matrices = {f"stack.{index}": each for index, each in enumerate(transform.stack) if each.gain.size}
        if transform.block is not None:
            matrices["block"] = transform.block
        for name, (mantissa, gain) in matrices.items():
            arrays |= {name: mantissa, f"{name}.gain": gain}
        for track, depth in self.depths.items():
            coder = depth.coder
            parts = {"class": coder.row_class, "radius": coder.radius, "delta": coder.delta}
            # Files have no uint16; the numbers are at most 4,096.
            parts |= {
                "freqs": coder.freqs.astype(np.int16),
                "flags": _flags_by_class(coder).astype(np.int16, order="C"),
            }
            arrays |= {f"{track}.{name}": part for name, part in parts.items()}
        # One string only: safetensors writes several in random order, and the digest is the profile's name.
        facts = {
            "format": FORMAT,
            "spec": self.spec.to_json(),
            "sinks": self.sinks,
            "outlier": min(transform.threshold, FP16_MAX),
            "structure": transform.structure.to_json(),
            "depths": {track: {"step": depth.step, "dead": depth.dead} for track, depth in self.depths.items()},
        }
        return bytes(save(arrays, metadata={"kvabr": json.dumps(facts, sort_keys=True)}))

    def to_bytes(self) -> bytes:
        """Return the profile as a file, see `kvabr.codec.profile`; equal profiles give equal bytes."""
        return self._file

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Parse a profile from an untrusted source; raise a `FormatError` if it is none, or of another version."""
        if len(data) > MAX_PROFILE_BYTES:
            raise FormatError(f"profile: {len(data)} bytes, more than the {MAX_PROFILE_BYTES} allowed")
        try:
            facts = _facts(data)
            arrays = load(data)
            spec = KVSpec.from_json(facts["spec"])
            structure = Structure.from_json(spec, facts["structure"])
            transform = Transform(
                structure,
                arrays.pop("mean"),
                arrays.pop("norm"),
                _matrices(arrays, "block") if "block" in arrays else None,
                tuple(
                    _matrices(arrays, f"stack.{index}") if stack.kept else NO_MATRIX
                    for index, stack in enumerate(structure.stacks)
                ),
                arrays.pop("spread"),
                _number(facts["outlier"], FP16_MAX),
            )
            depths = {
                str(track): Depth(_number(listed["step"], MAX_STEP), float(listed["dead"]), _coder(arrays, track))
                for track, listed in facts["depths"].items()
            }
            profile = cls(spec, facts["sinks"], transform, depths)
        except FormatError:
            raise
        except _NOT_A_FILE as error:
            raise FormatError(f"profile: not a profile file ({error!r})") from error
        if arrays:
            raise FormatError(f"profile: unknown arrays {', '.join(sorted(arrays)[:4])}")
        profile.__dict__["_file"] = bytes(data)
        return profile


def _title(spec: KVSpec) -> str:
    if len(spec.classes) > 1:
        return f"{spec.model} ({spec.summary})"
    rope, turned = spec.rope, "no rotary embedding"
    if rope is not None:
        scaled = "" if rope.frequencies is None else f", scaled down to {min(rope.frequencies):g} a token"
        turned = f"a rotary embedding of base {rope.theta:g}{scaled}"
    return f"{spec.model} ({spec.summary}, {turned})"


def _matrices(arrays: _Arrays, name: str) -> Matrices:
    return Matrices(arrays.pop(name), arrays.pop(f"{name}.gain"))


def _coder(arrays: _Arrays, track: str) -> CoderModel:
    """Remove the tables of one depth from ``arrays``; `CoderModel` checks their content."""
    names = ("class", "radius", "delta", "freqs", "flags")
    of_row, radius, delta, freqs, flags = (arrays.pop(f"{track}.{name}") for name in names)
    if freqs.ndim != 3 or freqs.shape[2] > 2 * MOST_RADIUS + 2:
        raise FormatError(f"profile: tables of shape {freqs.shape}")
    if freqs.dtype != np.int16 or flags.dtype != np.int16 or min(freqs.min(initial=0), flags.min(initial=0)) < 0:
        raise FormatError("profile: a frequency is negative, or not of 16 bits")
    # Check the number of flag contexts before expanding by row: a small file must not demand more memory than a large
    # one could.
    contexts = 1 if freqs.shape[1] == 1 else 2
    if of_row.ndim == 1 and flags.shape == (contexts, len(radius)) and len(radius) != len(of_row) > 0:
        if of_row.dtype != np.uint8 or int(of_row.max()) >= len(radius):
            raise FormatError("profile: a coefficient is of a class that does not exist")
        flags = flags[:, of_row]
    return CoderModel(of_row, radius, freqs.astype(np.uint16), flags.astype(np.uint16), delta)


def _flags_by_class(coder: CoderModel) -> NDArray[np.uint16]:
    """Return the flag probabilities, by class if they are equal within each class."""
    first = np.zeros(coder.classes, np.intp)
    first[coder.row_class[::-1]] = np.arange(coder.rows)[::-1]
    by_class = coder.flag_freq[:, first]
    same = coder.rows != coder.classes and np.array_equal(by_class[:, coder.row_class], coder.flag_freq)
    return by_class if same else coder.flag_freq


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
    if length > _MAX_HEADER_BYTES:  # parsed in one call, which stops all other threads
        raise FormatError(f"profile: a header of {length} bytes, more than the {_MAX_HEADER_BYTES} allowed")
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
