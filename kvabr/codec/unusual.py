"""Groups that the AC tracks cannot code like others: detection and payloads.

Rounding loses little because its errors are independent, and a model averages over many tokens. In repetitive text
(tables of zeros, hexdumps, copies of a paragraph), equal tokens have equal errors, which do not average out. The base
of such a group contains the layers above it. Correlated errors (`Likeness`) or repeated tokens (`repeated`) reveal such
groups. If many tokens are outliers, or all are similar (e.g. one token a thousand times), another codec encodes the
group. The payload of an unusual group begins with a marker in place of the number of listed tokens:

    0xFFFFFFFF  another codec's: code 1 (see `OTHERS`) | its payload of the group
    0xFFFFFFFE  nothing: the values are those of the layers below
    0xFFFFFFFD  of a base, layers in one: enhancements 1 | size 4 of each payload ... | ordinary payloads, base first

If several layers have payloads of other codecs, the last one applies: a base may have four bits, and the finest layer
eight. Above an empty layer, and above a base that contains layers, all layers are empty.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.base import Codec, GroupContext, codec
from kvabr.codec.centred import CENTRED, Centred, centring_helps
from kvabr.codec.coefficients import Coefficients
from kvabr.codec.native import coder
from kvabr.codec.native.references import TILE
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import LAYERS

OTHERS = ("FP16", "Int8", "Int4", "Int8-centred", "Int4-centred")
EXACT = "FP16"
"""Codec of groups that AC would enlarge or cannot code."""
FINE, COARSE = ("Int8", "Int8-centred"), ("Int4", "Int4-centred")
"""Codecs of unusual groups, each without and with medians (`kvabr.codec.centred`)."""
LAYERED, NOTHING_ABOVE, OTHER = 0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF
_NUMBER = struct.Struct("<I")
_CODE = struct.Struct("<IB")
NOTHING = _NUMBER.pack(NOTHING_ABOVE)

_COPIES = (2.15, 4.1)
"""Minimum `Likeness.copies`, relative to the usual number, for a base to contain L1, and to contain L2."""
USUAL_COPIES = 1.35
_MIN_REPEATED_SHARE = 0.4
"""Minimum fraction of `repeated` tokens for a base to contain L1."""
_MIN_REPETITION = 32
"""Minimum length of a repetition in tokens, a power of two; shorter ones are common in source code."""
_CHANNELS = 4
"""Number of channels used to compare tokens. Few are enough, since consecutive tokens must be equal, too."""
_MAX_EQUAL_DISTANCE = 2.0**-7
"""Maximum difference between equal tokens, relative to the largest distance; engines may round equal tokens
differently.
"""
_MIN_COMMON_SHARE = 0.4
"""Minimum `Likeness.common` for using another codec."""
_MAX_ASIDE = 8
"""Another codec is used if more than one in this many tokens, plus four, would be stored separately."""
_MIN_TOKENS = 16
_SAMPLED, _GLANCED = 2048, 256
_MIN_FIRST_COPIES = 2.6
"""If `Likeness.copies` in the first rows, relative to the usual number in all, is below this, the other rows are not
examined. In few rows, more tokens are similar by chance.
"""


def is_unusual(payload: bytes | memoryview) -> bool:
    """Return True for a payload in one of this module's formats."""
    return len(payload) >= _NUMBER.size and int(_NUMBER.unpack_from(payload)[0]) >= LAYERED


def other(name: str, payload: bytes) -> bytes:
    """Return the payload of a group that another codec of `OTHERS` encoded."""
    return _CODE.pack(OTHER, OTHERS.index(name)) + payload


def other_codec(name: str) -> Codec:
    """Return a codec of `OTHERS`."""
    return Centred(name.removesuffix(CENTRED)) if name.endswith(CENTRED) else codec(name)


def by_another(names: tuple[str, str], group: torch.Tensor, context: GroupContext) -> bytes:
    """Return a group's payload by the first of two codecs (`FINE` or `COARSE`), or by the second if medians help."""
    name = names[centring_helps(group, context.spec)]
    return other(name, other_codec(name).encode(group, context))


def layered(payloads: Sequence[bytes]) -> bytes:
    """Return a base that contains the layers above it, from ordinary payloads."""
    sizes = (_NUMBER.pack(len(each)) for each in payloads)
    return b"".join((_CODE.pack(LAYERED, len(payloads) - 1), *sizes, *payloads))


@dataclass(frozen=True, eq=False)
class Chain:
    """The payloads of a depth and of those below it, with unusual payloads unpacked."""

    tracks: tuple[str, ...]
    """Depths with ordinary payloads, base first; empty if another codec encoded the group."""
    payloads: tuple[memoryview, ...]
    other: tuple[str, memoryview] | None = None
    full: bool = False


def read_chain(tracks: Sequence[str], payloads: Sequence[bytes | memoryview]) -> Chain:
    """Unpack the untrusted payloads of a depth and those below it, base first; raise `FormatError` if malformed."""
    views = [memoryview(payload) for payload in payloads]
    if not any(map(is_unusual, views)):
        return Chain(tuple(tracks), tuple(views))
    base, *above = views
    kind = int(_NUMBER.unpack_from(base)[0]) if is_unusual(base) else 0
    if kind == OTHER:
        replaced = [base, *(payload for payload in above if not _is_nothing(payload))]
        return Chain((), (), [_other(tracks[0], payload) for payload in replaced][-1], full=True)
    own = [base] if kind == 0 else _parts(tracks[0], base)
    inside, full = len(own), False
    for place, (track, payload) in enumerate(zip(tracks[1:], above, strict=True), start=1):
        nothing = _is_nothing(payload)
        if not nothing and (full or place < inside or is_unusual(payload)):
            raise FormatError(f"{track}: has data, but a layer below it has none; the payload is corrupt")
        full |= nothing and place >= inside
        if not nothing:
            own.append(payload)
    return Chain((*LAYERS[: len(own)],) if len(own) > 1 else (tracks[0],), tuple(own), full=full)


def _is_nothing(payload: memoryview) -> bool:
    return payload == NOTHING


def _other(track: str, payload: memoryview) -> tuple[str, memoryview]:
    code = payload[_NUMBER.size] if is_unusual(payload) and len(payload) > _NUMBER.size else len(OTHERS)
    if code >= len(OTHERS) or _NUMBER.unpack_from(payload)[0] != OTHER:
        raise FormatError(f"{track}: names an unknown codec; the payload is corrupt")
    return OTHERS[code], payload[_CODE.size :]


def _parts(track: str, base: memoryview) -> list[memoryview]:
    bad = FormatError(f"{track}: combines layers in an invalid way; the payload is corrupt")
    count = base[_NUMBER.size] + 1 if len(base) > _NUMBER.size else 0
    begin = _CODE.size + _NUMBER.size * count
    if (
        _NUMBER.unpack_from(base)[0] != LAYERED
        or track != LAYERS[0]
        or not 2 <= count <= len(LAYERS)
        or len(base) < begin
    ):
        raise bad
    out = []
    for place in range(count):
        (size,) = _NUMBER.unpack_from(base, _CODE.size + _NUMBER.size * place)
        out.append(base[begin : begin + size])
        begin += size
    if begin != len(base) or any(map(is_unusual, out)):
        raise bad
    return out


@dataclass(frozen=True, slots=True)
class Likeness:
    """How similar the errors of a group's tokens are."""

    common: float
    """Fraction of the errors' power that all tokens of a tile share, maximum over tiles; 1 if all errors are equal."""
    copies: float
    """Effective number of tokens of a tile with the same error, ignoring the common part; 1 if all differ.

    It is the sum of squared correlations of a token with all tokens, averaged over tokens.
    """

    def enhancements(self, usual: float | None) -> int:
        """Return the number of layers that the base should contain; ``usual`` is the usual `copies`, if known."""
        return sum(self.copies >= least * (usual or USUAL_COPIES) for least in _COPIES)

    @property
    def alike(self) -> bool:
        """True if all tokens are so similar that a base with layers does not help."""
        return self.common >= _MIN_COMMON_SHARE


def crowded(outlying: torch.Tensor) -> bool:
    """Return True if too many tokens are outliers to store them separately; ``outlying`` is [token] bool."""
    return int(outlying.sum()) > 4 + len(outlying) // _MAX_ASIDE


def sample(rows: int, max_rows: int = _SAMPLED) -> NDArray[np.intp]:
    """Return the numbers of up to ``max_rows`` rows for `likeness`."""
    return np.arange(0, rows, -(-rows // max_rows))


def glanced(rows: int) -> NDArray[np.intp]:
    """Return the numbers of the rows that `contained` examines first in every group."""
    return sample(rows, _GLANCED)


def likeness(rows: torch.Tensor, step: float, keep: NDArray[np.bool_]) -> Likeness:
    """Return the similarity of rounding errors.

    ``rows`` are a `sample` of the coefficients, [row, token] float32, in the processor's memory; ``step`` is the
    quantiser's; ``keep`` marks coded tokens, [token].
    """
    every, coded = np.arange(len(rows)), np.flatnonzero(keep)
    tiles = [coded[first : first + TILE] for first in range(0, len(coded), TILE)]
    found = [
        _likeness(coder.similarity(rows.numpy(), every, tile, step).astype(np.float64))
        for tile in tiles
        if len(tile) >= _MIN_TOKENS
    ]
    return Likeness(max((it.common for it in found), default=0.0), max((it.copies for it in found), default=0.0))


def _likeness(gram: NDArray[np.float64]) -> Likeness:
    count = len(gram)
    power = float(np.trace(gram))
    if not power:
        return Likeness(0.0, 0.0)
    sums = gram.sum(axis=1)
    total = float(sums.sum())
    mutual = gram - (sums[:, None] + sums) / count + total / count**2
    size = np.sqrt(np.maximum(np.diag(mutual), 1e-9 * power / count))
    squares = np.square(mutual / size / size[:, None]).reshape(-1)
    copies = float(np.add.accumulate(squares)[-1]) / count
    return Likeness(total / count / power, copies)


def contained(
    group: torch.Tensor,
    spec: KVSpec,
    coefficients: Coefficients,
    step: float,
    keep: NDArray[np.bool_],
    usual: float | None,
) -> int | None:
    """Return the number of layers that a group's base should contain; None if another codec should encode it.

    ``group`` is as for `repeated`, ``step`` the base's; ``keep`` marks coded tokens; ``usual`` is the usual
    `Likeness.copies`, if known.
    """
    by_words = int(repeated(group, spec) >= _MIN_REPEATED_SHARE)
    rows = len(coefficients.rows)
    glance = likeness(coefficients.some(glanced(rows)), step, keep)
    if glance.copies < _MIN_FIRST_COPIES * (usual or USUAL_COPIES) and glance.common < _MIN_COMMON_SHARE / 2:
        return by_words
    found = likeness(coefficients.some(sample(rows)), step, keep)
    return None if found.alike else max(by_words, found.enhancements(usual))


def repeated(group: torch.Tensor, spec: KVSpec) -> float:
    """Return the fraction of tokens in repetitions of at least `_MIN_REPETITION` tokens, maximum over tiles.

    In a model's first layer, values depend only on the token itself, so equal tokens are detected without ids. Return 0
    for a class without the first layer, and if keys do not rotate: such a model may add positions to its tokens.

    ``group`` is [layer, K/V, head, token, dim], any float dtype, and not a state.
    """
    places = _compared(spec)
    if places is None:
        return 0.0
    heads, dims = (torch.from_numpy(each).to(group.device) for each in places)
    numbers = group[0, -1][heads, :, dims].detach().float().cpu().numpy()
    tiles = (numbers[:, first : first + TILE] for first in range(0, numbers.shape[1], TILE))
    return max((_repeated(tile) for tile in tiles if tile.shape[1] > _MIN_REPETITION), default=0.0)


@lru_cache(maxsize=64)
def _compared(spec: KVSpec) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    only, rope = spec.only, spec.only.rope
    if only.layers[0] != 0 or rope is None:
        return None
    turning = range(0) if only.halves == 2 else range(rope.first, rope.first + rope.rotary_dim)
    still = np.array([dim for dim in range(only.shape(1)[4]) if dim not in turning], np.intp)
    if not len(still):
        return None
    places = np.linspace(0, only.heads * len(still) - 1, _CHANNELS).astype(np.intp)
    return places // len(still), still[places % len(still)]


def _repeated(numbers: NDArray[np.float32]) -> float:
    apart = numbers[:, :, None] - numbers[:, None]
    apart = np.abs(apart, out=apart).max(axis=0)
    farthest = apart.max(axis=0)  # 0: constant channels cannot distinguish tokens
    limit = np.float32(_MAX_EQUAL_DISTANCE) * np.maximum(farthest[:, None], farthest)
    begins = np.tril((apart <= limit) & (limit > 0), -1)
    length = 1
    while length < _MIN_REPETITION:  # for a token and an earlier one: are `length` following tokens equal?
        begins = begins[:-length, :-length] & begins[length:, length:]
        length *= 2
    return float((np.convolve(begins.any(axis=1), np.ones(_MIN_REPETITION, np.intp)) > 0).mean())
