"""What a KV cache is: its shape, its element type, its rotary embedding, and how it is cut into groups.

This room holds facts about tensors and nothing else: no bytes, no names, no networks.

The tensor layout everywhere in kvabr is ``[layer, K/V, head, token, dim]``: index 0 of the second axis is the keys
(with the rotary embedding applied, as the model's attention wants them), index 1 the values.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvabr.types.errors import FormatError

if TYPE_CHECKING:
    import torch

GROUP_TOKENS = 128
"""Tokens in a group (draft-shi-moq-kvcache-00, section 3)."""

DTYPES = ("float16", "bfloat16", "float32")
"""Names of the element types that a cache may have."""

_LIMITS = {"layers": 1024, "kv_heads": 1024, "head_dim": 4096, "group_tokens": 65536}

_STEEPEST = 1024.0
"""Radians per token at most, and factor of a rotation; 1 over it is the least factor. Models have about 1."""
_HIGHEST = 1e30
"""Base of frequencies at most."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary position embedding of the keys (RoFormer), which the AC codec undoes and redoes.

    Pair i of a head turns by ``theta ** (-2 i / rotary_dim)`` radians per token, or by what ``frequencies`` says:
    scaled embeddings (linear, Llama 3, YaRN) have a list of their own. One that depends on the length of the prompt
    cannot be said.
    """

    theta: float
    """Base of the frequencies; where there is a list of them, of those that were scaled."""
    rotary_dim: int
    """How many leading dimensions of a head rotate; the rest pass through (partial RoPE)."""
    layout: Literal["half", "interleaved"] = "half"
    """Which dimensions form a pair: ``half`` pairs d with d + rotary_dim/2 (Llama), ``interleaved`` 2i with 2i+1."""
    frequencies: tuple[float, ...] | None = None
    """Radians per token of each of the rotary_dim/2 pairs; None if they are the powers of theta."""
    factor: float = 1.0
    """What cosines and sines are multiplied with (YaRN's attention factor): how much longer turning makes a pair."""

    def check(self, head_dim: int) -> None:
        """Refuse what cannot be.

        Raises:
            FormatError: a field is out of bounds, or not for heads of ``head_dim``.
        """
        rotary, frequencies = self.rotary_dim, self.frequencies
        if type(rotary) is not int or not 0 < rotary <= head_dim or rotary % 2:
            raise FormatError(f"KV spec: rotary_dim is {rotary!r}, must be even and at most {head_dim}")
        # Down to where its powers are as steep as frequencies may be: no angle of any position is infinite.
        if not _is_number(self.theta) or not 1 / _STEEPEST <= self.theta <= _HIGHEST:
            raise FormatError(f"KV spec: rope theta must be a number from 1/{_STEEPEST:g} to {_HIGHEST:g}")
        if self.layout not in ("half", "interleaved"):
            raise FormatError(f"KV spec: rope layout is {self.layout!r}, must be half or interleaved")
        if frequencies is not None:
            if not isinstance(frequencies, tuple) or len(frequencies) != rotary // 2:
                raise FormatError(f"KV spec: rope needs {rotary // 2} frequencies, one for each pair of dimensions")
            if not all(_is_number(each) and 0 < each <= _STEEPEST for each in frequencies):
                raise FormatError(f"KV spec: a rope frequency is not a number above 0, and at most {_STEEPEST:g}")
        if not _is_number(self.factor) or not 1 / _STEEPEST <= self.factor <= _STEEPEST:
            raise FormatError(f"KV spec: rope factor must be a number from 1/{_STEEPEST:g} to {_STEEPEST:g}")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values. What a plain embedding does not have is left out, so that its digests stay."""
        value: dict[str, Any] = {"theta": self.theta, "rotary_dim": self.rotary_dim, "layout": self.layout}
        if self.frequencies is not None:
            value["frequencies"] = [float(each) for each in self.frequencies]
        if self.factor != 1:
            value["factor"] = float(self.factor)
        return value

    @classmethod
    def from_json(cls, value: Any) -> RopeSpec:
        """Read `to_json` back; what it says is checked by the `KVSpec` that it becomes part of.

        Raises:
            TypeError, ValueError: not of this form.
        """
        fields = dict(value)
        if isinstance(fields.get("frequencies"), list):
            fields["frequencies"] = tuple(fields["frequencies"])
        return cls(**fields)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape and meaning of one model's KV cache. Two specs with the same digest may exchange groups."""

    model: str
    """Name of the model, as in the track namespace."""
    tokenizer: str
    """Digest or name of the tokenizer: equal token ids must mean equal text."""
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Element type of the publisher's cache, one of `DTYPES`."""
    rope: RopeSpec | None = None
    """How the keys were rotated; None if they were not."""
    group_tokens: int = GROUP_TOKENS

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= limit:
                raise FormatError(f"KV spec: {name} is {value!r}, must be a whole number from 1 to {limit}")
        if self.dtype not in DTYPES:
            raise FormatError(f"KV spec: dtype is {self.dtype!r}, must be one of {', '.join(DTYPES)}")
        if not isinstance(self.model, str) or not isinstance(self.tokenizer, str):
            raise FormatError("KV spec: the names of the model and of the tokenizer must be text")
        if not self.model or len(self.model) > 256 or len(self.tokenizer) > 256:
            raise FormatError("KV spec: the model's name must have 1 to 256 characters, the tokenizer's at most 256")
        if self.rope is not None:
            self.rope.check(self.head_dim)

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token adds to the cache."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of a cache of ``tokens`` tokens: [layer, K/V, head, token, dim]."""
        return (self.layers, 2, self.kv_heads, tokens, self.head_dim)

    def fp16_bytes(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens at 16 bits an element: the yardstick of every ratio in kvabr."""
        return tokens * self.elements_per_token * 2

    def groups(self, tokens: int) -> int:
        """Number of groups that ``tokens`` tokens make; the last may be short."""
        return -(-tokens // self.group_tokens)

    def group_range(self, group: int, tokens: int) -> tuple[int, int]:
        """First token of ``group`` and the one after its last, in a cache of ``tokens`` tokens."""
        first = group * self.group_tokens
        if group < 0 or first >= tokens:
            raise IndexError(f"group {group} is outside a cache of {tokens} tokens")
        return first, min(first + self.group_tokens, tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type as torch has it."""
        import torch  # noqa: PLC0415  # a replay needs shapes, not tensors: it must not pay for loading torch

        return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back."""
        return asdict(self) | {"rope": None if self.rope is None else self.rope.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> KVSpec:
        """Read `to_json` back from an untrusted source.

        Raises:
            FormatError: a field is missing, unknown, or out of bounds.
        """
        try:
            fields = dict(value)
            rope = fields.pop("rope")
            return cls(**fields, rope=None if rope is None else RopeSpec.from_json(rope))
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise FormatError(f"KV spec: not a spec that this version knows ({error})") from error

    def digest(self) -> bytes:
        """16 bytes that name this spec; every frame carries them, so that caches of two models never mix."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvabr.spec/1\0" + canonical.encode()).digest()[:16]
