"""Inputs of a coder: the probability tables of one depth, and decoding jobs.

Tables are untrusted; the constructor checks everything that decoders rely on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native.references import LANES, TILE, References
from kvabr.codec.transform import FARTHEST, FINE, MAX_ROWS, Transform, keep, need
from kvabr.types.errors import FormatError

PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
MAX_RADIUS = 126
MAX_DELTA = 7
MAX_NEAR = 8
BUCKETS = 16
_USUAL_ROWS = 2048
"""Usual number of rows of 128 tokens in a stream; a GPU decodes many streams at once."""
_STREAM_BYTES = 8 + 4 * LANES
_STREAM_SHARE = 0.0145
"""Maximum fraction of a group's expected bytes for the overhead of all additional streams."""
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

Index = NDArray[np.int16]
_T = TypeVar("_T")
_derived: WeakKeyDictionary[object, dict[Hashable, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


def derived(owner: object, key: Hashable, make: Callable[[], _T]) -> _T:
    """Return the cached result of ``make`` for an owner and key."""
    with _lock:
        made = _derived.setdefault(owner, {})
        if key not in made:
            made[key] = make()
        out: _T = made[key]
        return out


@dataclass(frozen=True, eq=False)
class NearTables:
    """The tables for tokens with references in their tile (`kvabr.codec.native.references`).

    The referenced token's index in the row, r, clamped to -127 to 127, determines context and sign. For a base, the
    context is ``bucket[0, min(abs(r), 15)]`` and the sign is that of r. For a layer, let b be the index below. The sign
    is that of b, or of r if b is 0; the context is ``bucket[min(abs(b), 2), min(max(d, -8), 7) + 8]``, where ``d = r *
    sign - 3 * min(abs(b), 42)``.
    """

    bucket: NDArray[np.uint8]
    """Context numbers, [1, or 3 if the depth refines another, 16]."""
    freqs: NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class CoderModel:
    """The probability tables of one depth.

    A row is one coefficient of all tokens of a group. Rows of a class share a table. A depth that refines another has
    three tables per class: for an index of magnitude 0, 1, or at least 2 at the depth below.
    """

    row_class: NDArray[np.uint8]
    radius: NDArray[np.uint8]
    """[class]: symbol s is index s - radius; symbol 2 radius + 1 is the escape."""
    freqs: NDArray[np.uint16]
    """[class, context, symbol]: frequency in units of 1/4,096. It is 0 for unused symbols, which are escaped, and at
    least 1 for the escape.
    """
    flag_freq: NDArray[np.uint16]
    """[flag context, row]: probability, in units of 1/4,096, that a row of a tile has a nonzero index. A depth with
    three contexts has two flag contexts, selected by the flag of the same row at the depth below.
    """
    delta: NDArray[np.uint8]
    """[class]: offset of decoded indices from the middle of their interval towards zero, in sixteenths of a step."""
    near: NearTables | None = None
    order: NDArray[np.uint32] = field(init=False)
    """Rows in coding order, [row], class by class."""

    def __post_init__(self) -> None:
        keep(self, "row_class", np.uint8, -1)
        keep(self, "radius", np.uint8, -1)
        rows, classes = len(self.row_class), len(self.radius)
        need(0 < rows <= MAX_ROWS, f"coefficients per token must be 1 to {MAX_ROWS}, got {rows}")
        need(0 < classes <= 256, f"classes must be 1 to 256, got {classes}")
        need(int(self.row_class.max()) < classes, "a coefficient has an unknown class")
        widest = int(self.radius.max())
        need(widest <= MAX_RADIUS, f"radii must be at most {MAX_RADIUS}, got {widest}")
        keep(self, "freqs", np.uint16, classes, -1, 2 * widest + 2)
        contexts = self.contexts
        need(contexts in (1, 3), f"contexts must be 1 or 3, got {contexts}")
        self._check_tables(self.freqs)
        if self.near is not None:
            keep(self.near, "bucket", np.uint8, contexts, BUCKETS)
            keep(self.near, "freqs", np.uint16, classes, -1, 2 * widest + 2)
            count = self.near.freqs.shape[1]
            need(1 <= count <= MAX_NEAR, f"contexts of references must be 1 to {MAX_NEAR}, got {count}")
            need(int(self.near.bucket.max()) < count, "a bucket has an unknown context of references")
            self._check_tables(self.near.freqs)
        keep(self, "flag_freq", np.uint16, 1 if contexts == 1 else 2, rows)
        lowest, highest = int(self.flag_freq.min()), int(self.flag_freq.max())
        need(lowest >= 1 and highest < TOTAL, f"the frequency of a flag must be 1 to {TOTAL - 1} of {TOTAL}")
        keep(self, "delta", np.uint8, classes)
        need(int(self.delta.max()) <= MAX_DELTA, f"deltas must be at most {MAX_DELTA}, got {int(self.delta.max())}")
        order = np.argsort(self.row_class, kind="stable").astype(np.uint32)
        order.flags.writeable = False
        object.__setattr__(self, "order", order)

    def _check_tables(self, freqs: NDArray[np.uint16]) -> None:
        need(
            bool((freqs.sum(axis=2, dtype=np.int64) == TOTAL).all()),
            f"the frequencies of each table must sum to {TOTAL}",
        )
        need(int(freqs.max()) < TOTAL, f"the frequency of a symbol must be at most {TOTAL - 1}")
        escape = 2 * self.radius.astype(np.int64) + 1
        at = np.broadcast_to(escape[:, None, None], (*freqs.shape[:2], 1))
        need(
            bool((np.take_along_axis(freqs, at, axis=2) > 0).all()),
            "the frequency of an escape symbol must be more than 0",
        )
        beyond = np.arange(freqs.shape[2]) > escape[:, None]
        need(not (freqs.any(axis=1) & beyond).any(), "the frequency of symbols after the escape symbol must be 0")

    @property
    def rows(self) -> int:
        """Number of rows: coefficients per token."""
        return len(self.row_class)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.radius)

    @property
    def contexts(self) -> int:
        """Number of contexts: 1, or 3 if this depth refines another."""
        return int(self.freqs.shape[1])

    @property
    def refines(self) -> bool:
        """True if this depth is coded conditionally on the depth below."""
        return self.contexts == 3


def max_streams(rows: int) -> int:
    """Return the maximum streams; each has at least one whole run of rows."""
    return max(1, min(rows // LANES, 0xFFFF))


def cut(order: NDArray[np.uint32], streams: int) -> list[NDArray[np.uint32]]:
    """Deal runs of rows in coding order to streams, so that each stream has every class and neighbours share tables."""
    run = np.arange(len(order)) // LANES % streams
    return [order[run == stream] for stream in range(streams)]


def usual_streams(model: CoderModel, tokens: int) -> int:
    """Return the default number of streams of a group. More streams are shorter, but take more bytes."""
    each = derived(model, "bytes", lambda: _expected_bytes(model))
    tiles = -(-tokens // TILE)
    affordable = 1 + int(_STREAM_SHARE * each * tokens / _STREAM_BYTES)
    return max(1, min(affordable, -(-model.rows * tiles // _USUAL_ROWS), max_streams(model.rows)))


def _expected_bytes(model: CoderModel) -> float:
    share = model.freqs[:, 0] / TOTAL
    bits = -(share * np.log2(np.maximum(share, 1 / TOTAL))).sum(axis=1)
    return float((bits[model.row_class] * model.flag_freq[0] / TOTAL).sum()) / 8


def dequantise(model: CoderModel, index: Index) -> NDArray[np.int16]:
    """Convert indices [row, token] to coefficients in sixteenths of a step."""
    bounded = np.clip(index, -FARTHEST, FARTHEST).astype(np.int16)
    shift = model.delta[model.row_class].astype(np.int16)[:, None]
    return (FINE * bounded - np.sign(bounded) * shift).astype(np.int16)


def frequencies(counts: NDArray[Any]) -> NDArray[np.uint16]:
    """Convert histograms [..., symbol] of at most 2,048 symbols, the escape last, to frequency tables.

    Tables are uint16 and sum to `TOTAL`. Symbols that occur, and the escape, have at least 1; others have 0.
    """
    flat = np.asarray(counts, dtype=np.float64).reshape(-1, np.shape(counts)[-1])
    out = np.empty(flat.shape, dtype=np.uint16)
    for row, seen in zip(out, flat, strict=True):
        row[:] = _table(seen)
    return out.reshape(np.shape(counts))


def _table(seen: NDArray[np.float64]) -> NDArray[np.int64]:
    used = seen > 0
    used[-1] = True
    if used.sum() == 1:
        used[(len(seen) - 1) // 2] = True  # empty histogram: most likely all zeros
    share = np.where(used, np.maximum(seen, 1e-9), 0)
    exact = share / share.sum() * TOTAL
    table = np.where(used, np.clip(np.floor(exact), 1, TOTAL - 1), 0).astype(np.int64)
    while (short := TOTAL - int(table.sum())) != 0:
        change = 1 if short > 0 else -1
        able = used & (table + change >= 1) & (table + change < TOTAL)
        saved = share * np.log2(np.maximum(table + change, 1) / np.maximum(table, 1))
        table[int(np.where(able, saved, -np.inf).argmax())] += change
    return table


def check_indices(model: CoderModel, index: NDArray[Any], below: NDArray[Any] | None) -> tuple[Index, Index | None]:
    """Return indices as contiguous int16 for the coder; raise `FormatError` if they do not fit the model."""
    _below_or_not(model, below)
    if index.ndim != 2 or index.shape[0] != model.rows or index.shape[1] < 1:
        raise FormatError(f"indices must have the shape [{model.rows}, tokens], got {index.shape}")
    if below is not None and below.shape != index.shape:
        raise FormatError(f"indices below must have the shape {index.shape}, got {below.shape}")
    return _int16(index), None if below is None else _int16(below)


@dataclass(frozen=True)
class Quantiser:
    """Parameters of a quantiser, see `kvabr.codec.quantiser.quantise`."""

    step: float
    dead: float


def check_rows(
    model: CoderModel, rows: NDArray[np.float32], lower: Quantiser | None, keep: NDArray[np.bool_]
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Return coefficients for the coder, and a mask, -1 for tokens to code; raise like `check_indices`."""
    _below_or_not(model, lower)
    if rows.ndim != 2 or rows.shape[0] != model.rows or rows.shape[1] < 1 or keep.shape != rows.shape[1:]:
        raise FormatError(f"coefficients must have the shape [{model.rows}, tokens], got {rows.shape}")
    return np.ascontiguousarray(rows, dtype=np.float32), -keep.astype(np.int16)


def check_below(model: CoderModel, tokens: int, below: NDArray[Any] | None) -> Index | None:
    """Return the indices below for a decoder; raise like `check_indices`."""
    _below_or_not(model, below)
    if tokens < 1:
        raise FormatError(f"a group must have at least 1 token, got {tokens}")
    if below is not None and below.shape != (model.rows, tokens):
        raise FormatError(f"indices below must have the shape {(model.rows, tokens)}, got {below.shape}")
    return None if below is None else _int16(below)


class Shift(NamedTuple):
    """Difference between a group's channel means and the transform's, as coefficients."""

    rows: NDArray[np.intp]
    amounts: NDArray[np.int16]
    """Coefficients in units of a step / `FINE`, [number]."""


@dataclass(frozen=True, eq=False)
class DecodeJob:
    """A base and its chain of enhancements, to decode into a cache in one call."""

    models: Sequence[CoderModel]
    """One model per depth, base first."""
    payloads: Sequence[bytes | memoryview]
    """One payload per depth; untrusted."""
    transform: Transform
    step: float
    """Step of the last depth, in units of the norm."""
    first_token: int | None
    """Position of the first token, for rotating keys; None: not rotated."""
    out: torch.Tensor
    """[layer, K/V, head, token, dim], any float dtype, any strides. An error may leave it partly written."""
    gains: tuple[float, ...] = ()
    """Factors of decoded elements, see `Transform.scale`."""
    references: References | None = None
    mean: NDArray[np.float32] | Shift | None = None
    """[layer, K/V, head, dim]: channel means of this group, or a `Shift`; None: the transform's."""

    def __post_init__(self) -> None:
        models, rows = self.models, self.transform.structure.rows
        if not models or len(models) != len(self.payloads):
            raise FormatError(f"payloads must be one for each of {len(models)} depths, got {len(self.payloads)}")
        if [model.refines for model in models] != [False] + [True] * (len(models) - 1):
            raise FormatError("the first depth must stand alone, and all others refine the one below")
        if self.references is not None and len(self.references.place) != self.out.shape[-2]:
            raise FormatError("references must have an entry for each token of the group")
        for model in models:
            if model.rows != rows:
                raise FormatError(f"tables must be for the {rows} coefficients of the transform, got {model.rows}")
        check_cache(self.transform, self.out)
        if isinstance(self.mean, np.ndarray):
            keep(self, "mean", np.float32, *self.transform.mean.shape)


def check_cache(transform: Transform, cache: torch.Tensor) -> None:
    """Raise `FormatError` if a tensor cannot hold a cache of the transform's spec."""
    wanted = transform.structure.coded.shape(cache.shape[3] if cache.ndim == 5 else 0)
    if tuple(cache.shape) != wanted or not cache.shape[3] or not cache.is_floating_point():
        raise FormatError(f"the cache must be floats of {wanted}, got {cache.dtype} of {tuple(cache.shape)}")


def _below_or_not(model: CoderModel, below: object | None) -> None:
    if model.refines != (below is not None):
        raise FormatError("this depth " + ("needs" if model.refines else "takes no") + " indices below")


def _int16(index: NDArray[Any]) -> Index:
    if index.dtype != np.int16:
        if index.size and (int(index.min()) < -32767 or int(index.max()) > 32767):
            raise FormatError("indices must fit 16 bits; keep larger tokens exact")
        index = index.astype(np.int16)
    return np.ascontiguousarray(index)
