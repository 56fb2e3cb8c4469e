"""What a KV cache is: its shape, element type and rotary embedding, and how it is cut into groups.

Shapes only: no bytes, names or networks. Tensors everywhere in kvabr are ``[layer, K/V, head, token, dim]``. Index 0 of
the second axis holds the keys (with the rotary embedding applied, as the model's attention expects them), index 1 the
values.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kvabr.types.errors import FormatError
from kvabr.types.json_pieces import JsonPieces

if TYPE_CHECKING:
    import torch

GROUP_TOKENS = 128
"""Tokens in a group (draft-shi-moq-kvcache-00, section 3)."""
MAX_GROUP_TOKENS = 65536
FP16_MAX = 65504.0
"""FP16's largest number."""
DTYPES = ("float16", "bfloat16", "float32")
"""Element types that a cache may have."""
MAX_MODELS_BYTES = 1 << 20
"""Bound on a list of models."""
_MAX_MODELS = 4096
_LIMITS = {"layers": 1024, "kv_heads": 1024, "head_dim": 4096, "group_tokens": MAX_GROUP_TOKENS}
_STEEPEST = 1024.0
"""Maximum of radians per token and of the factor of a rotation, whose minimum is the inverse. Real models are near
1."""
_HIGHEST = 1e30
"""Maximum base of the frequencies."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary position embedding (RoPE) of the keys, which the AC codec undoes and reapplies.

    Pair i of a head turns by ``theta ** (-2 i / rotary_dim)`` radians per token, or by ``frequencies[i]`` if given:
    scaled embeddings (linear, Llama 3, YaRN) have explicit frequencies. Embeddings that depend on the length of the
    prompt cannot be described.
    """

    theta: float
    """Base of the frequencies; with explicit frequencies, the base before scaling."""
    rotary_dim: int
    """Number of leading dimensions of a head that rotate; the rest pass through (partial RoPE)."""
    layout: Literal["half", "interleaved"] = "half"
    """Which dimensions form a pair: ``half`` pairs d with d + rotary_dim/2 (Llama), ``interleaved`` pairs 2i with 2i+1.
   """
    frequencies: tuple[float, ...] | None = None
    """Radians per token of each of the rotary_dim/2 pairs; None for the powers of theta."""
    factor: float = 1.0
    """Multiplier of cosines and sines (YaRN's attention factor): rotating scales a pair's length by it."""

    def check(self, head_dim: int) -> None:
        """Raise a `FormatError` unless the embedding is valid for heads of ``head_dim``."""
        rotary, frequencies = self.rotary_dim, self.frequencies
        if type(rotary) is not int or not 0 < rotary <= head_dim or rotary % 2:
            raise FormatError(f"KV spec: rotary_dim is {rotary!r}, must be even and at most {head_dim}")
        # The lower bound keeps the powers no steeper than explicit frequencies may be, so no angle is ever infinite.
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
        """Return plain JSON values. Defaults are omitted, so digests of plain embeddings never change."""
        value: dict[str, Any] = {"theta": self.theta, "rotary_dim": self.rotary_dim, "layout": self.layout}
        if self.frequencies is not None:
            value["frequencies"] = [float(each) for each in self.frequencies]
        if self.factor != 1:
            value["factor"] = float(self.factor)
        return value

    @classmethod
    def from_json(cls, value: Any) -> RopeSpec:
        """Parse the output of `to_json`; `KVSpec` checks the values and handles errors."""
        fields = dict(value)
        if isinstance(fields.get("frequencies"), list):
            fields["frequencies"] = tuple(fields["frequencies"])
        return cls(**fields)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and meaning of one model's KV cache. Two specs with the same digest can exchange groups."""

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
    """How the keys are rotated; None if they are not."""
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
        """Elements that one token adds to the cache."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of a cache of ``tokens`` tokens: [layer, K/V, head, token, dim]."""
        return (self.layers, 2, self.kv_heads, tokens, self.head_dim)

    def fp16_bytes(self, tokens: int) -> int:
        """Return the bytes of ``tokens`` tokens at 16 bits per element, the reference of all compression ratios."""
        return tokens * self.elements_per_token * 2

    def groups(self, tokens: int) -> int:
        """Return the number of groups in ``tokens`` tokens; the last may be short."""
        return -(-tokens // self.group_tokens)

    def group_range(self, group: int, tokens: int) -> tuple[int, int]:
        """Return the first token of ``group`` and the one after its last, in a cache of ``tokens`` tokens."""
        first = group * self.group_tokens
        if group < 0 or first >= tokens:
            raise IndexError(f"group {group} is outside a cache of {tokens} tokens")
        return first, min(first + self.group_tokens, tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type as a torch dtype."""
        import torch  # noqa: PLC0415  # replay needs shapes only and must not pay for loading torch

        return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` reads them back."""
        return asdict(self) | {"rope": None if self.rope is None else self.rope.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> KVSpec:
        """Parse the output of `to_json` from an untrusted source; raise a `FormatError` if a field is wrong."""
        try:
            fields = dict(value)
            rope = fields.pop("rope")
            return cls(**fields, rope=None if rope is None else RopeSpec.from_json(rope))
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise FormatError(f"KV spec: not a spec that this version knows ({error})") from error

    def same_cache(self, other: KVSpec) -> bool:
        """Return whether both describe the same cache, however many tokens its groups have."""
        return replace(other, group_tokens=self.group_tokens) == self

    def digest(self) -> bytes:
        """Return 16 bytes that identify this spec. Every frame carries them, so models never mix."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvabr.spec/1\0" + canonical.encode()).digest()[:16]


def specs_from_json(data: bytes) -> list[KVSpec]:
    """Parse ``{"models": [...]}``, the models of an origin, from an untrusted source; `FormatError` if it is not that.

    Other threads run meanwhile, whatever the text is.
    """
    pieces = JsonPieces(data, "list of models")
    specs: list[KVSpec] | None = None
    for name in pieces.members():
        if name == "models":
            specs = [KVSpec.from_json(pieces.value()) for _ in pieces.elements(_MAX_MODELS)]
        else:
            pieces.skip()
    pieces.finish()
    if specs is None:
        raise FormatError('list of models: has no "models"')
    return specs
