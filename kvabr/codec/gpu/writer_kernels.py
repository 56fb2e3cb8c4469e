# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0915  # Triton reads annotations; its constants are in capitals
"""Kernels to quantise and entropy encode, with the same bytes as `kvabr.codec.native.coder.encode_rows`.

Importing this module needs Triton. The coder encodes the last symbol first. So each program writes words and escapes
from the end of its own buffer towards the start.
"""

import triton
import triton.language as tl

from kvabr.codec.gpu.kernels import ROW_BITS, ROW_MASK, _ranks

MAGIC: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds magnitudes below 2^22 to the nearest whole number, halves to even."""
FARTHEST_BELOW: tl.constexpr = tl.constexpr(32767 // 3)
ESCAPES: tl.constexpr = tl.constexpr(1 << 24)
"""Flag of an entry for escaped indices. The lower bits are the start (12 bits) and the frequency."""


@triton.jit
def _quantised(value, step, dead, keep):
    exact = tl.div_rn(value, step)
    exact = exact - tl.minimum(tl.maximum(exact, -dead), dead)
    exact = tl.minimum(tl.maximum(exact, -32767.0), 32767.0)
    return tl.where(keep, ((exact + MAGIC) - MAGIC).to(tl.int32), 0)


@triton.jit
def quantise(
    rows_of,  # int64 [group]: addresses of float32 [row, token]
    keep_of,  # int8 [group, token]: nonzero if coded
    token_of,  # int32 [group, place]: token; negative: none
    steps,  # float32 [4]: step and dead zone of this depth and the one below
    index,  # int16 [group, row, place], set
    below,  # int16 [group, row, place], set: indices below
    marks,  # int8 [group, tile, row], set: 1 if a symbol is coded, plus 2 if an index below is nonzero
    wrong,  # int8 [group, tile, row], set: nonzero if an index is out of range
    rows,
    row_stride,  # of `rows_of`
    stride,  # of `index`: tokens in whole tiles
    REFINES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantise coefficients, in the order of places; a program handles a few rows of a tile."""
    group = tl.program_id(2).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tile * 128 + tl.arange(0, 128)
    token = tl.load(token_of + group * stride + place)
    there = (row < rows)[:, None] & (token >= 0)[None, :]
    keep = tl.load(keep_of + group * stride + token, mask=token >= 0, other=0) != 0
    source = tl.load(rows_of + group).to(tl.pointer_type(tl.float32))
    value = tl.load(source + row.to(tl.int64)[:, None] * row_stride + token[None, :], mask=there, other=0.0)
    own = _quantised(value, tl.load(steps), tl.load(steps + 1), keep[None, :])
    at = (group * rows + row.to(tl.int64))[:, None] * stride + place[None, :]
    tl.store(index + at, own.to(tl.int16), mask=(row < rows)[:, None])
    mark = tl.max((own != 0).to(tl.int32), 1)
    bad = tl.zeros((ROWS,), tl.int32)
    if REFINES:
        lower = _quantised(value, tl.load(steps + 2), tl.load(steps + 3), keep[None, :])
        tl.store(below + at, lower.to(tl.int16), mask=(row < rows)[:, None])
        change = own - 3 * lower
        mark = tl.max((change != 0).to(tl.int32), 1) + 2 * tl.max((lower != 0).to(tl.int32), 1)
        bad = tl.max(((tl.abs(change) > 32767) | (tl.abs(lower) > FARTHEST_BELOW)).to(tl.int32), 1)
    at = (group * (stride // 128) + tile) * rows + row
    tl.store(marks + at, mark.to(tl.int8), mask=row < rows)
    tl.store(wrong + at, bad.to(tl.int8), mask=row < rows)


@triton.jit
def _push(state, entry, active, lanes, words, word, VOTES: tl.constexpr):
    freq = tl.where(active, (entry >> 12) & 4095, 1).to(tl.uint32)
    full = active & (state >= (freq << 20))
    before, total = _ranks(full, lanes, VOTES)
    word -= total
    tl.store(words + word + before, (state & 65535).to(tl.int16), mask=full)
    state = tl.where(full, state >> 16, state)
    pushed = ((state // freq) << 12) + state % freq + (entry & 4095).to(tl.uint32)
    return tl.where(active, pushed, state), word


@triton.jit
def write_rows(
    index,
    below,
    marks,  # see `quantise`
    tokens_of,
    coding_order,
    chances,
    radius_of,  # int32 [class]
    entries,  # int32 [class, context, symbol]: start, frequency << 12, `ESCAPES`; then near tables
    bucket,
    refers,
    lane_of,
    listed,  # int32 [program, own]: scratch
    words,  # int16 [program, most], filled from the end
    escapes,  # int16 [program, most], filled from the end
    states,  # int32 [program, lane], set
    ends,  # int64 [program, 2], set: start of words and escapes
    streams,
    rows,
    own,  # maximum rows of a stream
    stride,
    width,  # symbols of a table
    most,
    near_first,
    near_count,
    REFINES: tl.constexpr,
    NEAR: tl.constexpr,
    VOTES: tl.constexpr,
):
    """Entropy encode one depth; a program handles one stream of a group. See `quantise`, `kernels.read_rows`."""
    program = tl.program_id(0).to(tl.int64)
    group = program // streams
    stream = (program % streams).to(tl.int32)
    lanes = tl.arange(0, 64)
    tokens = tl.load(tokens_of + group)
    index += group * rows * stride
    below += group * rows * stride
    marks += group * (stride // 128) * rows
    listed += program * own
    words += program * most
    escapes += program * most
    lane_of += group * stride
    referring = tl.load(refers + group)
    word = tl.zeros((64,), tl.int32) + most
    escape = tl.zeros((64,), tl.int32) + most
    state = tl.zeros((64,), tl.uint32) + 65536
    tiles = tl.cdiv(tokens, 128)
    contexts: tl.constexpr = 3 if REFINES else 1
    runs = (tl.cdiv(rows, 64) - stream + streams - 1) // streams

    for back in range(tiles):
        tile = tiles - 1 - back
        first = tile * 128
        live = tl.zeros((64,), tl.int32)
        for run in range(runs):
            which = (run * streams + stream) * 64 + lanes
            code = tl.load(coding_order + which, mask=which < rows, other=0)
            mark = tl.load(marks + tile * rows + (code & ROW_MASK), mask=which < rows, other=0).to(tl.int32)
            before, count = _ranks((mark & 1) != 0, lanes, VOTES)
            tl.store(listed + live + before, code, mask=(mark & 1) != 0)
            live += count
        tl.debug_barrier()  # other threads read the list

        lane = lanes
        if NEAR:
            there = first + 64 + lanes < tokens
            lane = tl.load(lane_of + first + 64 + lanes, mask=there, other=0).to(tl.int32) & 63
        more = (tl.minimum(tokens - first, 128) + 63) // 64 - 1  # 1 if a row takes a second step
        units = tl.max(live, 0) << more
        for step in range(units):
            unit = units - 1 - step
            code = tl.load(listed + (unit >> more))
            half = unit & more
            place = first + half * 64 + lanes
            active = place < tokens
            row = (code & ROW_MASK).to(tl.int64) * stride
            table = code >> ROW_BITS
            own_index = tl.load(index + row + place, mask=active, other=0).to(tl.int32)
            lower = tl.zeros((64,), tl.int32)
            if REFINES:
                lower = tl.load(below + row + place, mask=active, other=0).to(tl.int32)
            context = tl.minimum(tl.abs(lower), 2)
            at = (table * contexts + context) * width
            minus = lower < 0
            if NEAR:
                near = (referring != 0) & (half == 1)
                there = place < tl.where(near, tokens, 0)
                referred = tl.load(index + row + first + lane, mask=there, other=0).to(tl.int32)
                referred = tl.minimum(tl.maximum(referred, -127), 127)
                turned = tl.where(lower == 0, referred < 0, minus)
                which = tl.where(turned, -referred, referred)
                if REFINES:
                    apart = which - 3 * tl.minimum(tl.abs(lower), 42)
                    which = tl.minimum(tl.maximum(apart, -8), 7) + 8 + context * 16
                else:
                    which = tl.minimum(which, 15)
                which = table * near_count + tl.load(bucket + which)
                at = tl.where(near, near_first + which * width, at)
                minus = tl.where(near, turned, minus)
            value = own_index - 3 * lower
            value = tl.where(minus, -value, value)
            radius = tl.load(radius_of + table)
            symbol = tl.where(tl.abs(value) <= radius, value + radius, 2 * radius + 1)
            entry = tl.load(entries + at + symbol, mask=active, other=0)
            far = active & ((entry & ESCAPES) != 0)
            before, count = _ranks(far, lanes, VOTES)
            escape -= count
            tl.store(escapes + escape + before, value.to(tl.int16), mask=far)
            state, word = _push(state, entry, active, lanes, words, word, VOTES)

        for step in range(runs):
            which = ((runs - 1 - step) * streams + stream) * 64 + lanes
            there = which < rows
            code = tl.load(coding_order + which, mask=there, other=0)
            mark = tl.load(marks + tile * rows + (code & ROW_MASK), mask=there, other=0).to(tl.int32)
            chance = tl.load(chances + which, mask=there, other=1)
            if REFINES:
                chance = tl.where(mark >= 2, tl.load(chances + rows + which, mask=there, other=1), chance)
            entry = tl.where((mark & 1) != 0, chance << 12, ((4096 - chance) << 12) | chance)
            state, word = _push(state, entry, there, lanes, words, word, VOTES)
        tl.debug_barrier()  # the next tile overwrites the list

    tl.store(states + program * 64 + lanes, state.to(tl.int32, bitcast=True))
    tl.store(ends + program * 2, tl.max(word, 0).to(tl.int64))
    tl.store(ends + program * 2 + 1, tl.max(escape, 0).to(tl.int64))


@triton.jit
def _copy(source, to, count, chunk, CHUNKS: tl.constexpr):
    at = tl.arange(0, 1024)
    for first in range(chunk * 1024, count, CHUNKS * 1024):
        there = first + at < count
        tl.store(to + first + at, tl.load(source + first + at, mask=there, other=0), mask=there)


@triton.jit
def collect(
    words,  # int16 [stream, most]: filled from the end
    escapes,
    states,
    places,  # int64 [stream, 3]: offset in `out`; start of words and escapes
    begins,  # int64 [group]: payload offset in `out`
    heads,  # uint8 [group, head]: bytes before the streams
    out,  # int16, set
    most,
    streams,
    head,
    CHUNKS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Copy the streams of all programs next to each other; a program copies part of one stream."""
    stream = tl.program_id(0).to(tl.int64)
    group = stream // streams
    byte = tl.arange(0, HEAD)
    there = byte < tl.where((stream % streams == 0) & (tl.program_id(1) == 0), head, 0)
    whole = tl.load(heads + group * head + byte, mask=there, other=0)
    tl.store((out + tl.load(begins + group)).to(tl.pointer_type(tl.uint8)) + byte, whole, mask=there)
    places += stream * 3
    to = out + tl.load(places)
    word = tl.load(places + 1)
    escape = tl.load(places + 2)
    chunk = tl.program_id(1)
    halves = (states + stream * 64).to(tl.pointer_type(tl.int16))
    _copy(halves, to, tl.where(chunk == 0, 128, 0), 0, CHUNKS)
    _copy(words + stream * most + word, to + 128, most - word, chunk, CHUNKS)
    _copy(escapes + stream * most + escape, to + 128 + most - word, most - escape, chunk, CHUNKS)
