"""A profile: the side information of one model's AC track, fetched once and kept, as a player's init segment is.

It holds what does not change from prompt to prompt: the mean of every channel, the quantiser's step of every layer and
K/V, and the probability tables of the entropy coder. A table serves a class of channels of like quantised spread.
On disk it is a safetensors file: arrays and strings, nothing that could be executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from kvabr.codec.rope import rotate
from kvabr.errors import ForeignError, FormatError
from kvabr.kv import KVSpec

FORMAT = "kvabr.profile/1"
MAX_PROFILE_BYTES = 256 << 20
RADIUS = 127
"""Indices from -RADIUS to RADIUS have a symbol each; one more symbol announces a value outside."""
ALPHABET = 2 * RADIUS + 2
ESCAPE = ALPHABET - 1
_TOTAL = 1 << 15
_TOP_STEP = 65504.0
"""FP16's largest number: a coarser step than that could not tell two elements of a cache apart."""
_CLASSES = 64
_SKEW = 0.5
"""How far from orthonormal a basis may be: what its products lack or have too much, summed over a row. Half precision
leaves a hundredth; below 1 a basis has an inverse (Gershgorin), which encoding needs."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Side information for the AC codec of one model."""

    spec: KVSpec
    sinks: int
    """Tokens at the beginning of a prompt that are kept exact: attention sinks, unlike all others."""
    mean: torch.Tensor
    """[layer, K/V, head, dim] float16: mean of each channel, rotary embedding undone."""
    basis: torch.Tensor
    """[layer, K/V, head, dim, component] float16: what is left of a head is this times its components (KLT)."""
    step: torch.Tensor
    """[layer, K/V] float32: quantiser steps."""
    table: torch.Tensor
    """[layer, K/V, head, component] uint8: which table codes a component."""
    counts: torch.Tensor
    """[table, symbol] int32: frequencies, all positive, each table summing to the same total."""

    def check(self, spec: KVSpec) -> None:
        """Refuse a cache of another model.

        Raises:
            ForeignError: the spec is not the one that this profile was calibrated for.
        """
        if spec.digest() != self.spec.digest():
            raise ForeignError(
                f"this profile was calibrated for {_title(self.spec)}, the cache is of {_title(spec)}; "
                "use a profile of that very model, `kvabr calibrate` makes one"
            )

    @cached_property
    def order(self) -> torch.Tensor:
        """Flat component numbers, sorted by table: the order in which components are coded."""
        return torch.argsort(self.table.reshape(-1).int(), stable=True)

    @cached_property
    def class_sizes(self) -> list[int]:
        """Components of each table."""
        sizes: list[int] = torch.bincount(self.table.reshape(-1).int(), minlength=len(self.counts)).tolist()
        return sizes

    @cached_property
    def step_in_order(self) -> torch.Tensor:
        """Step of each component, [component, 1] float32, in that order."""
        return self.step[:, :, None, None].expand(self.mean.shape).reshape(-1, 1)[self.order]

    @cached_property
    def synthesis(self) -> torch.Tensor:
        """[layer, K/V, head, component, dim] float32: components times this are a head."""
        return self.basis.float().transpose(3, 4).contiguous()

    @cached_property
    def analysis(self) -> torch.Tensor:
        """[layer, K/V, head, dim, component] float32: a head times this is its components.

        The inverse of what half precision left of the basis, so that rounding the basis costs nothing.
        """
        inverse: torch.Tensor = torch.linalg.inv(self.basis.double().transpose(3, 4))
        return inverse.float()

    @cached_property
    def data(self) -> bytes:
        """The profile as a safetensors file."""
        # One string only: safetensors writes several in random order, and the name of a profile is its digest.
        facts = json.dumps({"format": FORMAT, "spec": self.spec.to_json(), "sinks": self.sinks}, sort_keys=True)
        names = ("mean", "basis", "step", "table", "counts")
        arrays = {name: getattr(self, name) for name in names}
        contiguous = {name: array.contiguous() for name, array in arrays.items()}
        return bytes(save_safetensors(contiguous, metadata={"kvabr": facts}))

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
        if len(data) > MAX_PROFILE_BYTES:
            raise FormatError(f"profile: {len(data)} bytes, more than the {MAX_PROFILE_BYTES} allowed")
        try:
            facts = _facts(data)
            arrays = load_safetensors(data)
            spec = KVSpec.from_json(facts["spec"])
            sinks = int(facts["sinks"])
            profile = cls(
                spec, sinks, arrays["mean"], arrays["basis"], arrays["step"], arrays["table"], arrays["counts"]
            )
        except FormatError:
            raise
        except (SafetensorError, KeyError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise FormatError(f"profile: not a profile file ({error!r})") from error
        profile._validate()
        profile.__dict__["data"] = bytes(data)
        return profile

    def _validate(self) -> None:
        spec = self.spec
        channels = (spec.layers, 2, spec.kv_heads, spec.head_dim)
        tables = self.counts.shape[0] if self.counts.dim() == 2 else 0
        wanted = {
            "mean": (self.mean, torch.float16, channels),
            "basis": (self.basis, torch.float16, (*channels, spec.head_dim)),
            "step": (self.step, torch.float32, (spec.layers, 2)),
            "table": (self.table, torch.uint8, channels),
            "counts": (self.counts, torch.int32, (tables, ALPHABET)),
        }
        for name, (array, dtype, shape) in wanted.items():
            if array.dtype != dtype or tuple(array.shape) != shape:
                raise FormatError(f"profile: {name} is {array.dtype} {tuple(array.shape)}, must be {dtype} {shape}")
        if not 0 < tables <= 256 or int(self.table.max()) >= tables:
            raise FormatError("profile: a channel names a table that is not there")
        if not bool(torch.isfinite(self.mean).all()) or not bool(((self.step > 0) & (self.step <= _TOP_STEP)).all()):
            raise FormatError(f"profile: a mean is not finite, or a step not in (0, {_TOP_STEP}]")
        square = self.basis.float()
        off = (square.transpose(3, 4) @ square - torch.eye(spec.head_dim)).abs().sum(dim=4).amax()
        if not float(off) < _SKEW:
            raise FormatError("profile: a basis is not orthonormal")
        if int(self.counts.min()) < 1 or bool((self.counts.long().sum(dim=1) != _TOTAL).any()):
            raise FormatError(f"profile: a table has a symbol without frequency, or does not sum to {_TOTAL}")
        if not 0 <= self.sinks <= 1 << 16:
            raise FormatError(f"profile: {self.sinks} sinks")

    @classmethod
    def calibrate(
        cls,
        spec: KVSpec,
        caches: Callable[[], Iterable[torch.Tensor]],
        *,
        sinks: int = 4,
        relative_step: tuple[float, float] = (0.48, 0.37),
    ) -> Profile:
        """Make a profile from caches of diverse texts, each starting at position 0.

        Args:
            spec: the model's spec.
            caches: called three times; gives the same caches each time, [layer, K/V, head, token, dim], any float
                dtype.
            sinks: tokens kept exact.
            relative_step: quantiser steps of keys and values over the root mean square of their layer. Noise on
                values costs the model more than noise on keys, so at equal size the values' step is the finer one.

        Raises:
            FormatError: no tokens beyond the sinks, or another shape.
        """
        shape = (spec.layers, 2, spec.kv_heads, spec.head_dim)
        total, count = torch.zeros(shape, dtype=torch.float64), 0
        for plain in _plain(spec, caches(), sinks):
            total += plain.sum(dim=3, dtype=torch.float64)
            count += plain.shape[3]
        if not count:
            raise FormatError(f"calibration needs caches longer than {sinks} tokens")
        mean = (total / count).half()
        scatter = torch.zeros(*shape, spec.head_dim, dtype=torch.float64)
        for plain in _plain(spec, caches(), sinks):
            centred = plain - mean.float()[:, :, :, None]
            scatter += (centred.transpose(3, 4) @ centred).double()
        power = scatter.diagonal(dim1=3, dim2=4).sum(dim=(2, 3))
        rms = (power / (count * spec.kv_heads * spec.head_dim)).sqrt()
        basis = torch.linalg.eigh(scatter / count).eigenvectors.flip(4).half()
        step = (torch.tensor(relative_step, dtype=torch.float64) * rms).clamp(min=1e-6).float()
        analysis = torch.linalg.inv(basis.double().transpose(3, 4)).float()
        channels = spec.layers * 2 * spec.kv_heads * spec.head_dim
        histogram = torch.zeros(channels, ALPHABET, dtype=torch.int64)
        offsets = torch.arange(channels)[:, None] * ALPHABET
        for plain in _plain(spec, caches(), sinks):
            parts = (plain - mean.float()[:, :, :, None]) @ analysis
            index = (parts / step[:, :, None, None, None]).round_().int()
            symbol = torch.where(index.abs() > RADIUS, torch.tensor(ESCAPE), (index + RADIUS).long())
            rows = symbol.permute(0, 1, 2, 4, 3).reshape(channels, -1)
            histogram += torch.bincount((rows + offsets).reshape(-1), minlength=channels * ALPHABET).reshape(
                channels, ALPHABET
            )
        table, counts = _tables(histogram)
        return cls(spec, sinks, mean, basis, step, table.reshape(shape), counts)


def _plain(spec: KVSpec, caches: Iterable[torch.Tensor], sinks: int) -> Iterable[torch.Tensor]:
    """The caches as float32 without rotary embedding and without sinks."""
    for cache in caches:
        if tuple(cache.shape) != spec.shape(cache.shape[3]):
            raise FormatError(f"calibration: a cache of shape {tuple(cache.shape)} is not one of {spec.model}")
        plain = cache.float().clone()
        plain[:, 0] = rotate(plain[:, 0], spec.rope, 0, undo=True)
        yield plain[:, :, :, sinks:]


def _tables(histogram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort channels by the spread of their indices into classes of equal size, and count each class together."""
    values = torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
    weights = histogram[:, :ESCAPE].double()
    seen = weights.sum(dim=1).clamp(min=1)
    centre = (weights * values).sum(dim=1) / seen
    spread = (weights * values**2).sum(dim=1) / seen - centre**2
    rank = torch.argsort(torch.argsort(spread, stable=True), stable=True)
    classes = min(_CLASSES, len(histogram))
    table = (rank * classes // len(histogram)).to(torch.uint8)
    summed = torch.zeros(classes, histogram.shape[1], dtype=torch.float64)
    summed.index_add_(0, table.long(), histogram.double())
    # Every symbol stays possible: texts that the calibration never saw go further out.
    share = summed / summed.sum(dim=1, keepdim=True).clamp(min=1)
    counts = 1 + (share * (_TOTAL - histogram.shape[1])).floor().int()
    counts[torch.arange(classes), counts.argmax(dim=1)] += (_TOTAL - counts.sum(dim=1)).int()
    return table, counts.int()


def _title(spec: KVSpec) -> str:
    return f"{spec.model} ({spec.layers} layers, {spec.kv_heads} KV heads of {spec.head_dim}, {spec.dtype})"


def _facts(data: bytes) -> dict[str, Any]:
    """What the header of a profile says; safetensors itself reads a header's strings from files only."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise FormatError("profile: truncated within its header")
    header = json.loads(data[8 : 8 + length])
    text = header.get("__metadata__") if isinstance(header, dict) else None
    facts = json.loads(text["kvabr"]) if isinstance(text, dict) else None
    if not isinstance(facts, dict):
        raise FormatError("profile: a safetensors file, but not a profile")
    if facts["format"] != FORMAT:
        raise FormatError(f"profile: format {facts['format']!r}, this kvabr reads {FORMAT!r}; upgrade kvabr")
    return facts
