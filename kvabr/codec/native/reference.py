"""The format in NumPy, which every native path must match bit for bit. Slow: about a second per group.

    words 4 | escapes 4 | 64 states 4 | words 2 ... | escapes 2 ...          (little-endian)

or, cut into n streams that are decoded independently of each other,

    n + 0xFFFF0000 4 | words 4 | escapes 4 of each stream | of each: 64 states 4 | words 2 ... | escapes 2 ...

In coding order, stream s has the runs s, s + n, s + 2n ... of 64 rows each, of which the last may be shorter. So all
streams are about as long, and neighbours in one share tables. Each has at least one whole run. What follows is the same
for each of them, and for a payload of one.

The words are those of 64 interleaved rANS coders (Duda, 2013; Giesen, 2014) with 32-bit states, 12-bit probabilities
and 16-bit words. A step decodes up to 64 symbols, one per lane from the first lane on; then the lanes whose state fell
below 2^16 take one word each, in order. A group is cut into tiles of 128 tokens. Each tile starts with the flags of all
rows in coding order, 64 per step; then, row by row, the indices of the rows whose flag is set, 64 tokens per step.
With references (`kvabr.codec.native.references`) the tokens of a tile are in another order, and those of the second
step have other tables, which what they refer to selects (`NearTables`).
Escaped indices follow at the end. States start (for the decoder: end) at 2^16.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native.coder_model import (
    PROBABILITY_BITS,
    TOTAL,
    CoderModel,
    DecodeJob,
    Index,
    Quantiser,
    Shift,
    check_below,
    check_indices,
    check_rows,
    cut,
    dequantise,
    most_streams,
    usual_streams,
)
from kvabr.codec.native.references import LANES, TILE, References
from kvabr.codec.rope import rotate
from kvabr.codec.transform import ONE, Transform
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX

COUNTS = struct.Struct("<II")
"""Of a stream, in the directory: words and escapes."""
STREAMED = 0xFFFF0000
"""Added to the number of streams, which stands before the directory of more than one."""
_NUMBER = struct.Struct("<I")
LOW = 1 << 16
"""States stay in the range from this to 2^32."""
_SLOT = TOTAL - 1
_Step = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Start and frequency of the symbols of one step."""


def encode_indices(
    model: CoderModel,
    index: NDArray[Any],
    below: NDArray[Any] | None = None,
    references: References | None = None,
    streams: int | None = None,
) -> bytes:
    """Code the indices of one group.

    Args:
        model: the tables.
        index: [row, token], integers within 16 bits: the indices at this depth, not their difference from below.
        below: [row, token]: the indices one depth below, if the model refines one; those above must be in reach.
        references: which tokens refer to others; those of the depth below.
        streams: how many to cut the rows into, see `most_streams`; None: as many as `usual_streams` says.
    """
    index, base = check_indices(model, index, below)
    if references is not None:
        index, base = index[:, references.order], None if base is None else base[:, references.order]
    count = streams or usual_streams(model, index.shape[1])
    made = [_encode_stream(model, rows, index, base, references) for rows in cut(model.order, count)]
    counts = np.array([[[len(words) // 2, len(escapes) // 2] for _, words, escapes in made]])
    return b"".join((payload_heads(counts).tobytes(), *(part for stream in made for part in stream)))


def payload_heads(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return what precedes the streams in payloads, [group, byte], from words and escapes, [group, stream, 2]."""
    groups, streams = counts.shape[:2]
    numbers = counts.reshape(groups, -1)
    if streams > 1:
        numbers = np.column_stack((np.full(groups, STREAMED + streams), numbers))
    return np.ascontiguousarray(numbers).astype("<u4").view(np.uint8)


def _encode_stream(
    model: CoderModel, order: NDArray[np.uint32], index: Index, base: Index | None, references: References | None
) -> tuple[bytes, bytes, bytes]:
    """Code some rows, in this order; return states, words and escapes."""
    steps: list[_Step] = []
    escapes: list[NDArray[np.int16]] = []
    values, context = _conditioned(index, base)
    cum = _starts(model.freqs)
    near = None if references is None else model.near
    near_cum = None if near is None else _starts(near.freqs)
    for first in range(0, index.shape[1], TILE):
        tile = slice(first, first + TILE)
        live = (values[:, tile] != 0).any(axis=1)
        chance = _flag_chance(model, base, tile)
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
                symbols, escaped = _symbols(model, int(row), value, which, freqs)
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
) -> bytes:
    """Quantise the coefficients of one group and code the indices.

    Args:
        model: the tables.
        rows: [row, token] float32, finite.
        own: quantiser of this depth.
        lower: quantiser of the depth below, if the model refines one; its payload was made from the same rows.
        keep: [token]: False where all indices, of both depths, are 0.
        references: see `encode_indices`.
        streams: see `encode_indices`.
    """
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
    """Decode some rows, in this order."""
    tokens = out.shape[1]
    tables = lookup(model.freqs)
    near = None if references is None else model.near
    near_tables = [] if near is None else lookup(near.freqs)
    for first in range(0, tokens, TILE):
        tile = slice(first, min(tokens, first + TILE))
        chance = _flag_chance(model, base, tile)
        live = np.concatenate([reader.flags(chance[order[at : at + LANES]]) for at in range(0, len(order), LANES)])
        for row in order[live]:
            table, radius = tables[model.row_class[row]], int(model.radius[model.row_class[row]])
            for at in range(tile.start, tile.stop, LANES):
                step = slice(at, min(tile.stop, at + LANES))
                under = np.zeros(step.stop - at, np.int16) if base is None else base[row, step]
                which, sign = _context(under), _sign(under)
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


def near_contexts(
    bucket: NDArray[np.uint8], referred: NDArray[Any], below: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the contexts and the signs of tokens, of equal shapes; see `NearTables`.

    Args:
        bucket: `NearTables.bucket`.
        referred: the indices that they refer to.
        below: the indices below; zeros without any.
    """
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


ERROR_UNIT = 1024
"""Errors are added as integers, in units of a step over this: sums are exact, in any order."""
_EXACT_ROWS = 1 << 17
_WHOLE = np.float32(2**23)  # from here on, floats are integers
MOST_ERROR = np.float32(4095)


def error_sums(
    rows: NDArray[np.float32],
    which: NDArray[np.intp],
    gains: NDArray[np.float32],
    quantiser: Quantiser,
    coded: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the sum over tokens of what decoding takes from some rows, in units of step / `ERROR_UNIT`.

    Args:
        rows: coefficients, [row, token].
        which: the rows, ascending.
        gains: what their decoded indices are multiplied with.
        quantiser: what rounds them.
        coded: [token]: False where tokens do not count.
    """
    exact, dead = rows[which][:, coded] / np.float32(quantiser.step), np.float32(quantiser.dead)
    exact = exact.clip(-32767, 32767)
    error = exact - gains[:, None] * np.rint(exact - exact.clip(-dead, dead))
    units = np.rint(error.clip(-MOST_ERROR, MOST_ERROR) * np.float32(ERROR_UNIT))
    sums: NDArray[np.int64] = units.astype(np.int64).sum(axis=1)
    return sums


def similarity(
    rows: NDArray[np.float32], which: NDArray[np.intp], tokens: NDArray[np.intp], step: float, most: int = 0
) -> NDArray[np.int32]:
    """Return how alike tokens are in some rows: the sums over rows of the products of each two tokens' numbers.

    Args:
        rows: coefficients, [row, token] float32.
        which: the rows, fewer than 2^20.
        tokens: the tokens, up to `TILE`.
        step: of the quantiser that makes them numbers.
        most: numbers are indices, cut to this, at most 8; 0: the errors of rounding, in sixteenths of the step.

    Returns:
        [token, token], the same on every path.
    """
    with np.errstate(over="ignore"):
        exact = (rows[which][:, tokens] / np.float32(step)).clip(-_WHOLE, _WHOLE)
    number = np.rint(exact).clip(-most, most) if most else np.rint(16 * (exact - np.rint(exact)))
    # Products of these integers are at most 64, so float32 holds the sums of that many rows.
    parts = [number[first : first + _EXACT_ROWS] for first in range(0, len(number), _EXACT_ROWS)]
    sums = np.zeros((len(tokens), len(tokens)), np.int32)
    for part in parts:
        sums += (part.T @ part).astype(np.int32)
    return sums


def decode(job: DecodeJob) -> None:
    """Decode a base and the enhancements above it into a cache; raise a `FormatError` if a payload does not fit."""
    index: Index | None = None
    for model, payload in zip(job.models, job.payloads, strict=True):
        index = decode_indices(model, payload, job.out.shape[3], index, job.references)
    assert index is not None  # noqa: S101  # a job has at least one depth
    z = dequantise(job.models[-1], index)
    assert not isinstance(job.mean, Shift)  # noqa: S101  # `coder.mean_of`
    synthesise(job.transform, z, job.step, job.first_token, job.out, job.gains, job.mean)


def has_streams(data: bytes | memoryview) -> bool:
    """Return whether a payload says that it is cut into several streams."""
    return memoryview(data).nbytes >= _NUMBER.size and bool(_NUMBER.unpack_from(data)[0] >= STREAMED)


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
    good = size >= begin + COUNTS.size * count and (not begin or 2 <= count <= most_streams(rows))
    if good:
        words, escapes = np.frombuffer(data, "<u4", 2 * count, begin).astype(np.int64).reshape(-1, 2).T
        sizes = 4 * LANES + 2 * words + 2 * escapes
        ends = begin + COUNTS.size * count + np.cumsum(sizes)
        good = int(ends[-1]) == size and bool((escapes <= rows_of_streams(rows, count) * tokens).all())
    if not good:
        raise FormatError(f"entropy coded part: {size} bytes do not hold the streams that it says; truncated?")
    return Directory(ends - sizes, words, escapes)


def rows_of_streams(rows: int, streams: int) -> NDArray[np.int64]:
    """Return how many rows each stream has; see `cut`."""
    runs, rest = divmod(rows, LANES)
    out = np.full(streams, LANES * (runs // streams))
    out[: runs % streams] += LANES
    out[runs % streams] += rest
    return out


_ALIGN = 16


def gathered_places(payloads: Sequence[bytes | memoryview]) -> list[int]:
    """Return where `coder.gather` puts each payload, and, last, the room that it needs."""
    sizes = (-(-memoryview(payload).nbytes // _ALIGN) * _ALIGN for payload in payloads)
    return list(accumulate(sizes, initial=0))


def ideal_bits(model: CoderModel, index: NDArray[Any], below: NDArray[Any] | None = None) -> float:
    """Return the code length of a group's indices under the model's own tables, with flags and 16 bits per escape."""
    index, base = check_indices(model, index, below)
    values, context = _conditioned(index, base)
    cost = -np.log2(np.maximum(model.freqs, 1) / TOTAL)
    bits = 0.0
    for first in range(0, index.shape[1], TILE):
        tile = slice(first, first + TILE)
        live = (values[:, tile] != 0).any(axis=1)
        chance = _flag_chance(model, base, tile)
        bits -= float(np.log2(np.where(live, chance, TOTAL - chance) / TOTAL).sum())
        for row in np.flatnonzero(live):
            symbols, escaped = _symbols(model, int(row), values[row, tile], context[row, tile], model.freqs)
            bits += float(cost[model.row_class[row], context[row, tile], symbols].sum()) + 16 * len(escaped)
    return bits


def _conditioned(index: Index, below: Index | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the coded values and their contexts, both [row, token]."""
    values = index.astype(np.int64)
    farthest = 0
    if below is not None:
        values -= 3 * below.astype(np.int64)
        farthest = int(np.abs(below.astype(np.int64)).max())
    if int(np.abs(values).max()) > 32767 or farthest > 32767 // 3:
        raise FormatError("an index is beyond 16 bits, or cannot be reached from the one below; keep such tokens exact")
    if below is None:
        return values, np.zeros(index.shape, dtype=np.int64)
    return values * _sign(below), _context(below)


def _context(below: Index) -> NDArray[np.int64]:
    context: NDArray[np.int64] = np.minimum(np.abs(below.astype(np.int64)), 2)
    return context


def _sign(below: Index) -> NDArray[np.int64]:
    """Return the sign of the index below: values are coded as if it was not negative."""
    return np.where(below < 0, -1, 1)


def _combined(difference: NDArray[np.int64], below: Index) -> Index:
    """Return an index from the one below and the difference from its triple, saturating like int16."""
    tripled = np.clip(3 * below.astype(np.int64), -32768, 32767)
    combined: Index = np.clip(tripled + difference, -32768, 32767).astype(np.int16)
    return combined


def _flag_chance(model: CoderModel, below: Index | None, tile: slice) -> NDArray[np.int64]:
    """Return the probability of a set flag, [row]."""
    chance: NDArray[np.int64] = model.flag_freq[0].astype(np.int64)
    if below is not None:
        chance = np.where((below[:, tile] != 0).any(axis=1), model.flag_freq[1], chance)
    return chance


def _starts(freqs: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return the sum of the frequencies before each symbol, [class, context, symbol]."""
    wide = freqs.astype(np.int64)
    return np.cumsum(wide, axis=2) - wide


def _symbols(
    model: CoderModel, row: int, values: NDArray[np.int64], context: NDArray[np.int64], freqs: NDArray[np.uint16]
) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """Return the symbols of one row, and the values that escape."""
    which = model.row_class[row]
    radius = int(model.radius[which])
    symbols = np.where(np.abs(values) <= radius, values + radius, 2 * radius + 1)
    symbols[freqs[which, context, symbols] == 0] = 2 * radius + 1
    return symbols, values[symbols == 2 * radius + 1].astype(np.int16)


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


def lookup(freqs: NDArray[np.uint16]) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Return symbol, frequency, and position in the symbol, for each class [context, slot]."""
    out = []
    for own, starts in zip(freqs.astype(np.int64), _starts(freqs), strict=True):
        symbol = np.stack([np.repeat(np.arange(own.shape[1]), each) for each in own])
        place = np.arange(TOTAL) - np.take_along_axis(starts, symbol, axis=1)
        out.append((symbol, np.take_along_axis(own, symbol, axis=1), place))
    return out


class _Reader:
    """64 rANS decoders over a stream, and the escapes after it."""

    def __init__(self, data: bytes | memoryview, at: int, words: int, escapes: int) -> None:
        data = memoryview(data)
        self._states = np.frombuffer(data, "<u4", LANES, at).astype(np.int64)
        self._words = np.frombuffer(data, "<u2", words, at + 4 * LANES).astype(np.int64)
        self._escapes = np.frombuffer(data, "<i2", escapes, at + 4 * LANES + 2 * words)
        self._word = self._escape = 0

    def flags(self, chance: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Decode one flag per lane."""
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
        """Decode one symbol per lane."""
        states = self._states[: len(context)]
        slot = states & _SLOT
        found: NDArray[np.int64] = symbol[context, slot]
        self._advance(states, freq[context, slot], place[context, slot])
        return found

    def escape(self) -> int:
        """Return the next escaped value."""
        if self._escape == len(self._escapes):
            raise FormatError("entropy coded part: more escapes than were sent; corrupt, or of another profile")
        self._escape += 1
        value = int(self._escapes[self._escape - 1])
        if value == -32768:
            raise FormatError("entropy coded part: an escape that no encoder writes; corrupt")
        return value

    def end(self) -> None:
        """Raise unless everything is used up."""
        left = self._word != len(self._words) or self._escape != len(self._escapes)
        if left or (self._states != LOW).any():
            raise FormatError("entropy coded part: it does not end where it should; corrupt, or of another profile")

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
