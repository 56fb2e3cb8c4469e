"""A profile: the side information of one model's AC tracks, fetched once and kept, as a player's init segment is.

It holds what does not change from prompt to prompt: the mean of every channel, the norms, the transforms, and for every
depth the quantiser's step and the tables of the entropy coder. `kvabr.codec.fit` makes one, `kvabr.codec.profile_file`
says how it lies in a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kvabr.codec.native.model import CoderModel, SynthesisModel
from kvabr.codec.native.model import Stack as StackModel
from kvabr.codec.quantiser import nested
from kvabr.codec.transform import Transform
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import KVSpec

MAX_PROFILE_BYTES = 1 << 29
MAX_SINKS = 64


@dataclass(frozen=True, eq=False)
class Depth:
    """What one track adds to a profile."""

    step: float
    """The quantiser's, in units of the norm."""
    coder: CoderModel
    dead: float = 0.0
    """For the encoder: how much a coefficient must reach beyond the middle between two indices to take the larger."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Side information for the AC tracks of one model."""

    spec: KVSpec
    sinks: int
    """Tokens at the beginning of a prompt that are kept aside: attention sinks, unlike all others."""
    transform: Transform
    depths: Mapping[str, Depth]
    """By name of the track."""

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
        """Refuse a cache of another model. How many tokens a group has does not matter.

        Raises:
            ForeignError: the spec is not the one that this profile was calibrated for.
        """
        if spec is not self.spec and replace(spec, group_tokens=self.spec.group_tokens) != self.spec:
            raise ForeignError(
                f"this profile was calibrated for {_title(self.spec)}, the cache is of {_title(spec)}; "
                "use a profile of that very model, `kvabr calibrate` makes one"
            )

    def depth(self, track: str) -> Depth:
        """What a track needs.

        Raises:
            FormatError: this profile has no such track.
        """
        try:
            return self.depths[track]
        except KeyError:
            raise FormatError(f"the profile has no {track}, only {', '.join(self.depths)}") from None

    @cached_property
    def synthesis(self) -> SynthesisModel:
        """How a decoder gets from coefficients to a cache."""
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
        from kvabr.codec.profile_file import dump  # noqa: PLC0415 - it knows this module

        return dump(self)

    def to_bytes(self) -> bytes:
        """The profile as a safetensors file."""
        return self.data

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hex: the profile's name."""
        return hashlib.sha256(self.data).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Read a profile from an untrusted source.

        Raises:
            FormatError: not a profile, of another version, or with arrays that cannot be.
        """
        from kvabr.codec.profile_file import load  # noqa: PLC0415 - it knows this module

        profile = load(data)
        profile.__dict__["data"] = bytes(data)
        return profile


def _title(spec: KVSpec) -> str:
    rope, turned = spec.rope, "no rotary embedding"
    if rope is not None:
        scaled = "" if rope.frequencies is None else f", scaled down to {min(rope.frequencies):g} a token"
        turned = f"a rotary embedding of base {rope.theta:g}{scaled}"
    return f"{spec.model} ({spec.layers} layers, {spec.kv_heads} KV heads of {spec.head_dim}, {spec.dtype}, {turned})"
