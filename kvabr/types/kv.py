"""The shape of a KV cache: its layer classes with their rotary embeddings, and how it is divided into groups.

Layers with the same kind of cache form a *layer class*; its cache is one tensor ``[layer, K/V, head, token, dim]``.
Index 0 of the second axis holds keys (with rotary embedding), index 1 values. If keys and values differ in size, or
only one exists, that axis has length 1 and the last axis holds keys, then values (`LayerClass.split`). Codecs and
profiles handle one class (`KVSpec.parts`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from kvabr.types.errors import FormatError, UsageError
from kvabr.types.records import decode, own_state

if TYPE_CHECKING:
    import torch

GROUP_TOKENS = 128
FP16_MAX = 65504.0
MAX_MODELS_BYTES = 1 << 20
_MAX_CLASSES = 16
MAX_GROUP_TOKENS = 65536
MAX_FRAME_BYTES = 5 << 30
"""Maximum size of a group's frame in bytes, for any model."""
_MAX_TIMES_FP16, _SLACK_BYTES = 4, 1 << 20
"""A frame has at most this multiple of the exact cache's bytes, plus `_SLACK_BYTES`; more could exhaust memory."""
DTYPES = ("float16", "bfloat16", "float32")
QUANTISED = ("float8_e4m3fn", "float8_e5m2")
"""Types that require `LayerClass.scales`."""
ITEM_BYTES = dict(zip((*DTYPES, *QUANTISED), (2, 2, 4, 1, 1), strict=True))
MAX_LAYERS, MAX_HEADS, MAX_DIM = 1024, 1024, 4096
_ROLE = re.compile(r"[a-z]{0,16}")
_MAX_FREQUENCY = 1024.0
"""Maximum radians per token, and maximum factor, of a rotation; the minimum is the inverse."""
_MAX_THETA = 1e30
_MAX_SCALE = 2.0**32
"""Maximum scale of quantised numbers; the minimum is the inverse."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary position embedding (RoPE) of the keys, which the AC codec undoes and reapplies.

    Pair i of a head rotates by ``theta ** (-2 i / rotary_dim)`` radians per token, or by ``frequencies[i]`` if given,
    as for scaled embeddings (linear, Llama 3, YaRN). Embeddings that depend on the prompt length are not supported.
    """

    theta: float
    """Base of the frequencies, before scaling."""
    rotary_dim: int
    """Number of consecutive dimensions of a head that rotate (fewer than all for partial RoPE)."""
    layout: Literal["half", "interleaved"] = "half"
    """How dimensions are paired: ``half`` pairs d with d + rotary_dim/2 (Llama), ``interleaved`` 2i with 2i+1, both
    counted from `first`.
    """
    frequencies: tuple[float, ...] | None = None
    """Radians per token of the rotary_dim/2 pairs; None for powers of theta."""
    factor: float = 1.0
    """Factor for cosines and sines (YaRN's attention factor)."""
    first: int = 0
    """First rotating dimension on the last axis. Latent attention (MLA) rotates the last dimensions of a key."""

    def check(self, head_dim: int) -> None:
        """Raise `FormatError` if the embedding is not valid for heads with ``head_dim`` dimensions."""
        rotary, frequencies = self.rotary_dim, self.frequencies
        if type(rotary) is not int or not 0 < rotary <= head_dim or rotary % 2:
            raise FormatError(f"KV spec: rotary_dim must be even and at most {head_dim}, got {rotary!r}")
        # The lower bound keeps powers of theta within the limit for frequencies, so angles stay finite.
        if not _is_number(self.theta) or not 1 / _MAX_FREQUENCY <= self.theta <= _MAX_THETA:
            raise FormatError(f"KV spec: rope theta must be a number from 1/{_MAX_FREQUENCY:g} to {_MAX_THETA:g}")
        if self.layout not in ("half", "interleaved"):
            raise FormatError(f"KV spec: rope layout must be half or interleaved, got {self.layout!r}")
        if frequencies is not None:
            if not isinstance(frequencies, tuple) or len(frequencies) != rotary // 2:
                raise FormatError(f"KV spec: rope needs {rotary // 2} frequencies, one for each pair of dimensions")
            if not all(_is_number(each) and 0 < each <= _MAX_FREQUENCY for each in frequencies):
                raise FormatError(f"KV spec: rope frequencies must be more than 0 and at most {_MAX_FREQUENCY:g}")
        if type(self.first) is not int or not 0 <= self.first <= head_dim - rotary:
            raise FormatError(f"KV spec: rope must begin at 0 to {head_dim - rotary}, got {self.first!r}")
        if not _is_number(self.factor) or not 1 / _MAX_FREQUENCY <= self.factor <= _MAX_FREQUENCY:
            raise FormatError(f"KV spec: rope factor must be a number from 1/{_MAX_FREQUENCY:g} to {_MAX_FREQUENCY:g}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values without defaults, so that digests of plain embeddings never change."""
        value: dict[str, Any] = {"theta": self.theta, "rotary_dim": self.rotary_dim, "layout": self.layout}
        if self.frequencies is not None:
            value["frequencies"] = [float(each) for each in self.frequencies]
        if self.factor != 1:
            value["factor"] = float(self.factor)
        if self.first:
            value["first"] = self.first
        return value

    @classmethod
    def from_json(cls, value: Any) -> RopeSpec:
        """Parse a result of `to_json`; `KVSpec` checks the values and handles errors."""
        fields = dict(value)
        if isinstance(fields.get("frequencies"), list):
            fields["frequencies"] = tuple(fields["frequencies"])
        return cls(**fields)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


KINDS = ("full", "window", "chunked", "latent", "state")


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers of one model with the same kind of cache."""

    kind: str
    """Contents of the cache.

    ``full``: keys and values of every token. ``window``: keys and values of the last `window` tokens. ``chunked``: keys
    and values of tokens in the same chunk of `window` tokens as the query. ``latent``: one vector per token that yields
    keys and values (MLA). ``state``: one recurrent matrix per head, stored as snapshots.
    """
    layers: tuple[int, ...]
    heads: int
    k_dim: int
    """Dims of a key or latent. For a state, its rows."""
    v_dim: int
    """Dims of a value, 0 with one vector per token (K = V, or a latent). For a state, its columns."""
    dtype: str
    """Element type, one of `DTYPES` or `QUANTISED`."""
    rope: RopeSpec | None = None
    """Rotation of the keys; None if there is none, or if it differs between layers."""
    window: int | None = None
    """Number of tokens in a window, including the query's token, or in a chunk."""
    interval: int | None = None
    """Tokens between snapshots of a state, a multiple of the group size; None: only one snapshot, at the end of the
    prompt.
    """
    scales: tuple[float, ...] | None = None
    """Multipliers of a quantised cache: a single one, or one per [layer, K/V], or one per [layer, K/V, head]; latents
    have no K/V axis.
    """
    role: str = ""
    """Purpose of a secondary cache of the layers, such as ``indexer``, in lowercase letters. A layer may be in several
    classes with different roles.
    """

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FormatError(
                f"KV spec: unknown kind of layer class {self.kind!r}; this version knows {', '.join(KINDS)}; upgrade "
                "kvabr"
            )
        state, layers = self.kind == "state", self.layers
        whole = isinstance(layers, tuple) and set(map(type, layers)) <= {int}
        if not whole or not 0 <= min(layers, default=0) <= max(layers, default=0) < MAX_LAYERS:
            raise FormatError(f"KV spec: layers of a class must be whole numbers from 0 to {MAX_LAYERS - 1}")
        if not layers or list(layers) != sorted(set(layers)):
            raise FormatError("KV spec: a class must list at least one layer, in ascending order")
        check_whole("heads", self.heads, 1, MAX_HEADS)
        check_whole("k_dim", self.k_dim, 1, MAX_GROUP_TOKENS if state else MAX_DIM)
        check_whole("v_dim", self.v_dim, int(state), 0 if self.kind == "latent" else MAX_DIM)
        if self.dtype not in ITEM_BYTES:
            raise FormatError(f"KV spec: dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        if self.rope is not None:
            if state:
                raise FormatError("KV spec: a state cannot have a rope")
            self.rope.check(self.k_dim if self.halves == 2 else sum(self.split))
        if not isinstance(self.role, str) or not _ROLE.fullmatch(self.role):
            raise FormatError(f"KV spec: a class's role must have at most 16 lowercase letters, got {self.role!r}")
        self._check_reach()
        self._check_scales()

    def _check_scales(self) -> None:
        if self.dtype not in QUANTISED:
            if self.scales is not None:
                raise FormatError(f"KV spec: a cache in {self.dtype} cannot have scales; one in {QUANTISED[0]} can")
            return
        if self.scales is None:
            raise FormatError(f"KV spec: a cache in {self.dtype} needs the scales of its engine")
        each = len(self.layers) * self.vectors
        if not isinstance(self.scales, tuple) or len(self.scales) not in (1, each, each * self.heads):
            raise FormatError(
                f"KV spec: a quantised class needs 1 scale, {each} (one per layer, of keys and of values), or "
                f"{each * self.heads} (one per head)"
            )
        if not all(_is_number(scale) and 1 / _MAX_SCALE <= scale <= _MAX_SCALE for scale in self.scales):
            raise FormatError(f"KV spec: scales must be numbers from 1/{_MAX_SCALE:g} to {_MAX_SCALE:g}")

    def _check_reach(self) -> None:
        for name, kinds in (("window", ("window", "chunked")), ("interval", ("state",))):
            value = getattr(self, name)
            if self.kind not in kinds and value is not None:
                raise FormatError(f"KV spec: a class of kind {self.kind} cannot have {name}")
            if value is not None or (name == "window" and self.kind in kinds):
                check_whole(name, value, 1, 1 << 31)

    @property
    def title(self) -> str:
        """Kind, window and role. This is the class's name, unless several classes have the same title."""
        return f"{self.kind}{self.window or ''}" + (f"-{self.role}" if self.role else "")

    @property
    def summary(self) -> str:
        """Layers, contents and element type as text."""
        keys, values = self.k_dim, self.v_dim
        if self.kind == "state":
            kept = f"{_counted(self.heads, 'state')} of {keys} x {values}"
        elif not values:
            kept = f"{_counted(self.heads, 'vector')} of {keys} per token"
        else:
            kept = f"{_counted(self.heads, 'KV head')} of {keys}" + ("" if keys == values else f" and {values}")
        return f"{_counted(len(self.layers), 'layer')}, {kept}, {self.dtype}"

    @property
    def split(self) -> tuple[int, int]:
        """Number of a head's channels that are scaled like keys, and number of those scaled like values.

        The channels are concatenated on the last axis, or stacked on the second axis if the numbers are equal. All
        channels of a state count as values.
        """
        return (0, self.v_dim) if self.kind == "state" else (self.k_dim, self.v_dim)

    @property
    def halves(self) -> int:
        """Length of the tensor's second axis: 2 if keys and values have the same shape."""
        keys, values = self.split
        return 2 if keys == values else 1

    @property
    def vectors(self) -> int:
        """Number of vectors per token and head: 2 for a key and a value, or 1."""
        return 2 if all(self.split) else 1

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the tensor shape for ``tokens`` tokens (for a state: rows)."""
        return (len(self.layers), self.halves, self.heads, tokens, sum(self.split) // self.halves)

    def of_heads(self, heads: range) -> LayerClass:
        """Return the class restricted to some heads, with their scales."""
        each = len(self.layers) * self.vectors
        scales = self.scales
        if scales is not None and len(scales) == each * self.heads:
            rows = (scales[first : first + self.heads] for first in range(0, len(scales), self.heads))
            scales = tuple(scale for row in rows for scale in row[heads.start : heads.stop])
        return replace(self, heads=len(heads), scales=scales)

    def of_layers(self, layers: range) -> LayerClass | None:
        """Return the class for consecutive model layers, renumbered from 0; None if it has none of these layers."""
        own = [place for place, layer in enumerate(self.layers) if layer in layers]
        if not own:
            return None
        scales = self.scales
        if scales is not None and len(scales) > 1:
            each = len(scales) // len(self.layers)
            scales = scales[own[0] * each : (own[-1] + 1) * each]
        return replace(self, layers=tuple(self.layers[place] - layers.start for place in own), scales=scales)

    def first_needed(self, tokens: int) -> int:
        """Return the first token that a prompt needs if it continues after ``tokens`` tokens.

        This is one token more than a query sees, since engines start by recomputing one token.
        """
        if self.kind == "window":
            return max(0, tokens - (self.window or 0))
        if self.kind == "chunked":
            return max(0, tokens - 1) // (self.window or 1) * (self.window or 1)
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values without defaults."""
        value: dict[str, Any] = {"kind": self.kind, "layers": list(self.layers), "heads": self.heads}
        value |= {"k_dim": self.k_dim, "v_dim": self.v_dim, "dtype": self.dtype}
        if self.rope is not None:
            value["rope"] = self.rope.to_json()
        value |= {name: getattr(self, name) for name in ("window", "interval", "role") if getattr(self, name)}
        return value if self.scales is None else {**value, "scales": [float(scale) for scale in self.scales]}

    @classmethod
    def from_json(cls, value: Any) -> LayerClass:
        """Parse a result of `to_json`; `KVSpec` handles errors."""
        fields = dict(value)
        if fields.get("kind") not in KINDS:
            cls(str(fields.get("kind"))[:80], (), 0, 0, 0, "")
        rope = fields.pop("rope", None)
        layers, scales = fields.pop("layers"), fields.pop("scales", None)
        if not isinstance(layers, list) or not isinstance(scales, list | None):
            raise FormatError("KV spec: the layers of a class must be a list, and so must its scales")
        if scales is not None:
            fields["scales"] = tuple(scales)
        return cls(layers=tuple(layers), rope=None if rope is None else RopeSpec.from_json(rope), **fields)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def check_whole(name: str, value: object, least: int, limit: int) -> None:
    """Raise `FormatError` if a field is not a whole number within bounds."""
    if type(value) is not int or not least <= value <= limit:
        raise FormatError(f"KV spec: {name} must be a whole number from {least} to {limit}, got {value!r}")


@dataclass(frozen=True)
class KVSpec:
    """Shape and meaning of one model's KV cache. Specs with equal digests can exchange groups."""

    model: str
    tokenizer: str
    """Digest or name of the tokenizer: equal token ids must mean equal text."""
    classes: tuple[LayerClass, ...]
    """Layer classes. Each layer is in one class, or in several with different roles."""
    group_tokens: int = GROUP_TOKENS
    part_of: tuple[str, str] | None = None
    """For a spec that is one class of several (`parts`): digest of the whole spec in hex, and name of the class."""

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
                    f"KV spec: snapshots every {each.interval} tokens do not match groups of {self.group_tokens} tokens"
                )
        if self.part_of is None:
            self._check_layers()
        elif len(self.classes) != 1:
            raise FormatError("KV spec: a part must be one class of a spec")

    def _check_layers(self) -> None:
        held = [(layer, each.role) for each in self.classes for layer in each.layers]
        if len(set(held)) < len(held):
            twice = min(layer for (layer, _), count in Counter(held).items() if count > 1)
            raise FormatError(f"KV spec: layer {twice} is in two classes of the same role")
        layers = {layer for layer, _ in held}
        if missing := set(range(max(layers) + 1)) - layers:
            raise FormatError(f"KV spec: layer {min(missing)} is in no class")

    @classmethod
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
        """Return the spec of a model with full attention in every layer."""
        check_whole("layers", layers, 1, MAX_LAYERS)
        check_whole("kv_heads", kv_heads, 1, MAX_HEADS)
        check_whole("head_dim", head_dim, 1, MAX_DIM)
        only = LayerClass("full", tuple(range(layers)), kv_heads, head_dim, head_dim, dtype, rope)
        return cls(model, tokenizer, (only,), group_tokens)

    # ------------------------------------------------------- a spec of one class

    @property
    def only(self) -> LayerClass:
        """The only layer class; raise `FormatError` if there are several."""
        if len(self.classes) > 1:
            raise FormatError(
                f"{self.model} has several layer classes ({', '.join(self.names)}), which differ in this property"
            )
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
        """Dimensions of keys and values; raise `FormatError` if their shapes differ."""
        if self.only.halves != 2:
            raise FormatError(f"{self.model}: keys and values of the class {self.only.title} differ in shape")
        return self.only.k_dim

    @property
    def rope(self) -> RopeSpec | None:
        """Rotation of the keys of the only class."""
        return self.only.rope

    @property
    def dtype(self) -> str:
        """Element type of the only class."""
        return self.only.dtype

    @property
    def elements_per_token(self) -> int:
        """Elements per token, or per row of a state."""
        only = self.only
        return len(only.layers) * only.heads * sum(only.split)

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape for ``tokens`` tokens (rows of a state): [layer, K/V, head, token, dim]."""
        return self.only.shape(tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the only class as a torch dtype."""
        import torch  # noqa: PLC0415  # replay needs only shapes; torch loads slowly

        made: torch.dtype = getattr(torch, self.dtype)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return own_state(self)

    @cached_property
    def summary(self) -> str:
        """Layers, heads and element type of every class, as text."""
        named = zip(self.names, self.classes, strict=True)
        return "; ".join(
            each.summary if name == "full" and len(self.classes) == 1 else f"{name}: {each.summary}"
            for name, each in named
        )

    @property
    def title(self) -> str:
        """Model and summary as text, and for a single class the rotary embedding."""
        if len(self.classes) > 1:
            return f"{self.model} ({self.summary})"
        of = "" if self.part_of is None else f"the class {self.part_of[1]} of "
        rope, turned = self.only.rope, "no rotary embedding"
        if rope is not None:
            scaled = "" if rope.frequencies is None else f", scaled down to {min(rope.frequencies):g} a token"
            turned = f"a rotary embedding of base {rope.theta:g}{scaled}"
        return f"{of}{self.model} ({self.summary}, {turned})"

    def changed(self, **fields: Any) -> KVSpec:
        """Return this spec with some fields of its only class changed."""
        return replace(self, classes=(replace(self.only, **fields),))

    # ------------------------------------------------------------ any spec

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Unique names of the classes."""
        seen: Counter[str] = Counter()
        names = []
        for each in self.classes:
            seen[each.title] += 1
            names.append(each.title if seen[each.title] == 1 else f"{each.title}-{seen[each.title]}")
        return tuple(names)

    @cached_property
    def parts(self) -> tuple[KVSpec, ...]:
        """One spec per class, with a digest that identifies both spec and class; this spec if it has only one class."""
        if len(self.classes) == 1:
            return (self,)
        whole = self.digest().hex()
        pairs = zip(self.classes, self.names, strict=True)
        return tuple(replace(self, classes=(each,), part_of=(whole, name)) for each, name in pairs)

    @property
    def even_groups(self) -> bool:
        """True if each group of tokens is one unit, without states."""
        return len(self.classes) == 1 and self.only.kind != "state"

    @property
    def rows(self) -> int:
        """Tokens in a full group of the only class; for a state, its rows."""
        return self.only.k_dim if self.only.kind == "state" else self.group_tokens

    @property
    def largest(self) -> KVSpec:
        """The part with the most elements in a full group. Decode times refer to it."""
        return max(self.parts, key=lambda part: part.rows * part.elements_per_token)

    def track_name(self, level: str) -> str:
        """Return a level's track name for this part: the level, and the class if there are several classes."""
        return level if self.part_of is None else f"{level}.{self.part_of[1]}"

    def level_of(self, track: str) -> tuple[str, int]:
        """Return the level and class index of a track; raise `FormatError` if there is no such class."""
        if len(self.classes) == 1:
            return track, 0
        level, _, name = track.rpartition(".")
        if not level or name not in self.names:
            raise FormatError(f"{track!r} names no layer class of {self.model}; choose from {', '.join(self.names)}")
        return level, self.names.index(name)

    def fp16_bytes(self, tokens: int) -> int:
        """Return the bytes of ``tokens`` tokens in every layer, and of one state, at 16 bits per element."""
        rows = (min(tokens, 1) * each.rows if each.only.kind == "state" else tokens for each in self.parts)
        return sum(2 * count * each.elements_per_token for count, each in zip(rows, self.parts, strict=True))

    @cached_property
    def max_frame_bytes(self) -> int:
        """Maximum size of a group's frame in bytes."""
        return min(MAX_FRAME_BYTES, _MAX_TIMES_FP16 * self.fp16_bytes(self.group_tokens) + _SLACK_BYTES)

    def check_frame_sizes(self, what: str, sizes: Iterable[int]) -> None:
        """Raise `FormatError` if a frame's size is more than `max_frame_bytes`."""
        most = self.max_frame_bytes
        # Not `max(sizes)`: a single call would block other threads for too long.
        for size in sizes:
            if size > most:
                raise FormatError(f"{what}: a group has {size} bytes, more than a cache can need ({most})")

    def groups(self, tokens: int) -> int:
        """Return the number of groups in ``tokens`` tokens; the last group may be short."""
        return -(-tokens // self.group_tokens)

    def group_range(self, group: int, tokens: int) -> tuple[int, int]:
        """Return the first token of ``group`` and the token after its last, in a cache of ``tokens`` tokens."""
        first = group * self.group_tokens
        if group < 0 or first >= tokens:
            raise IndexError(f"group {group} is outside a cache of {tokens} tokens")
        return first, min(first + self.group_tokens, tokens)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values for `from_json`."""
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
        """Parse an untrusted result of `to_json`; raise `FormatError` if a field is invalid."""
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
            raise FormatError(f"KV spec: this version cannot read it ({error})") from error

    def same_cache(self, other: KVSpec) -> bool:
        """Return True if both specs describe the same cache, ignoring group size and snapshot interval."""
        # The digest in part_of depends on the group size, so compare only the class name.
        mine, theirs = (
            (one.model, one.tokenizer, len(one.classes), one.part_of and one.part_of[1]) for one in (self, other)
        )
        pairs = zip(self.classes, other.classes, strict=False)
        return mine == theirs and all(
            one == another or replace(one, interval=None) == replace(another, interval=None) for one, another in pairs
        )

    def with_dtypes(self, other: KVSpec) -> KVSpec:
        """Return this spec with the element types of another; this spec itself if their numbers of classes differ.

        Quantised classes keep their types, as engines accept no others.
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
        """Return the digest that identifies this spec in every frame, 16 bytes."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvabr.spec/1\0" + canonical.encode()).digest()[:16]


class _Models(Struct):
    models: Annotated[list[Raw], Meta(max_length=4096)]


def specs_from_json(data: bytes) -> list[KVSpec]:
    """Parse untrusted ``{"models": [...]}``; raise `FormatError`. Does not block other threads."""
    found = decode(data, _Models, "list of models").models
    return [KVSpec.from_json(decode(each, dict[str, Any], "list of models")) for each in found]
