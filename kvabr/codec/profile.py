"""The profile: side information of one model's AC tracks, fetched once and cached, like a player's init segment.

It holds the mean of every channel, the norms, the transforms, and for every depth the quantiser's step and the entropy
coder's tables. `kvabr.codec.fit` creates profiles. The file, format kvabr.profile/1, is safetensors: arrays and one
string, no executable content.

    metadata    kvabr: JSON of format, spec, sinks, outlier, structure, depths {track: step, dead}; optionally gains
    [stack] of a depth, quiet {threshold, usual [layer]}, which only encoders read, and seen, see
    `kvabr.codec.calibration_fingerprint`
    mean        [layer, K/V, head, dim] float16
    norm        [layer, K/V] float32
    spread      [layer] float32
    block       [block, channel, component] int8, block.gain [block, component] uint8; absent without a transform
    stack.N     [component, coefficient] int8, stack.N.gain [coefficient] uint8; for every stack with a transform
    TRACK.class [row] uint8; TRACK.radius, TRACK.delta [class] uint8
    TRACK.freqs [class, context, symbol] int16
    TRACK.near.bucket [1 or 3, 16] uint8, TRACK.near.freqs [class, context, symbol] int16; absent without such tables
    TRACK.flags [flag context, row] int16; or [flag context, class] if all rows of a class are equal

The axis K/V has length 1 if keys and values differ in shape. With several layer classes, the metadata has format, spec
and classes {name: {sinks, outlier, structure, depths}}, and array names begin with the name of the class and a slash.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kvabr.codec.analysis import Analysis
from kvabr.codec.calibration_fingerprint import Seen
from kvabr.codec.native.coder_model import MAX_RADIUS, CoderModel, NearTables, Quantiser
from kvabr.codec.quantiser import nested
from kvabr.codec.transform import NO_MATRIX, Matrices, Quiet, Structure, Transform
from kvabr.types.catalog import MAX_PROFILE_BYTES
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import FP16_MAX, KVSpec

_MAX_HEADER_BYTES = 256 << 10
MAX_SINKS = 64
FORMAT = "kvabr.profile/1"
MAX_STEP = 1024.0
_MAX_COPIES = 128.0
_NOT_A_FILE = SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError
_Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Depth(Quantiser):
    """A profile's data for one track: its quantiser, in units of the norm, and its tables."""

    coder: CoderModel
    gains: tuple[float, ...] = ()
    """Factors of decoded elements around their mean, by stack. Empty: all 1."""


class Profile(ABC):
    """Side information for the AC tracks of one model, of one or several layer classes."""

    spec: KVSpec
    """Spec of the model, or of one layer class (`KVSpec.parts`)."""
    seen: Seen | None
    """Fingerprints of the calibration texts, if known."""

    @abstractmethod
    def of(self, spec: KVSpec) -> ClassProfile:
        """Return the profile of one layer class; raise `ForeignError` for a class of another model."""

    @property
    @abstractmethod
    def tracks(self) -> tuple[str, ...]:
        """Tracks that all classes have."""

    @abstractmethod
    def _packed(self) -> tuple[dict[str, Any], _Arrays]:
        """Return the metadata and the arrays of the file."""

    def check(self, spec: KVSpec) -> None:
        """Raise `ForeignError` if the profile does not fit caches of this spec; ignore the group size."""
        if spec is not self.spec and not spec.same_cache(self.spec):
            raise ForeignError(
                f"this profile was calibrated for {self.spec.title}, but the cache is of {spec.title}; use that "
                "model's profile, or make one with `kvabr calibrate`"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hex. It serves as the profile's name."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def _file(self) -> bytes:
        facts, arrays = self._packed()
        if self.seen is not None:
            facts["seen"] = self.seen.to_json()
        # Write a single string: safetensors writes several in random order, which would change the digest.
        return bytes(save(arrays, metadata={"kvabr": json.dumps(facts, sort_keys=True)}))

    def to_bytes(self) -> bytes:
        """Return the profile as a file; equal profiles give equal bytes."""
        return self._file

    @staticmethod
    def from_bytes(data: bytes) -> Profile:
        """Parse an untrusted profile; raise `FormatError` if it is invalid or has another version."""
        if len(data) > MAX_PROFILE_BYTES:
            raise FormatError(f"profile: {len(data)} bytes, more than the {MAX_PROFILE_BYTES} allowed")
        try:
            facts = _facts(data)
            arrays = load(data)
            spec = KVSpec.from_json(facts["spec"])
            profile: Profile
            seen = Seen.from_json(facts["seen"]) if "seen" in facts else None
            if "classes" in facts:
                profile = ModelProfile(spec, _unpacked_parts(spec, facts["classes"], arrays), seen)
            else:
                only = _unpacked(spec, facts, arrays)
                profile = only if seen is None else replace(only, seen=seen)
        except FormatError:
            raise
        except _NOT_A_FILE as error:
            raise FormatError(f"profile: not a profile file ({error!r})") from error
        if arrays:
            raise FormatError(f"profile: unknown arrays {', '.join(sorted(arrays)[:4])}")
        profile.__dict__["_file"] = bytes(data)
        return profile


@dataclass(frozen=True, eq=False)
class ClassProfile(Profile):
    """The profile of one layer class."""

    spec: KVSpec
    sinks: int
    """Number of first tokens of a prompt stored separately, since attention sinks differ from all other tokens."""
    transform: Transform
    depths: Mapping[str, Depth]
    copies: float | None = None
    """Median of `kvabr.codec.unusual.Likeness.copies` in the calibration, or None if unknown; only encoders use it."""
    seen: Seen | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sinks, int) or not 0 <= self.sinks <= MAX_SINKS:
            raise FormatError(f"profile: sinks must be 0 to {MAX_SINKS}, got {self.sinks!r}")
        for track, lower in nested({track: depth.step for track, depth in self.depths.items()}).items():
            depth = self.depths[track]
            if depth.coder.rows != self.transform.structure.rows or depth.coder.refines != (lower is not None):
                raise FormatError(f"profile: the tables of {track} do not fit its transform")
            if not 0 <= depth.dead < 0.5:
                raise FormatError(f"profile: the dead zone must be 0 to 0.5, got {depth.dead!r}")
            self.transform.scale(depth.step, depth.gains)

    def of(self, spec: KVSpec) -> ClassProfile:
        self.check(spec)
        return self

    @property
    def tracks(self) -> tuple[str, ...]:
        return tuple(self.depths)

    def depth(self, track: str) -> Depth:
        """Return the profile's data for a track; raise `FormatError` if it has none."""
        try:
            return self.depths[track]
        except KeyError:
            raise FormatError(f"the profile has no {track}, only {', '.join(self.depths)}") from None

    @cached_property
    def analysis(self) -> Analysis:
        """The encoder's direction of the transform."""
        return Analysis(self.transform)

    def _packed(self) -> tuple[dict[str, Any], _Arrays]:
        facts, arrays = self.packed()
        return {**facts, "format": FORMAT, "spec": self.spec.to_json()}, arrays

    def packed(self) -> tuple[dict[str, Any], _Arrays]:
        """Return this class's metadata, plain JSON values, and arrays by name."""
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
            # Safetensors files have no uint16; the numbers are at most 4,096.
            parts |= {
                "freqs": coder.freqs.astype(np.int16),
                "flags": _flags_by_class(coder).astype(np.int16, order="C"),
            }
            if coder.near is not None:
                parts |= {"near.bucket": coder.near.bucket, "near.freqs": coder.near.freqs.astype(np.int16)}
            arrays |= {f"{track}.{name}": part for name, part in parts.items()}
        facts = {
            "sinks": self.sinks,
            "outlier": min(transform.threshold, FP16_MAX),
            "structure": transform.structure.to_json(),
            "depths": {track: _depth_facts(depth) for track, depth in self.depths.items()},
        }
        if transform.quiet is not None:
            facts["quiet"] = {"threshold": transform.quiet.threshold, "usual": transform.quiet.usual.tolist()}
        if self.copies is not None:
            facts["copies"] = self.copies
        return facts, arrays


@dataclass(frozen=True, eq=False)
class ModelProfile(Profile):
    """The profiles of a model with several layer classes."""

    spec: KVSpec
    classes: tuple[ClassProfile, ...]
    seen: Seen | None = None

    def __post_init__(self) -> None:
        if len(self.classes) != len(self.spec.parts) or len(self.classes) < 2:
            raise FormatError(
                f"profile: must have {len(self.spec.parts)} classes, as {self.spec.title}, got {len(self.classes)}"
            )
        for profile, part in zip(self.classes, self.spec.parts, strict=True):
            profile.check(part)

    def of(self, spec: KVSpec) -> ClassProfile:
        for profile in self.classes:
            if spec is profile.spec or spec.same_cache(profile.spec):
                return profile
        raise ForeignError(f"this profile was calibrated for {self.spec.title}, which has no {spec.title}")

    @property
    def tracks(self) -> tuple[str, ...]:
        first, *others = (profile.depths for profile in self.classes)
        return tuple(track for track in first if all(track in other for other in others))

    def _packed(self) -> tuple[dict[str, Any], _Arrays]:
        arrays: _Arrays = {}
        classes = {}
        for name, profile in zip(self.spec.names, self.classes, strict=True):
            classes[name], own = profile.packed()
            arrays |= {f"{name}/{key}": array for key, array in own.items()}
        return {"format": FORMAT, "spec": self.spec.to_json(), "classes": classes}, arrays


def joined(spec: KVSpec, classes: Sequence[ClassProfile], seen: Seen | None = None) -> Profile:
    """Join the profiles of a model's classes, in the order of `KVSpec.parts`; ``seen`` has the calibration texts."""
    return replace(classes[0], seen=seen) if len(spec.classes) == 1 else ModelProfile(spec, tuple(classes), seen)


def _unpacked_parts(spec: KVSpec, listed: Mapping[str, Any], arrays: _Arrays) -> tuple[ClassProfile, ...]:
    if set(listed) != set(spec.names):
        raise FormatError(
            f"profile: must have the classes of {spec.title}, got {', '.join(sorted(map(str, listed))[:16])}"
        )
    profiles = []
    for name, part in zip(spec.names, spec.parts, strict=True):
        own = {key: arrays.pop(key) for key in list(arrays) if key.startswith(f"{name}/")}
        own = {key.removeprefix(f"{name}/"): array for key, array in own.items()}
        profiles.append(_unpacked(part, listed[name], own))
        arrays |= {f"{name}/{key}": array for key, array in own.items()}
    return tuple(profiles)


def _unpacked(spec: KVSpec, facts: Mapping[str, Any], arrays: _Arrays) -> ClassProfile:
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
        _quiet(facts["quiet"]) if "quiet" in facts else None,
    )
    depths = {
        str(track): Depth(
            _number(listed["step"], MAX_STEP),
            float(listed["dead"]),
            _coder(arrays, track),
            tuple(map(float, listed.get("gains", ()))),
        )
        for track, listed in facts["depths"].items()
    }
    copies = _number(facts["copies"], _MAX_COPIES) if "copies" in facts else None
    return ClassProfile(spec, facts["sinks"], transform, depths, copies)


def _matrices(arrays: _Arrays, name: str) -> Matrices:
    return Matrices(arrays.pop(name), arrays.pop(f"{name}.gain"))


def _coder(arrays: _Arrays, track: str) -> CoderModel:
    names = ("class", "radius", "delta", "freqs", "flags")
    of_row, radius, delta, freqs, flags = (arrays.pop(f"{track}.{name}") for name in names)
    freqs, flags = _frequencies(freqs, 3), _frequencies(flags, 2)
    near: NearTables | None = None
    if f"{track}.near.bucket" in arrays:
        near = NearTables(arrays.pop(f"{track}.near.bucket"), _frequencies(arrays.pop(f"{track}.near.freqs"), 3))
    # Check the number of flag contexts before expanding by row, so that a small file cannot demand much memory.
    contexts = 1 if freqs.shape[1] == 1 else 2
    if of_row.ndim == 1 and flags.shape == (contexts, len(radius)) and len(radius) != len(of_row) > 0:
        if of_row.dtype != np.uint8 or int(of_row.max()) >= len(radius):
            raise FormatError("profile: a coefficient has a class without tables")
        flags = flags[:, of_row]
    return CoderModel(of_row, radius, freqs, flags, delta, near)


def _frequencies(numbers: NDArray[Any], axes: int) -> NDArray[np.uint16]:
    if numbers.ndim != axes or (axes == 3 and numbers.shape[2] > 2 * MAX_RADIUS + 2):
        raise FormatError(f"profile: tables must have {axes} axes of allowed lengths, got {numbers.shape}")
    if numbers.dtype != np.int16 or numbers.min(initial=0) < 0:
        raise FormatError("profile: frequencies must be int16 of 0 or more")
    return numbers.astype(np.uint16)


def _flags_by_class(coder: CoderModel) -> NDArray[np.uint16]:
    first = np.zeros(coder.classes, np.intp)
    first[coder.row_class[::-1]] = np.arange(coder.rows)[::-1]
    by_class = coder.flag_freq[:, first]
    same = coder.rows != coder.classes and np.array_equal(by_class[:, coder.row_class], coder.flag_freq)
    return by_class if same else coder.flag_freq


def _depth_facts(depth: Depth) -> dict[str, Any]:
    gains = {"gains": list(depth.gains)} if depth.gains else {}
    return {"step": depth.step, "dead": depth.dead} | gains


def _number(value: Any, top: float) -> float:
    number = float(value)
    if not 0 < number <= top:
        raise FormatError(f"profile: a number must be more than 0 and at most {top}, got {value!r}")
    return number


def _quiet(value: Any) -> Quiet:
    usual = np.array([_number(each, FP16_MAX) for each in value["usual"]], np.float32)
    return Quiet(usual, _number(value["threshold"], 1.0))


def _facts(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise FormatError("profile: truncated within its header")
    if length > _MAX_HEADER_BYTES:  # parsing blocks all other threads
        raise FormatError(f"profile: a header of {length} bytes, more than the {_MAX_HEADER_BYTES} allowed")
    header = json.loads(data[8 : 8 + length])
    text = header.get("__metadata__") if isinstance(header, dict) else None
    facts = json.loads(text["kvabr"]) if isinstance(text, dict) else None
    if not isinstance(facts, dict):
        raise FormatError("profile: a safetensors file, but not a profile")
    if facts["format"] != FORMAT:
        raise FormatError(f"profile: format {facts['format']!r}, this kvabr reads {FORMAT!r}; upgrade kvabr")
    return facts
