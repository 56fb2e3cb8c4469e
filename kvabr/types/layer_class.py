"""What one layer class of a model keeps: shapes, element type, rotary embedding, and for how long a token counts.

`kvabr.types.kv` makes a model's whole cache of such classes, and is where other modules import them from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from kvabr.types.errors import FormatError

MAX_GROUP_TOKENS = 65536
DTYPES = ("float16", "bfloat16", "float32")
"""Element types of caches that hold numbers."""
QUANTISED = ("float8_e4m3fn", "float8_e5m2")
"""Element types whose numbers mean something only together with `LayerClass.scales`."""
ITEM_BYTES = dict(zip((*DTYPES, *QUANTISED), (2, 2, 4, 1, 1), strict=True))
"""Every element type that a cache may have, and the bytes of an element."""
MAX_LAYERS, MAX_HEADS, MAX_DIM = 1024, 1024, 4096
_ROLE = re.compile(r"[a-z]{0,16}")
_STEEPEST = 1024.0
"""Maximum of radians per token and of the factor of a rotation, whose minimum is the inverse. Real models are near
1."""
_HIGHEST = 1e30
"""Maximum base of the frequencies."""
_MOST_SCALE = 2.0**32
"""Maximum of a scale of quantised numbers, whose minimum is the inverse. Those of real caches are near 1."""


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
    """Number of consecutive dimensions of a head that rotate; the rest pass through (partial RoPE)."""
    layout: Literal["half", "interleaved"] = "half"
    """Which dimensions form a pair: ``half`` pairs d with d + rotary_dim/2 (Llama), ``interleaved`` pairs 2i with 2i+1,
    both counted from `first`."""
    frequencies: tuple[float, ...] | None = None
    """Radians per token of each of the rotary_dim/2 pairs; None for the powers of theta."""
    factor: float = 1.0
    """Multiplier of cosines and sines (YaRN's attention factor): rotating scales a pair's length by it."""
    first: int = 0
    """First dimension that rotates, along the last axis of a class's tensor: latent attention (MLA) rotates the last
    dimensions of a key."""

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
        if type(self.first) is not int or not 0 <= self.first <= head_dim - rotary:
            raise FormatError(f"KV spec: rope begins at {self.first!r}, must be from 0 to {head_dim - rotary}")
        if not _is_number(self.factor) or not 1 / _STEEPEST <= self.factor <= _STEEPEST:
            raise FormatError(f"KV spec: rope factor must be a number from 1/{_STEEPEST:g} to {_STEEPEST:g}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values. Defaults are omitted, so digests of plain embeddings never change."""
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
        """Parse the output of `to_json`; `KVSpec` checks the values and handles errors."""
        fields = dict(value)
        if isinstance(fields.get("frequencies"), list):
            fields["frequencies"] = tuple(fields["frequencies"])
        return cls(**fields)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


KINDS = ("full", "window", "chunked", "latent", "state")
"""Kinds of layer classes, see `LayerClass.kind`."""


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers of one model that keep their cache alike."""

    kind: str
    """What a layer keeps, and for how long a token counts.

    ``full``: keys and values of every token. ``window``: of the last `window` tokens, which a query sees. ``chunked``:
    of the tokens in the query's own chunk of `window` tokens. ``latent``: one vector per token, from which keys and
    values are made (MLA). ``state``: a matrix per head that stands for all tokens, of which there are snapshots.
    """
    layers: tuple[int, ...]
    """Numbers of the layers in the model, ascending."""
    heads: int
    k_dim: int
    """Dimensions of a key, or of a latent; rows of a state."""
    v_dim: int
    """Dimensions of a value: 0 if there is only one vector per token (K = V, or a latent). Columns of a state."""
    dtype: str
    """Element type of the publisher's cache, one of `DTYPES` or of `QUANTISED`."""
    rope: RopeSpec | None = None
    """How the keys are rotated; None if they are not, or not alike in all layers."""
    window: int | None = None
    """Tokens of a window, the query's own included; or of a chunk."""
    interval: int | None = None
    """Tokens between two snapshots of a state, a multiple of the group's; None: only one, of the whole prompt."""
    scales: tuple[float, ...] | None = None
    """What an engine multiplies the numbers of its quantised cache by (`QUANTISED`): one for all, or one per [layer,
    K/V], or one per [layer, K/V, head]. A latent has one vector, so no axis K/V. None for other types."""
    role: str = ""
    """What the class holds of its layers if it is not their main cache, for example ``indexer``: lowercase letters. A
    layer may be in several classes if these differ in this."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FormatError(
                f"KV spec: this version does not know layer classes of kind {self.kind!r}, only {', '.join(KINDS)}; "
                "upgrade kvabr"
            )
        state, layers = self.kind == "state", self.layers
        if not isinstance(layers, tuple) or not all(type(each) is int and 0 <= each < MAX_LAYERS for each in layers):
            raise FormatError(f"KV spec: layers of a class must be numbers from 0 to {MAX_LAYERS - 1}")
        if not layers or any(one >= other for one, other in pairwise(layers)):
            raise FormatError("KV spec: a class must list its layers in ascending order, at least one")
        check_whole("heads", self.heads, 1, MAX_HEADS)
        check_whole("k_dim", self.k_dim, 1, MAX_GROUP_TOKENS if state else MAX_DIM)
        check_whole("v_dim", self.v_dim, int(state), 0 if self.kind == "latent" else MAX_DIM)
        if self.dtype not in ITEM_BYTES:
            raise FormatError(f"KV spec: dtype is {self.dtype!r}, must be one of {', '.join(ITEM_BYTES)}")
        if self.rope is not None:
            if state:
                raise FormatError("KV spec: a state is not rotated")
            self.rope.check(self.k_dim if self.halves == 2 else sum(self.split))
        if not isinstance(self.role, str) or not _ROLE.fullmatch(self.role):
            raise FormatError(f"KV spec: a class's role must have at most 16 lowercase letters, not {self.role!r}")
        self._check_reach()
        self._check_scales()

    def _check_scales(self) -> None:
        if self.dtype not in QUANTISED:
            if self.scales is not None:
                raise FormatError(f"KV spec: a cache in {self.dtype} has no scales; those of {QUANTISED[0]} do")
            return
        if self.scales is None:
            raise FormatError(
                f"KV spec: a cache in {self.dtype} means nothing without the scales that its engine multiplies it by"
            )
        each = len(self.layers) * self.vectors
        if not isinstance(self.scales, tuple) or len(self.scales) not in (1, each, each * self.heads):
            raise FormatError(
                f"KV spec: a quantised class needs 1 scale, {each} (one per layer, of keys and of values), or "
                f"{each * self.heads} (one per head)"
            )
        if not all(_is_number(scale) and 1 / _MOST_SCALE <= scale <= _MOST_SCALE for scale in self.scales):
            raise FormatError(f"KV spec: a scale is not a number from 1/{_MOST_SCALE:g} to {_MOST_SCALE:g}")

    def _check_reach(self) -> None:
        for name, kinds in (("window", ("window", "chunked")), ("interval", ("state",))):
            value = getattr(self, name)
            if self.kind not in kinds and value is not None:
                raise FormatError(f"KV spec: a class of kind {self.kind} has no {name}")
            if value is not None or (name == "window" and self.kind in kinds):
                check_whole(name, value, 1, 1 << 31)

    @property
    def title(self) -> str:
        """Kind, window and role: the name of the class, unless another is alike."""
        return f"{self.kind}{self.window or ''}" + (f"-{self.role}" if self.role else "")

    @property
    def summary(self) -> str:
        """Layers, what each keeps, and element type, in words."""
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
        """Channels of a head that are scaled like keys, then those that are scaled like values.

        They lie one behind the other in the last axis of the tensor, or, if they are as many, in two places of the
        second one. A state is all values: its rows, which take the place of tokens, differ more than its columns do.
        """
        return (0, self.v_dim) if self.kind == "state" else (self.k_dim, self.v_dim)

    @property
    def halves(self) -> int:
        """Length of the tensor's second axis: 2 if keys and values are alike in shape."""
        keys, values = self.split
        return 2 if keys == values else 1

    @property
    def vectors(self) -> int:
        """Vectors of a token in one head: a key and a value, or only one."""
        return 2 if all(self.split) else 1

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of the tensor for ``tokens`` tokens, or rows of a state."""
        return (len(self.layers), self.halves, self.heads, tokens, sum(self.split) // self.halves)

    def of_heads(self, heads: range) -> LayerClass:
        """Return the class of some heads of this one, with their scales."""
        each = len(self.layers) * self.vectors
        scales = self.scales
        if scales is not None and len(scales) == each * self.heads:
            rows = (scales[first : first + self.heads] for first in range(0, len(scales), self.heads))
            scales = tuple(scale for row in rows for scale in row[heads.start : heads.stop])
        return replace(self, heads=len(heads), scales=scales)

    def of_layers(self, layers: range) -> LayerClass | None:
        """Return the class of some consecutive layers of the model, numbered from 0, with their scales; None: of none.

        Its own layers among them are consecutive layers of this class.
        """
        own = [place for place, layer in enumerate(self.layers) if layer in layers]
        if not own:
            return None
        scales = self.scales
        if scales is not None and len(scales) > 1:
            each = len(scales) // len(self.layers)
            scales = scales[own[0] * each : (own[-1] + 1) * each]
        return replace(self, layers=tuple(self.layers[place] - layers.start for place in own), scales=scales)

    def first_needed(self, tokens: int) -> int:
        """Return the first token whose cache a prompt that goes on behind ``tokens`` tokens needs.

        One token more is kept than a query behind them sees, so that the last of them can be computed again: engines
        want at least one token to begin with.
        """
        if self.kind == "window":
            return max(0, tokens - (self.window or 0))
        if self.kind == "chunked":
            return max(0, tokens - 1) // (self.window or 1) * (self.window or 1)
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values. Defaults are omitted."""
        value: dict[str, Any] = {"kind": self.kind, "layers": list(self.layers), "heads": self.heads}
        value |= {"k_dim": self.k_dim, "v_dim": self.v_dim, "dtype": self.dtype}
        if self.rope is not None:
            value["rope"] = self.rope.to_json()
        value |= {name: getattr(self, name) for name in ("window", "interval", "role") if getattr(self, name)}
        return value if self.scales is None else {**value, "scales": [float(scale) for scale in self.scales]}

    @classmethod
    def from_json(cls, value: Any) -> LayerClass:
        """Parse the output of `to_json`; `KVSpec` handles errors."""
        fields = dict(value)
        if fields.get("kind") not in KINDS:
            cls(str(fields.get("kind"))[:80], (), 0, 0, 0, "")  # it says so, whatever else the class has
        rope = fields.pop("rope", None)
        layers, scales = fields.pop("layers"), fields.pop("scales", None)
        if not isinstance(layers, list) or not isinstance(scales, list | None):
            raise FormatError("KV spec: the layers of a class must be a list, and so must its scales")
        if scales is not None:
            fields["scales"] = tuple(scales)
        return cls(layers=tuple(layers), rope=None if rope is None else RopeSpec.from_json(rope), **fields)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raise a `FormatError` unless a field of a spec is a whole number within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"KV spec: {name} is {value!r}, must be a whole number from {least} to {most}")
