"""What a KV cache is: its layer classes, with their shapes and rotary embeddings, and how it is cut into groups.

Shapes only: no bytes, names or networks. The layers of a model that keep their cache alike are a *layer class*, and the
cache of a class is one tensor ``[layer, K/V, head, token, dim]``. Index 0 of the second axis holds the keys (with the
rotary embedding applied, as the model's attention expects them), index 1 the values. Where these have unlike dims, or
there is only one of them, that axis has length 1, and the last holds the keys and then the values (`LayerClass.split`).
Most models have one class; codecs and profiles always deal with one (`KVSpec.parts`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Raw, Struct

from kvabr.types.arguments import checked
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.layer_class import (
    DTYPES,
    ITEM_BYTES,
    MAX_DIM,
    MAX_GROUP_TOKENS,
    MAX_HEADS,
    MAX_LAYERS,
    QUANTISED,
    LayerClass,
    RopeSpec,
    check_whole,
)
from kvabr.types.records import decode

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "FP16_MAX",
    "GROUP_TOKENS",
    "ITEM_BYTES",
    "MAX_GROUP_TOKENS",
    "MAX_MODELS_BYTES",
    "QUANTISED",
    "KVSpec",
    "LayerClass",
    "RopeSpec",
    "specs_from_json",
]

GROUP_TOKENS = 128
"""Tokens in a group (draft-shi-moq-kvcache-00, section 3)."""
FP16_MAX = 65504.0
"""FP16's largest number."""
MAX_MODELS_BYTES = 1 << 20
"""Bound on a list of models."""
_MAX_CLASSES = 16


@dataclass(frozen=True)
class KVSpec:
    """Shape and meaning of one model's KV cache. Two specs with the same digest can exchange groups."""

    model: str
    """Name of the model, as in the track namespace."""
    tokenizer: str
    """Digest or name of the tokenizer: equal token ids must mean equal text."""
    classes: tuple[LayerClass, ...]
    """The layer classes. Every layer of the model is in one, or in several of different roles."""
    group_tokens: int = GROUP_TOKENS
    part_of: tuple[str, str] | None = None
    """If this is one class of several (`parts`): digest of the whole spec in hex, and the name of the class."""

    def __post_init__(self) -> None:
        check_whole("group_tokens", self.group_tokens, 1, MAX_GROUP_TOKENS)
        if not isinstance(self.model, str) or not isinstance(self.tokenizer, str):
            raise FormatError("KV spec: the names of the model and of the tokenizer must be text")
        if not self.model or len(self.model) > 256 or len(self.tokenizer) > 256:
            raise FormatError("KV spec: the model's name must have 1 to 256 characters, the tokenizer's at most 256")
        if not isinstance(self.classes, tuple) or not 0 < len(self.classes) <= _MAX_CLASSES:
            raise FormatError(f"KV spec: must have 1 to {_MAX_CLASSES} layer classes")
        for each in self.classes:
            if each.interval is not None and each.interval % self.group_tokens:
                raise FormatError(
                    f"KV spec: snapshots every {each.interval} tokens do not lie between groups of {self.group_tokens}"
                )
        if self.part_of is None:
            self._check_layers()
        elif len(self.classes) != 1:
            raise FormatError("KV spec: a part is one class of a spec")

    def _check_layers(self) -> None:
        held = Counter((layer, each.role) for each in self.classes for layer in each.layers)
        if twice := [layer for (layer, _), count in held.items() if count > 1]:
            raise FormatError(f"KV spec: layer {min(twice)} is in two classes of the same role")
        missing = set(range(max(layer for layer, _ in held) + 1)) - {layer for layer, _ in held}
        if missing:
            raise FormatError(f"KV spec: layer {min(missing)} is in no class")

    @classmethod
    @checked
    def uniform(
        cls,
        model: str,
        tokenizer: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        rope: RopeSpec | None = None,
        group_tokens: int = GROUP_TOKENS,
    ) -> KVSpec:
        """Return the spec of a model with full attention in every layer, and keys and values of ``head_dim``."""
        check_whole("layers", layers, 1, MAX_LAYERS)
        check_whole("kv_heads", kv_heads, 1, MAX_HEADS)
        check_whole("head_dim", head_dim, 1, MAX_DIM)
        only = LayerClass("full", tuple(range(layers)), kv_heads, head_dim, head_dim, dtype, rope)
        return cls(model, tokenizer, (only,), group_tokens)

    # ------------------------------------------------------- a spec of one class

    @property
    def only(self) -> LayerClass:
        """The only layer class; a `FormatError` if there are several."""
        if len(self.classes) > 1:
            raise FormatError(f"{self.model} has several layer classes ({', '.join(self.names)}), which differ in this")
        return self.classes[0]

    @property
    def layers(self) -> int:
        """Number of layers of the only class."""
        return len(self.only.layers)

    @property
    def kv_heads(self) -> int:
        """Heads of the only class."""
        return self.only.heads

    @property
    def head_dim(self) -> int:
        """Dimensions of keys and of values; a `FormatError` if there are not two of the same size."""
        if self.only.halves != 2:
            raise FormatError(f"{self.model}: keys and values of the class {self.only.title} differ in shape")
        return self.only.k_dim

    @property
    def rope(self) -> RopeSpec | None:
        """How the keys of the only class are rotated."""
        return self.only.rope

    @property
    def dtype(self) -> str:
        """Element type of the only class."""
        return self.only.dtype

    @property
    def elements_per_token(self) -> int:
        """Elements that one token adds to the cache, or one row to a state."""
        only = self.only
        return len(only.layers) * only.heads * sum(only.split)

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of a cache of ``tokens`` tokens (rows of a state): [layer, K/V, head, token, dim]."""
        return self.only.shape(tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the only class as a torch dtype."""
        import torch  # noqa: PLC0415  # replay needs shapes only and must not pay for loading torch

        made: torch.dtype = getattr(torch, self.dtype)
        return made

    @cached_property
    def summary(self) -> str:
        """Layers, heads and element type of every class, in words."""
        told = zip(self.names, self.classes, strict=True)
        return "; ".join(
            each.summary if name == "full" and len(self.classes) == 1 else f"{name}: {each.summary}"
            for name, each in told
        )

    @property
    def title(self) -> str:
        """The model with its summary and, of one class, how keys are rotated, in words."""
        if len(self.classes) > 1:
            return f"{self.model} ({self.summary})"
        of = "" if self.part_of is None else f"the class {self.part_of[1]} of "
        rope, turned = self.only.rope, "no rotary embedding"
        if rope is not None:
            scaled = "" if rope.frequencies is None else f", scaled down to {min(rope.frequencies):g} a token"
            turned = f"a rotary embedding of base {rope.theta:g}{scaled}"
        return f"{of}{self.model} ({self.summary}, {turned})"

    def changed(self, **fields: Any) -> KVSpec:
        """Return this spec with other fields of its only class, see `LayerClass`."""
        return replace(self, classes=(replace(self.only, **fields),))

    # ------------------------------------------------------------ any spec

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, each different."""
        seen: Counter[str] = Counter()
        names = []
        for each in self.classes:
            seen[each.title] += 1
            names.append(each.title if seen[each.title] == 1 else f"{each.title}-{seen[each.title]}")
        return tuple(names)

    @cached_property
    def parts(self) -> tuple[KVSpec, ...]:
        """A spec of each class, whose digest says which class of which spec it is; this one alone if it has one."""
        if len(self.classes) == 1:
            return (self,)
        whole = self.digest().hex()
        pairs = zip(self.classes, self.names, strict=True)
        return tuple(replace(self, classes=(each,), part_of=(whole, name)) for each, name in pairs)

    @property
    def rows(self) -> int:
        """Tokens of a full group of the only class, or rows of a state."""
        return self.only.k_dim if self.only.kind == "state" else self.group_tokens

    @property
    def largest(self) -> KVSpec:
        """The part whose full group has most elements: decode times are those of its groups."""
        return max(self.parts, key=lambda part: part.rows * part.elements_per_token)

    def track_name(self, level: str) -> str:
        """Return the name of a track of this part: the level, and the class if it is one of several."""
        return level if self.part_of is None else f"{level}.{self.part_of[1]}"

    def level_of(self, track: str) -> tuple[str, int]:
        """Return what a track's name means: the level, and the index of the class; a `FormatError` if there is none."""
        if len(self.classes) == 1:
            return track, 0
        level, _, name = track.rpartition(".")
        if not level or name not in self.names:
            raise FormatError(f"{track!r} names no layer class of {self.model}; it has {', '.join(self.names)}")
        return level, self.names.index(name)

    def fp16_bytes(self, tokens: int) -> int:
        """Return the bytes of ``tokens`` tokens in every layer, and of one state, at 16 bits per element."""
        rows = (min(tokens, 1) * each.rows if each.only.kind == "state" else tokens for each in self.parts)
        return sum(2 * count * each.elements_per_token for count, each in zip(rows, self.parts, strict=True))

    def groups(self, tokens: int) -> int:
        """Return the number of groups in ``tokens`` tokens; the last may be short."""
        return -(-tokens // self.group_tokens)

    def group_range(self, group: int, tokens: int) -> tuple[int, int]:
        """Return the first token of ``group`` and the one after its last, in a cache of ``tokens`` tokens."""
        first = group * self.group_tokens
        if group < 0 or first >= tokens:
            raise IndexError(f"group {group} is outside a cache of {tokens} tokens")
        return first, min(first + self.group_tokens, tokens)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` reads them back."""
        value: dict[str, Any] = {"model": self.model, "tokenizer": self.tokenizer}
        only = self.classes[0]
        alike = (only.kind, only.v_dim, only.role, only.scales) == ("full", only.k_dim, "", None)
        if self.part_of is None and len(self.classes) == 1 and alike and only.layers == (*range(len(only.layers)),):
            value |= {"layers": len(only.layers), "kv_heads": only.heads, "head_dim": only.k_dim, "dtype": only.dtype}
            value["rope"] = None if only.rope is None else only.rope.to_json()
        else:
            value["classes"] = [each.to_json() for each in self.classes]
        value["group_tokens"] = self.group_tokens
        return value if self.part_of is None else {**value, "part_of": list(self.part_of)}

    @classmethod
    def from_json(cls, value: Any) -> KVSpec:
        """Parse the output of `to_json` from an untrusted source; raise a `FormatError` if a field is wrong."""
        try:
            fields = dict(value)
            if "classes" not in fields:
                rope = fields.pop("rope")
                return cls.uniform(**fields, rope=None if rope is None else RopeSpec.from_json(rope))
            listed, part_of = fields.pop("classes"), fields.pop("part_of", None)
            if not isinstance(listed, list) or len(listed) > _MAX_CLASSES:
                raise FormatError(f"KV spec: must have 1 to {_MAX_CLASSES} layer classes, in a list")
            classes = tuple(map(LayerClass.from_json, listed))
            if part_of is not None:
                whole, name = map(str, part_of)
                part_of = whole[:64], name[:64]
            return cls(**fields, classes=classes, part_of=part_of)
        except (TypeError, KeyError, ValueError, OverflowError, UsageError) as error:
            raise FormatError(f"KV spec: not a spec that this version knows ({error})") from error

    def same_cache(self, other: KVSpec) -> bool:
        """Return whether both describe the same cache, whatever the size of groups and the interval of snapshots."""
        # The digest of the whole that a part has covers the group size, too.
        mine, theirs = (
            (one.model, one.tokenizer, len(one.classes), one.part_of and one.part_of[1]) for one in (self, other)
        )
        pairs = zip(self.classes, other.classes, strict=False)
        # Equal classes are the usual case, and comparing them is cheap.
        return mine == theirs and all(
            one == another or replace(one, interval=None) == replace(another, interval=None) for one, another in pairs
        )

    def with_dtypes(self, other: KVSpec) -> KVSpec:
        """Return this spec with the element types of another that has as many classes; itself otherwise.

        Quantised classes of this spec keep theirs: an engine with such a cache takes no numbers but its own.
        """
        if len(other.classes) != len(self.classes):
            return self
        pairs = zip(self.classes, other.classes, strict=True)
        return replace(
            self,
            classes=tuple(
                mine if mine.scales is not None else replace(mine, dtype=theirs.dtype, scales=theirs.scales)
                for mine, theirs in pairs
            ),
        )

    def digest(self) -> bytes:
        """Return 16 bytes that identify this spec. Every frame carries them, so models never mix."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvabr.spec/1\0" + canonical.encode()).digest()[:16]


class _Models(Struct):
    models: Annotated[list[Raw], Meta(max_length=4096)]


def specs_from_json(data: bytes) -> list[KVSpec]:
    """Parse ``{"models": [...]}``, the models of an origin, from an untrusted source; `FormatError` if it is not that.

    Other threads run meanwhile, whatever the text is.
    """
    found = decode(data, _Models, "list of models").models
    return [KVSpec.from_json(decode(each, dict[str, Any], "list of models")) for each in found]
