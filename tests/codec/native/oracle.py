"""The format in NumPy, which every native path must match bit for bit. Slow: about a second per group.

`taking` puts these functions in the place of the native coder's and of the encoder's transform, and torch in that of
`kvabr.codec.native.placing`: everything that calls them then runs here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.analysis import Analysis
from kvabr.codec.coefficients import Coefficients
from kvabr.codec.gpu.tables import lookup
from kvabr.codec.inverse import MAX_ELEMENT, Inverse
from kvabr.codec.native import coder, placing
from kvabr.codec.native.coder import ERROR_UNIT, MAX_ERROR
from kvabr.codec.native.coder_model import (
    PROBABILITY_BITS,
    TOTAL,
    CoderModel,
    DecodeJob,
    Index,
    Quantiser,
    check_below,
    check_cache,
    check_indices,
    check_rows,
    cut,
    dequantise,
    max_streams,
    usual_streams,
)
from kvabr.codec.native.references import LANES, TILE, References
from kvabr.codec.native.streams import STREAMED, payload_heads, rows_of_streams
from kvabr.codec.rope import rotate
from kvabr.codec.transform import ONE, Transform
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX
from kvabr_lab.bench.code_length import conditioned, contexts_of, flag_chance, signs_of, symbols_of

ORACLE = "oracle"
"""A path of `taking`: the functions of this module."""
PATHS = (*coder.available_paths(), ORACLE)
COUNTS = struct.Struct("<II")
"""Of a stream, in the directory: words and escapes."""
_NUMBER = struct.Struct("<I")
LOW = 1 << 16
"""States stay in the range from this to 2^32."""
_SLOT = TOTAL - 1
_EXACT_ROWS = 1 << 17
_WHOLE = np.float32(2**23)  # from here on, floats are integers
_Step = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Start and frequency of the symbols of one step."""


@contextmanager
def taking(path: str) -> Iterator[None]:
    """Use one code path everywhere, as `coder.taking` does; for `ORACLE`, this module's functions."""
    if path != ORACLE:
        with coder.taking(path):
            yield
        return
    mine = [(coder, name, globals()[name]) for name in _CODER]
    mine += [(Analysis, "analyse", analyse), (placing, "places", lambda _: False)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in mine]
    for owner, name, function in mine:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


_CODER = (
    *("encode_indices", "encode_rows", "decode_indices", "synthesise", "decode"),
    *("error_sums", "similarity"),
)


def encode_indices(
    model: CoderModel,
    index: NDArray[Any],
    below: NDArray[Any] | None = None,
    references: References | None = None,
    streams: int | None = None,
    threads: int | None = None,
) -> bytes:
    index, base = check_indices(model, index, below)
    if references is not None:
        index, base = index[:, references.order], None if base is None else base[:, references.order]
    count = streams or usual_streams(model, index.shape[1])
    made = [_encode_stream(model, rows, index, base, references) for rows in cut(model.order, count)]
    counts = np.array([[[len(words) // 2, len(escapes) // 2] for _, words, escapes in made]])
    return b"".join((payload_heads(counts).tobytes(), *(part for stream in made for part in stream)))


def _encode_stream(
    model: CoderModel, order: NDArray[np.uint32], index: Index, base: Index | None, references: References | None
) -> tuple[bytes, bytes, bytes]:
    """Code some rows, in this order; return states, words and escapes."""
    steps: list[_Step] = []
    escapes: list[NDArray[np.int16]] = []
    values, context = conditioned(index, base)
    cum = _starts(model.freqs)
    near = None if references is None else model.near
    near_cum = None if near is None else _starts(near.freqs)
    for first in range(0, index.shape[1], TILE):
        tile = slice(first, first + TILE)
        live = (values[:, tile] != 0).any(axis=1)
        chance = flag_chance(model, base, tile)
        for at in range(0, len(order), LANES):
            rows = order[at : at + LANES]
            one = chance[rows]
            steps.append((np.where(live[rows], 0, one), np.where(live[rows], one, TOTAL - one)))
        for row in order[live[order]]:
            for at in range(tile.start, min(tile.stop, index.shape[1]), LANES):
                place, freqs, starts = slice(at, min(at + LANES, tile.stop)), model.freqs, cum
                value, which = values[row, place], context[row, place]
                if near is not None and near_cum is not None and references is not None and at > tile.start:
                    under = np.zeros_like(value) if base is None else base[row, place].astype(np.int64)
                    referred = index[row, tile][references.lane[place]]
                    which, sign = near_contexts(near.bucket, referred, under)
                    value = (index[row, place].astype(np.int64) - 3 * under) * sign
                    freqs, starts = near.freqs, near_cum
                symbols, escaped = symbols_of(model, int(row), value, which, freqs)
                escapes.append(escaped)
                chosen = (model.row_class[row], which, symbols)
                steps.append((starts[chosen], freqs[chosen].astype(np.int64)))
    side = np.concatenate([np.zeros(0, np.int16), *escapes])
    states, words = _push(steps)
    return states.tobytes(), words.tobytes(), side.astype("<i2").tobytes()


def encode_rows(
    model: CoderModel,
    rows: NDArray[np.float32],
    own: Quantiser,
    lower: Quantiser | None,
    keep: NDArray[np.bool_],
    references: References | None = None,
    streams: int | None = None,
    threads: int | None = None,
) -> bytes:
    """Quantise the coefficients of one group and code the indices."""
    rows, mask = check_rows(model, rows, lower, keep)

    def indices(quantiser: Quantiser) -> Index:
        exact, dead = rows / np.float32(quantiser.step), np.float32(quantiser.dead)
        exact = (exact - exact.clip(-dead, dead)).clip(-32767, 32767)
        out: Index = np.rint(exact).astype(np.int16) & mask
        return out

    return encode_indices(model, indices(own), None if lower is None else indices(lower), references, streams)


def decode_indices(
    model: CoderModel,
    data: bytes | memoryview,
    tokens: int,
    below: NDArray[Any] | None = None,
    references: References | None = None,
) -> Index:
    """Decode the untrusted output of `encode_indices` to [row, token] int16, given any indices one depth below."""
    base = check_below(model, tokens, below)
    if references is not None and base is not None:
        base = base[:, references.order]
    out = np.zeros((model.rows, tokens), dtype=np.int16)
    parts = directory(data, model.rows, tokens)
    for order, *part in zip(cut(model.order, len(parts.at)), *(each.tolist() for each in parts), strict=True):
        _decode_stream(model, order, _Reader(data, *part), base, references, out)
    if references is not None:
        out[:, references.order] = out.copy()
    return out


def _decode_stream(
    model: CoderModel,
    order: NDArray[np.uint32],
    reader: _Reader,
    base: Index | None,
    references: References | None,
    out: Index,
) -> None:
    tokens = out.shape[1]
    tables = lookup(model.freqs)
    near = None if references is None else model.near
    near_tables = [] if near is None else lookup(near.freqs)
    for first in range(0, tokens, TILE):
        tile = slice(first, min(tokens, first + TILE))
        chance = flag_chance(model, base, tile)
        live = np.concatenate([reader.flags(chance[order[at : at + LANES]]) for at in range(0, len(order), LANES)])
        for row in order[live]:
            table, radius = tables[model.row_class[row]], int(model.radius[model.row_class[row]])
            for at in range(tile.start, tile.stop, LANES):
                step = slice(at, min(tile.stop, at + LANES))
                under = np.zeros(step.stop - at, np.int16) if base is None else base[row, step]
                which, sign = contexts_of(under), signs_of(under)
                if near is not None and references is not None and at > tile.start:
                    which, sign = near_contexts(near.bucket, out[row, tile][references.lane[step]], under)
                    table = near_tables[model.row_class[row]]
                symbols = reader.symbols(which, *table)
                values = symbols - radius
                for lane in np.flatnonzero(symbols == 2 * radius + 1):
                    values[lane] = reader.escape()
                out[row, step] = _combined(values * sign, under)
        if base is not None:
            dead = order[~live]
            out[dead, tile] = _combined(np.zeros((), np.int64), base[dead, tile])
    reader.end()


def _combined(difference: NDArray[np.int64], below: Index) -> Index:
    """Return an index from the one below and the difference from its triple, saturating like int16."""
    tripled = np.clip(3 * below.astype(np.int64), -32768, 32767)
    combined: Index = np.clip(tripled + difference, -32768, 32767).astype(np.int16)
    return combined


def near_contexts(
    bucket: NDArray[np.uint8], referred: NDArray[Any], below: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the contexts and the signs of tokens, of equal shapes; see `NearTables`."""
    r, b = referred.astype(np.int64).clip(-127, 127), below.astype(np.int64)
    sign = np.where(np.where(b == 0, r, b) < 0, -1, 1)
    if len(bucket) == 1:
        return bucket[0, np.minimum(np.abs(r), 15)].astype(np.int64), sign
    apart = (r * sign - 3 * np.minimum(np.abs(b), 42)).clip(-8, 7)
    return bucket[np.minimum(np.abs(b), 2), apart + 8].astype(np.int64), sign


def synthesise(
    transform: Transform,
    z: NDArray[np.int16],
    step: float,
    first_token: int | None,
    out: torch.Tensor,
    gains: tuple[float, ...] = (),
    mean: NDArray[np.float32] | None = None,
) -> None:
    """Turn coefficients, [row, token] int16 from `dequantise`, into a cache; see `DecodeJob` for the rest."""
    check_cache(transform, out)
    structure, spec = transform.structure, transform.structure.coded
    mean = transform.mean.astype(np.float32) if mean is None else mean
    tokens, scale = z.shape[1], transform.scale(step, gains)
    blocks, width = structure.per_layer, structure.width
    for number, (stack, matrix) in enumerate(zip(structure.stacks, transform.stack, strict=True)):
        count, kept = len(stack.layers), stack.kept
        parts = np.empty((count, blocks, width, tokens), dtype=np.int16)
        sums = _wrapped(_product(matrix.expanded, z[structure.stack_rows(number)]) + ONE // 2) >> 14
        parts[:, :, :kept] = np.clip(sums, -32768, 32767).reshape(count, blocks, kept, tokens)
        parts[:, :, kept:] = z[structure.trailing_rows(number)].reshape(count, blocks, width - kept, tokens)
        inverse = None if transform.block is None else transform.block.expanded[structure.blocks_of(stack)]
        sums = parts.reshape(-1, width, tokens)
        sums = sums.astype(np.int32) * np.int32(ONE) if inverse is None else _wrapped(_product(inverse, sums))
        elements = sums.reshape(count, spec.kv_heads, structure.dim, tokens).transpose(0, 1, 3, 2).astype(np.float32)
        which = slice(stack.first, stack.last), stack.kind
        elements = elements * scale[which][:, None, None, None] + mean[which][:, :, None]
        values = torch.from_numpy(elements)
        if stack.kind == 0:
            values = rotate(values, spec.rope, first_token)
        if out.dtype == torch.float16:
            values = values.clamp(-FP16_MAX, FP16_MAX)
        out[which] = values


def error_sums(
    rows: NDArray[np.float32],
    which: NDArray[np.intp],
    gains: NDArray[np.float32],
    quantiser: Quantiser,
    coded: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the sum over tokens of the decoding errors in some rows, in units of step / `ERROR_UNIT`."""
    exact, dead = rows[which][:, coded] / np.float32(quantiser.step), np.float32(quantiser.dead)
    exact = exact.clip(-32767, 32767)
    error = exact - gains[:, None] * np.rint(exact - exact.clip(-dead, dead))
    units = np.rint(error.clip(-MAX_ERROR, MAX_ERROR) * np.float32(ERROR_UNIT))
    sums: NDArray[np.int64] = units.astype(np.int64).sum(axis=1)
    return sums


def similarity(
    rows: NDArray[np.float32], which: NDArray[np.intp], tokens: NDArray[np.intp], step: float, most: int = 0
) -> NDArray[np.int32]:
    """Return the similarity of tokens: the sums over some rows of the products of every two tokens' numbers."""
    with np.errstate(over="ignore"):
        exact = (rows[which][:, tokens] / np.float32(step)).clip(-_WHOLE, _WHOLE)
    number = np.rint(exact).clip(-most, most) if most else np.rint(16 * (exact - np.rint(exact)))
    # Products of these integers are at most 64, so float32 holds the sums of that many rows.
    parts = [number[first : first + _EXACT_ROWS] for first in range(0, len(number), _EXACT_ROWS)]
    sums = np.zeros((len(tokens), len(tokens)), np.int32)
    for part in parts:
        sums += (part.T @ part).astype(np.int32)
    return sums


def decode(job: DecodeJob, threads: int | None = None) -> None:
    """Decode a base and the enhancements above it into a cache; raise a `FormatError` if a payload does not fit."""
    index: Index | None = None
    for model, payload in zip(job.models, job.payloads, strict=True):
        index = decode_indices(model, payload, job.out.shape[3], index, job.references)
    assert index is not None  # a job has at least one depth
    z = dequantise(job.models[-1], index)
    synthesise(job.transform, z, job.step, job.first_token, job.out, job.gains, coder.mean_of(job))


class Directory(NamedTuple):
    """The streams of a payload, arrays [stream] of int64."""

    at: NDArray[np.int64]
    """Offset of its states, in bytes; words and escapes follow."""
    words: NDArray[np.int64]
    escapes: NDArray[np.int64]


def directory(data: bytes | memoryview, rows: int, tokens: int) -> Directory:
    """Return the streams of an untrusted payload; raise a `FormatError` unless they fill it exactly."""
    size = memoryview(data).nbytes
    number = _NUMBER.unpack_from(data)[0] if size >= COUNTS.size else 0
    count, begin = (1, 0) if number < STREAMED else (number - STREAMED, _NUMBER.size)
    good = size >= begin + COUNTS.size * count and (not begin or 2 <= count <= max_streams(rows))
    if good:
        words, escapes = np.frombuffer(data, "<u4", 2 * count, begin).astype(np.int64).reshape(-1, 2).T
        sizes = 4 * LANES + 2 * words + 2 * escapes
        ends = begin + COUNTS.size * count + np.cumsum(sizes)
        good = int(ends[-1]) == size and bool((escapes <= rows_of_streams(rows, count) * tokens).all())
    if not good:
        raise FormatError(f"entropy coded part: {size} bytes do not hold the streams that it says; truncated?")
    return Directory(ends - sizes, words, escapes)


def _starts(freqs: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return the sum of the frequencies before each symbol, [class, context, symbol]."""
    wide = freqs.astype(np.int64)
    return np.cumsum(wide, axis=2) - wide


def _push(steps: list[_Step]) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Encode the steps in reverse, so that a decoder reads them forwards."""
    states = np.full(LANES, LOW, dtype=np.int64)
    pieces: list[NDArray[np.uint16]] = []
    for start, freq in reversed(steps):
        used = states[: len(freq)]
        full = used >= freq << (32 - PROBABILITY_BITS)
        pieces.append((used[full] & 0xFFFF).astype("<u2"))
        used[full] >>= 16
        used[:] = (used // freq << PROBABILITY_BITS) + used % freq + start
    return states.astype("<u4"), np.concatenate([np.zeros(0, "<u2"), *reversed(pieces)])


class _Reader:
    """64 rANS decoders over a stream, and the escapes after it."""

    def __init__(self, data: bytes | memoryview, at: int, words: int, escapes: int) -> None:
        data = memoryview(data)
        self._states = np.frombuffer(data, "<u4", LANES, at).astype(np.int64)
        self._words = np.frombuffer(data, "<u2", words, at + 4 * LANES).astype(np.int64)
        self._escapes = np.frombuffer(data, "<i2", escapes, at + 4 * LANES + 2 * words)
        self._word = self._escape = 0

    def flags(self, chance: NDArray[np.int64]) -> NDArray[np.bool_]:
        states = self._states[: len(chance)]
        slot = states & _SLOT
        out: NDArray[np.bool_] = slot < chance
        self._advance(states, np.where(out, chance, TOTAL - chance), np.where(out, slot, slot - chance))
        return out

    def symbols(
        self,
        context: NDArray[np.int64],
        symbol: NDArray[np.int64],
        freq: NDArray[np.int64],
        place: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        states = self._states[: len(context)]
        slot = states & _SLOT
        found: NDArray[np.int64] = symbol[context, slot]
        self._advance(states, freq[context, slot], place[context, slot])
        return found

    def escape(self) -> int:
        if self._escape == len(self._escapes):
            raise FormatError("entropy coded part: more escapes than were sent; corrupt, or of another profile")
        self._escape += 1
        value = int(self._escapes[self._escape - 1])
        if value == -32768:
            raise FormatError("entropy coded part: an escape is invalid; corrupt")
        return value

    def end(self) -> None:
        """Raise unless everything is used up."""
        left = self._word != len(self._words) or self._escape != len(self._escapes)
        if left or (self._states != LOW).any():
            raise FormatError("entropy coded part: it has the wrong length; corrupt, or of another profile")

    def _advance(self, states: NDArray[np.int64], freq: NDArray[np.int64], place: NDArray[np.int64]) -> None:
        states[:] = freq * (states >> PROBABILITY_BITS) + place
        low = states < LOW
        count = int(low.sum())
        if self._word + count > len(self._words):
            raise FormatError("entropy coded part: it ends too early; truncated, or of another profile")
        states[low] = states[low] << 16 | self._words[self._word : self._word + count]
        self._word += count


def _product(matrix: NDArray[np.int16], vectors: NDArray[np.int16]) -> NDArray[np.int64]:
    """Multiply in integers: float64 holds every partial sum exactly (at most 2^14 terms below 2^30)."""
    product: NDArray[np.float64] = matrix.astype(np.float64) @ vectors.astype(np.float64)
    return product.astype(np.int64)


def _wrapped(sums: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the low 32 bits, as an int32 sum would."""
    low: NDArray[np.int32] = sums.astype(np.uint64).astype(np.uint32).view(np.int32)
    return low


def analyse(it: Analysis, group: torch.Tensor, first_token: int | None) -> Coefficients:
    check_cache(it.transform, group)
    bare = group.detach().cpu().float().clone()
    bare[:, 0] = rotate(bare[:, 0], it.structure.coded.rope, first_token, undo=True)
    channels, structure = it.centred(bare), it.structure
    outlying = it.outlying(channels)
    scale = it._scale.reshape(-1, 1).repeat(structure.per_layer, axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        elements = channels.mul_(torch.from_numpy(scale)[:, None]).numpy()
    elements = np.where(elements < MAX_ELEMENT, elements, np.float32(MAX_ELEMENT))  # and what is no number
    elements = np.maximum(elements, np.float32(-MAX_ELEMENT))
    blocks, stacks = it._inverses
    tokens = elements.shape[2]
    rows, largest = np.empty((structure.rows, tokens), np.float32), np.zeros((3, tokens), np.float32)
    largest[0] = np.abs(elements).max(axis=(0, 1))
    for number, stack in enumerate(structure.stacks):
        which, kept = structure.blocks_of(stack), stack.kept
        parts = np.stack([times(blocks[each], elements[each]) if blocks else elements[each] for each in which])
        if kept:
            across = parts[:, :kept].reshape(-1, tokens)
            largest[1] = np.maximum(largest[1], np.abs(across).max(axis=0))
            rows[structure.stack_rows(number)] = times(stacks[number], across)
        rows[structure.trailing_rows(number)] = parts[:, kept:].reshape(-1, tokens)
    largest[2] = np.abs(rows).max(axis=0)
    return it._found(torch.from_numpy(rows), largest, outlying)


def times(inverse: Inverse, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply vectors, [component, token] within `MAX_ELEMENT`; return [row, token]."""
    whole, exponent = words(inverse, vectors)
    sums = inverse.entries.astype(np.float64) @ whole.astype(np.float64)  # exact: below 2**53
    out: NDArray[np.float32] = sums.astype(np.float32) * _power(254 - exponent) * inverse.rows[:, None]
    return out


def words(inverse: Inverse, vectors: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return vectors as whole numbers of 16 bits, and the exponent of each one's scale as in float32's bits."""
    even = vectors * inverse.columns[:, None]
    exponent = np.minimum(_SCALED - (np.abs(even).max(axis=0).view(np.int32) >> 23), _FINEST)
    exponent = exponent - _halvings(_rounded(even, exponent))
    return _rounded(even, exponent), exponent


_SCALED = 268
"""Exponent, as in float32's bits, of a largest component and of its scale together: scaled, it is 2**14 or more."""
_FINEST = 227
"""Exponent of the largest scale."""
_ENERGY_BITS = 13
"""Squares are summed in units of 2 to the power of this."""
_LENGTH = 65400**2 >> _ENERGY_BITS
"""Energy of the longest vector; rounding may add 136 to its length."""
_MAX_HALVINGS = 6


def _power(exponent: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the powers of two with these exponents, as in float32's bits."""
    return (exponent.astype(np.int32) << 23).view(np.float32)


def _rounded(even: NDArray[np.float32], exponent: NDArray[np.int32]) -> NDArray[np.float32]:
    out: NDArray[np.float32] = np.rint(even * _power(exponent)).clip(-32767.0, 32767.0)
    return out


def _halvings(whole: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return how often each vector of whole numbers, [component, token], must be halved to be short enough."""
    squares = np.pad(whole.astype(np.int64) ** 2, ((0, len(whole) % 2), (0, 0)))
    # Two by two, as processors multiply; what rounding down leaves out is at most one for each pair.
    energy = ((squares[::2] + squares[1::2]) >> _ENERGY_BITS).sum(axis=0) + len(squares) // 2
    steps = _LENGTH << 2 * np.arange(_MAX_HALVINGS)
    out: NDArray[np.int32] = (energy >= steps[:, None]).sum(axis=0).astype(np.int32)
    return out
