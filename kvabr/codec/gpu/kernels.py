# ruff: noqa: ANN001, ANN201, ANN202, N803, C901, PLR0915  # Triton reads annotations; its constants are in capitals
"""Kernels for entropy decoding and integer synthesis, bit-identical to `kvabr.codec.native.coder`.

Importing this module needs Triton. No kernel trusts a payload: reads are masked with lengths checked by the host, and
writes and time depend only on the model's shapes. Corrupt payloads are reported in ``status``.

`read_rows` decodes one stream per program, and writes only the rows that a depth changes. With many programs, it first
looks states up in a coarse table, a 32nd of the full table's size, to stay within a multiprocessor's cache. It uses the
full table only if a coarse slot has several symbols.

`prepare` converts indices to vectors; `unstack` and `finish` multiply. Sums of int16 products use int8 tensor cores: a
matrix entry is mantissa * gain[component], and gain * vector fits 24 bits, i.e. three signed int8 limbs, which
`prepare` splits. Limbs are stored component by component, as tensor cores require. The products with a limb are summed,
and shifted by 8 bits before adding those of the next lower limb. All sums are int32 and may wrap, as only the low bits
matter. Most tensor cores saturate instead (mma has ``satfinite``; wgmma wraps). There, each limb's sum starts at 0, so
that it cannot overflow.
"""

import triton
import triton.language as tl

ROW_BITS: tl.constexpr = tl.constexpr(22)
"""Bits of a row number; the row's class takes the other bits of an int32 (`kvabr.codec.transform.MAX_ROWS`)."""
ROW_MASK: tl.constexpr = tl.constexpr((1 << 22) - 1)
ESCAPED: tl.constexpr = tl.constexpr(255)
"""Low byte of a table's entry for escaped indices; other symbols are stored plus 128."""

_RANKS: tl.constexpr = tl.constexpr(
    """{
    .reg .pred p, q, near;
    .reg .b32 m, n, under, a, b, c, one;
    setp.ne.s32 p, $4, 0;
    setp.ne.s32 q, $5, 0;
    vote.sync.ballot.b32 m, p, 0xffffffff;
    vote.sync.ballot.b32 n, q, 0xffffffff;
    mov.u32 under, %lanemask_lt;
    sub.s32 a, $7, $6;
    setp.eq.s32 near, a, 1;
    and.b32 a, m, under;
    and.b32 b, n, under;
    popc.b32 a, a;
    popc.b32 b, b;
    popc.b32 c, m;
    popc.b32 n, n;
    selp.b32 one, 1, 0, p;
    selp.b32 m, b, 0, near;
    add.s32 $0, a, m;
    add.s32 one, one, a;
    selp.b32 m, one, c, near;
    add.s32 $1, m, b;
    add.s32 c, c, n;
    mov.b32 $2, c;
    mov.b32 $3, c;
    }"""
)
"""For each thread, the number of marked lanes before each of its two lanes, and in total. A warp has 64 lanes, two per
thread: neighbours, or 32 apart, depending on the compiler's layout.
"""


@triton.jit
def _ranks(marked, lanes, VOTES: tl.constexpr):
    if VOTES:
        return tl.inline_asm_elementwise(
            _RANKS,
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [marked.to(tl.int32), lanes],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=2,
        )
    upto = tl.cumsum(marked.to(tl.int32), 0)
    return upto - marked.to(tl.int32), tl.zeros((64,), tl.int32) + tl.max(upto, 0)


_ANY: tl.constexpr = tl.constexpr(
    """{
    .reg .pred p, q;
    setp.ne.s32 p, $2, 0;
    setp.ne.s32 q, $3, 0;
    or.pred p, p, q;
    vote.sync.any.pred p, p, 0xffffffff;
    selp.b32 $0, 1, 0, p;
    mov.b32 $1, $0;
    }"""
)


_AHEAD: tl.constexpr = tl.constexpr(192)
_PREFETCH: tl.constexpr = tl.constexpr("prefetch.global.L2 [$2]; mov.b32 $0, 0; mov.b32 $1, 0;")


@triton.jit
def _any(marked, VOTES: tl.constexpr):
    if VOTES:
        return tl.inline_asm_elementwise(
            _ANY, "=&r,=&r,r,r", [marked.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=2
        )
    return tl.zeros((64,), tl.int32) + tl.max(marked.to(tl.int32), 0)


@triton.jit
def _advance(state, freq, place, active, lanes, words, word, word_end, VOTES: tl.constexpr):
    """Advance all lanes by one rANS step; return states, the words read, a mask of reading lanes, and the word count.

    `_filled` later puts each word into the lower half of a state.
    """
    state = tl.where(active, freq.to(tl.uint32) * (state >> 12) + place.to(tl.uint32), state)
    low = active & (state < 65536)
    before, total = _ranks(low, lanes, VOTES)
    at = word + before
    more = tl.load(words + at, mask=low & (at < word_end), other=0)
    return state, more, low, word + total


@triton.jit
def _filled(state, more, low):
    return tl.where(low, (state << 16) | more.to(tl.uint16, bitcast=True).to(tl.uint32), state)


@triton.jit
def _tripled(value, times):
    return tl.minimum(tl.maximum(value * times, -32768), 32767)


@triton.jit
def _stored(index, level, code, stride, token_0, token_1, tokens, REFINES: tl.constexpr):
    at = tl.zeros((), tl.int8)
    first = tl.zeros((64,), tl.int16)
    second = tl.zeros((64,), tl.int16)
    if REFINES:
        at = tl.load(level + (code & ROW_MASK))
        row = index + (code & ROW_MASK) * stride
        first = tl.load(row + token_0, mask=token_0 < tokens, other=0)
        second = tl.load(row + token_1, mask=token_1 < tokens, other=0)
    return at, first, second


@triton.jit
def read_rows(
    data,  # int16: all payloads
    parts,  # int64 [program, 8]: see `kvabr.codec.native.coder.gather`
    tokens_of,  # int32 [group]
    coding_order,  # int32 [row]: row | class << 22
    chances,  # int32 [1 or 2, row]: chances of a set flag, in coding order
    entries,  # int32 [class, context, slot]: symbol, frequency << 8, first slot << 20; then near tables
    coarse,  # int32 [class, context, slot >> COARSE]: the same, or 0 for several symbols; then near tables
    bucket,  # int32 [1 or 3, 16]: contexts of near tables
    refers,  # int32 [group]: nonzero if tokens refer to others
    lane_of,  # uint8 [group, place]: the referenced place of the tile, below 64
    level,  # int8 [group, tile, row]: last depth with a nonzero index, or negative
    index,  # int16 [group, row, token]: indices at that depth; three times as large at each higher one
    listed,  # int32 [program, most]: scratch
    status,  # int32 [program]: 1 for a corrupt stream
    rows,
    most,
    depth,
    stride,  # of a row of `index`: tokens in whole tiles; a group has fewer than 2^31 indices
    near_first,  # start of near tables in `entries`
    near_count,  # near contexts
    REFINES: tl.constexpr,
    NEAR: tl.constexpr,
    VOTES: tl.constexpr,
    COARSE: tl.constexpr,  # 0: no coarse table
):
    """Entropy decode one depth; a program handles one stream of a group, with tokens in coding order."""
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, 64)
    parts += program * 8
    group = tl.load(parts)
    halves = data + tl.load(parts + 1) + 2 * lanes
    words = data + tl.load(parts + 2)
    escapes = data + tl.load(parts + 3)
    word_end = tl.load(parts + 4).to(tl.int32)
    escape_end = tl.load(parts + 5).to(tl.int32)
    stream = tl.load(parts + 6).to(tl.int32)
    streams = tl.load(parts + 7).to(tl.int32)
    word = tl.zeros((64,), tl.int32)
    escape = tl.zeros((64,), tl.int32)
    low_half = tl.load(halves).to(tl.uint16, bitcast=True).to(tl.uint32)
    state = (tl.load(halves + 1).to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | low_half
    tokens = tl.load(tokens_of + group)
    listed += program * most
    index += group * rows * stride
    level += group * (stride // 128) * rows
    bad = lanes < 0
    lane_of += group * stride
    referring = tl.load(refers + group)

    for tile in range(tl.cdiv(tokens, 128)):
        live = tl.zeros((64,), tl.int32)
        for start in range(stream * 64, rows, streams * 64):
            which = start + lanes
            there = which < rows
            code = tl.load(coding_order + which, mask=there, other=0)
            chance = tl.load(chances + which, mask=there, other=1)
            if REFINES:
                lower_row = tl.load(level + (code & ROW_MASK), mask=there, other=0)
                chance = tl.where(lower_row >= 0, tl.load(chances + rows + which, mask=there, other=1), chance)
            slot = (state & 4095).to(tl.int32)
            flag = there & (slot < chance)
            freq = tl.where(flag, chance, 4096 - chance)
            place = tl.where(flag, slot, slot - chance)
            state, more, low, word = _advance(state, freq, place, there, lanes, words, word, word_end, VOTES)
            before, count = _ranks(flag, lanes, VOTES)
            tl.store(listed + live + before, code, mask=flag)
            live += count
            if not REFINES:
                tl.store(level + (code & ROW_MASK), tl.full((64,), -1, tl.int8), mask=there)
            state = _filled(state, more, low)
        tl.debug_barrier()  # other threads read the list

        # A live row takes two steps; the second has no tokens if the tile has at most 64. To hide latency, rows are
        # loaded three steps ahead, and indices below two ahead.
        first = tile * 128
        live_rows = tl.max(live, 0)
        code = tl.load(listed, mask=live_rows > 0, other=0)
        code_1 = tl.load(listed + 1, mask=live_rows > 1, other=0)
        code_2 = tl.load(listed + 2, mask=live_rows > 2, other=0)
        token_0 = first + lanes
        token_1 = first + 64 + lanes
        lane = lanes
        if NEAR:
            lane = tl.load(lane_of + token_1, mask=token_1 < tokens, other=0).to(tl.int32) & 63
        at, lower_0, lower_1 = _stored(index, level, code, stride, token_0, token_1, tokens, REFINES)
        at_1, next_0, next_1 = _stored(index, level, code_1, stride, token_0, token_1, tokens, REFINES)
        for row in range(live_rows):
            if VOTES:  # loading on demand would stall every few rows
                ahead = (words + tl.minimum(word + _AHEAD, word_end)).to(tl.int64)
                tl.inline_asm_elementwise(_PREFETCH, "=r,=r,l,l", [ahead], dtype=tl.int32, is_pure=False, pack=2)
            at_2, later_0, later_1 = _stored(index, level, code_2, stride, token_0, token_1, tokens, REFINES)
            code_3 = tl.load(listed + row + 3, mask=row + 3 < live_rows, other=0)
            table = code >> ROW_BITS
            to = index + (code & ROW_MASK) * stride
            below_0 = tl.zeros((64,), tl.int32)
            below_1 = tl.zeros((64,), tl.int32)
            if REFINES:  # three times the indices below, which may be of an older depth
                times = tl.where(at >= 0, 3, 0)
                below_0 = _tripled(lower_0.to(tl.int32), times)
                below_1 = _tripled(lower_1.to(tl.int32), times)
                for _ in range(1, tl.where(at >= 0, depth - at, 0)):
                    below_0 = _tripled(below_0, 3)
                    below_1 = _tripled(below_1, 3)
            earlier = below_0  # of the first step
            some = lanes < 0
            for half in tl.static_range(2):
                token = token_0 if half == 0 else token_1
                lower = below_0 if half == 0 else below_1
                active = token < tokens
                low = (state & 4095).to(tl.int32)
                slot = table * 4096 + low
                if REFINES:
                    # `lower` is 3 for an index below of 1, 6 or more for larger indices.
                    context = (lower != 0).to(tl.int32) + (tl.abs(lower) > 3).to(tl.int32)
                    slot = (table * 3 + context) * 4096 + low
                minus = lower < 0
                if NEAR and half == 1:
                    referred = tl.minimum(tl.maximum(tl.gather(earlier, lane, 0), -127), 127)
                    turned = tl.where(lower == 0, referred < 0, minus)
                    which = tl.where(turned, -referred, referred)
                    if REFINES:
                        which = tl.minimum(tl.maximum(which - tl.minimum(tl.abs(lower), 126), -8), 7) + 8 + context * 16
                    else:
                        which = tl.minimum(which, 15)
                    which = table * near_count + tl.load(bucket + which)
                    slot = tl.where(referring != 0, near_first + which * 4096 + low, slot)
                    minus = tl.where(referring != 0, turned, minus)
                if COARSE == 0:
                    entry = tl.load(entries + slot)
                else:
                    entry = tl.load(coarse + (slot >> COARSE))
                    entry = tl.where(entry == 0, tl.load(entries + slot, mask=entry == 0, other=0), entry)
                symbol = entry & 255
                place = low - ((entry >> 20) & 4095)
                freq = (entry >> 8) & 4095
                state, more, low_now, word = _advance(state, freq, place, active, lanes, words, word, word_end, VOTES)
                value = symbol - 128
                escaped = active & (symbol == ESCAPED)
                if tl.max(escaped.to(tl.int32), 0) != 0:
                    before, count = _ranks(escaped, lanes, VOTES)
                    nth = escape + before
                    far = tl.load(escapes + nth, mask=escaped & (nth < escape_end), other=0).to(tl.int32)
                    escape += count
                    bad |= escaped & (far == -32768)
                    value = tl.where(escaped, far, value)
                state = _filled(state, more, low_now)
                if REFINES or (NEAR and half == 1):
                    value = tl.where(minus, -value, value)
                if REFINES:
                    value = tl.minimum(tl.maximum(lower + value, -32768), 32767)
                earlier = value
                some |= active & (value != 0)
                tl.store(to + token, value.to(tl.int16), mask=active)
            had = tl.where(_any(some, VOTES) != 0, depth, -1)
            tl.store(level + (code & ROW_MASK) + 0 * lanes, had.to(tl.int8), mask=lanes == 0)
            code = code_1
            code_1 = code_2
            code_2 = code_3
            at = at_1
            at_1 = at_2
            lower_0 = next_0
            lower_1 = next_1
            next_0 = later_0
            next_1 = later_1
        level += rows
        tl.debug_barrier()  # the next tile overwrites the list

    wrong = bad | (state != 65536) | (word != word_end) | (escape != escape_end)
    tl.store(status + program, tl.max(wrong.to(tl.int32), 0))


@triton.jit
def _store_limbs(planes, plane, at, value, mask):
    rest = (value + 128) >> 8
    low = value - (rest << 8)
    high = (rest + 128) >> 8
    tl.store(planes + at, high.to(tl.int8), mask=mask)
    tl.store(planes + plane + at, (rest - (high << 8)).to(tl.int8), mask=mask)
    tl.store(planes + 2 * plane + at, low.to(tl.int8), mask=mask)


@triton.jit
def prepare(
    index,  # see `read_rows`
    level,
    depth_of,
    delta,  # int8 [track, row]
    track_of,
    gain,  # uint8 [row]: gain of its first matrix
    places,  # int32 [row]: place in a token's planes
    planes,  # int8 [limb, group, token, place], set
    plane,  # numbers in a plane
    tokens_of,
    rows,
    stride,
    width,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,  # run length of neighbouring places
    WHOLE: tl.constexpr,  # True for indices, False for coefficients
    DEPTHS: tl.constexpr,
):
    """Convert indices to coefficients times gains, in limbs; a program handles a tile of rows and tokens."""
    group = tl.program_id(2).to(tl.int64)
    if tl.program_id(1) * TOKENS >= tl.load(tokens_of + group):
        return
    plane = tl.cast(plane, tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    at = index + (group * rows + row.to(tl.int64))[:, None] * stride + token[None, :]
    had = there
    since = tl.zeros((ROWS,), tl.int32)
    if WHOLE:
        tile = (tl.program_id(1) * TOKENS) // 128
        own = tl.load(level + (group * (stride // 128) + tile) * rows + row, mask=there, other=-1).to(tl.int32)
        had = own >= 0
        since = tl.load(depth_of + group) - own
    value = tl.load(at, mask=had[:, None], other=0).to(tl.int32)
    if WHOLE:
        for depth in tl.static_range(1, DEPTHS):
            value = tl.where((since >= depth)[:, None], _tripled(value, 3), value)
        value = tl.minimum(tl.maximum(value, -2047), 2047)
        nearer = tl.load(delta + tl.load(track_of + group) * rows + row, mask=there, other=0).to(tl.int32)
        value = 16 * value - tl.where(value < 0, -1, tl.where(value > 0, 1, 0)) * nearer[:, None]
    value = value * tl.load(gain + row, mask=there, other=0).to(tl.int32)[:, None]
    place = tl.load(places + row, mask=there, other=0)
    place = tl.max_contiguous(tl.multiple_of(place, RUN), RUN)
    at = (group * stride + token[None, :].to(tl.int64)) * width + place[:, None]
    _store_limbs(planes, plane, at, value, there[:, None])


@triton.jit
def _multiplied(
    matrix,
    planes,
    plane,
    size,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPONENTS: tl.constexpr,
    WRAPS: tl.constexpr,
):
    """Return products of matrix rows with vectors in limbs, int32 [row, token], modulo 2^32.

    ``matrix`` has pointers to the first components of rows, [row, component]; ``planes`` to those of vectors,
    [component, token]. The number of components is a multiple of the tile.
    """
    total = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    for limb in tl.static_range(3):
        total = total << 8
        part = total if WRAPS else tl.zeros((OUTPUTS, TOKENS), tl.int32)
        for start in range(0, size, COMPONENTS):
            part = tl.dot(tl.load(matrix + start), tl.load(planes + limb * plane + start), part, out_dtype=tl.int32)
        total = part if WRAPS else total + part
    return total


@triton.jit
def unstack(
    planes,  # see `prepare`; products are set
    plane,
    tiles,  # int64 [program, 5]: offset in `mantissa` of a tile's rows, components padded to whole tiles, the
    # place of the first one; the tile's first output, and the end of those of its stack, both among those of all stacks
    mantissa,  # int8 [output, component] of each stack, zero-padded
    gain,  # uint8 [output]: gain of its next matrix
    places,  # int32 [output]: destination
    tokens_of,
    stride,
    width,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPONENTS: tl.constexpr,
    RUN: tl.constexpr,
    WRAPS: tl.constexpr,  # sums of products wrap
):
    """Apply the inverse transforms of the stacks; a program handles a tile of outputs and tokens."""
    group = tl.program_id(2).to(tl.int64)
    if tl.program_id(1) * TOKENS >= tl.load(tokens_of + group):
        return
    plane = tl.multiple_of(tl.cast(plane, tl.int64), COMPONENTS)
    tiles += tl.program_id(0) * 5
    size = tl.multiple_of(tl.load(tiles + 1).to(tl.int32), COMPONENTS)
    matrix = mantissa + tl.multiple_of(tl.load(tiles), COMPONENTS)
    first = tl.multiple_of(tl.load(tiles + 2).to(tl.int32), COMPONENTS)
    output = tl.multiple_of(tl.load(tiles + 3).to(tl.int32), RUN) + tl.arange(0, OUTPUTS)
    there = output < tl.multiple_of(tl.load(tiles + 4).to(tl.int32), RUN)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    component = tl.arange(0, COMPONENTS)
    base = (group * stride + token.to(tl.int64)) * width
    rows = matrix + tl.arange(0, OUTPUTS)[:, None] * size + component[None, :]
    vectors = planes + first + base[None, :] + component[:, None]
    total = _multiplied(rows, vectors, plane, size, OUTPUTS, TOKENS, COMPONENTS, WRAPS)
    total = (total + 8192) >> 14
    total = tl.minimum(tl.maximum(total, -32768), 32767)
    total = total * tl.load(gain + output, mask=there, other=0).to(tl.int32)[:, None]
    place = tl.load(places + output, mask=there, other=0)
    place = tl.max_contiguous(tl.multiple_of(place, RUN), RUN)
    at = base[None, :] + place[:, None]
    _store_limbs(planes, plane, at, total, there[:, None])


@triton.jit
def _joined(planes, plane, at):
    high = tl.load(planes + at).to(tl.int32)
    middle = tl.load(planes + plane + at).to(tl.int32)
    return (high << 16) + (middle << 8) + tl.load(planes + 2 * plane + at).to(tl.int32)


@triton.jit
def store(out, at, value, mask, KIND: tl.constexpr, RUN: tl.constexpr):
    """Round and store values. KIND 0 is float32, 1 float16, 2 bfloat16; addresses are multiples of ``RUN``."""
    if KIND == 0:
        out = tl.multiple_of(out.to(tl.pointer_type(tl.float32)), 4 * RUN)
        tl.store(out + at, value, mask=mask)
    elif KIND == 1:
        out = tl.multiple_of(out.to(tl.pointer_type(tl.float16)), 2 * RUN)
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        tl.store(out + at, value.to(tl.float16), mask=mask)
    else:
        # Round to nearest even in integers; values are finite.
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + (32767 + ((bits >> 16) & 1))) >> 16
        out = tl.multiple_of(out.to(tl.pointer_type(tl.int16)), 2 * RUN)
        tl.store(out + at, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)


@triton.jit
def finish(
    planes,
    plane,
    first_place,  # of the first block
    mantissa,  # int8 [layer, K/V, block, channel, component], padded to whole tiles
    scale,  # float32 [track, layer, K/V]
    track_of,  # int32 [group]: row of scales
    mean,  # float32 [group, layer, K/V, head, dim]
    mean_of,  # int32 [group]: row of means
    cos,  # float32 [position, pair]
    sin,
    position_of,  # int32 [group, place]: token position; negative: not rotated
    outs,  # int64 [group, layer, K/V]: addresses
    offset_of,  # int64 [group, place]: token offset, in elements; negative: not written
    tokens_of,
    stride_head,
    stride_dim,
    stride,
    width,
    layers_kv,
    heads,
    dim,
    block_heads,
    padded,  # components of a block
    turned,  # pairs rotated by the rotary embedding
    begin,  # first rotated dimension
    HALVES: tl.constexpr,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPONENTS: tl.constexpr,
    WHOLE: tl.constexpr,
    RUN: tl.constexpr,  # run length of channels of pairs that are neighbours in memory
    WRAPS: tl.constexpr,
):
    """Apply inverse block transform, scale, mean and rotation; a program handles some channel pairs of a head.

    Key channels are paired as in the rotary embedding. Channels that do not rotate, and values, are paired as well.
    """
    group = tl.program_id(1).to(tl.int64)
    tokens = tl.load(tokens_of + group)
    job = tl.program_id(0)
    token_tiles = stride // TOKENS
    if (job % token_tiles) * TOKENS >= tokens:
        return
    plane = tl.multiple_of(tl.cast(plane, tl.int64), COMPONENTS)
    token = (job % token_tiles) * TOKENS + tl.arange(0, TOKENS)
    job = job // token_tiles
    pair_tiles = tl.cdiv(tl.cdiv(dim, 2), PAIRS)
    pair = (job % pair_tiles) * PAIRS + tl.arange(0, PAIRS)
    job = job // pair_tiles
    head = job % heads
    layer_kv = job // heads
    kv = layer_kv % HALVES
    turned_here = tl.where(kv == 1, 0, turned)
    blocks = heads // block_heads
    block = layer_kv * blocks + head // block_heads
    # Position in a head of a channel that does not rotate.
    rest = pair - turned_here
    halves = (dim - 2 * turned_here + 1) // 2
    if INTERLEAVED:
        one = tl.where(rest < 0, 2 * pair, 2 * turned_here + rest)
        two = tl.where(rest < 0, 2 * pair + 1, 2 * turned_here + rest + halves)
    else:
        one = tl.where(rest < 0, pair, 2 * turned_here + rest)
        two = tl.where(rest < 0, pair + turned_here, 2 * turned_here + rest + halves)
    has_one = rest < halves
    has_two = has_one & (two < dim)
    one = tl.where(has_one, (one + begin) % dim, 0)
    two = tl.where(has_two, (two + begin) % dim, 0)
    one = tl.max_contiguous(tl.multiple_of(one, RUN), RUN)
    two = tl.max_contiguous(tl.multiple_of(two, RUN), RUN)

    channel = (head % block_heads) * dim
    base = (group * stride + token.to(tl.int64)) * width + first_place + block * padded
    if BLOCKS:
        component = tl.arange(0, COMPONENTS)
        rows = mantissa + (block.to(tl.int64) * block_heads * dim + channel) * padded
        vectors = planes + base[None, :] + component[:, None]
        rows_one = rows + one[:, None] * padded + component[None, :]
        rows_two = rows + two[:, None] * padded + component[None, :]
        first = tl.zeros((PAIRS, TOKENS), tl.int32)
        second = tl.zeros((PAIRS, TOKENS), tl.int32)
        for limb in tl.static_range(3):  # as in `_multiplied`, but each vector is loaded once
            first = first << 8
            second = second << 8
            part = first if WRAPS else tl.zeros((PAIRS, TOKENS), tl.int32)
            other = second if WRAPS else tl.zeros((PAIRS, TOKENS), tl.int32)
            for start in range(0, padded, COMPONENTS):
                vector = tl.load(vectors + limb * plane + start)
                part = tl.dot(tl.load(rows_one + start), vector, part, out_dtype=tl.int32)
                other = tl.dot(tl.load(rows_two + start), vector, other, out_dtype=tl.int32)
            first = part if WRAPS else first + part
            second = other if WRAPS else second + other
    else:
        base += channel
        first = _joined(planes, plane, base[None, :] + one[:, None]) << 14
        second = _joined(planes, plane, base[None, :] + two[:, None]) << 14

    factor = tl.load(scale + tl.load(track_of + group) * layers_kv + layer_kv)
    means = mean + (tl.load(mean_of + group) * layers_kv + layer_kv).to(tl.int64) * heads * dim + head * dim
    x = first.to(tl.float32) * factor + tl.load(means + one)[:, None]
    z = second.to(tl.float32) * factor + tl.load(means + two)[:, None]
    within = token < tokens
    turns = pair < turned_here
    if kv == 0:
        position = tl.load(position_of + group * stride + token, mask=within, other=-1)
        at = position[None, :].to(tl.int64) * turned + pair[:, None]
        mask = turns[:, None] & (position >= 0)[None, :]
        c = tl.load(cos + at, mask=mask, other=1.0)
        s = tl.load(sin + at, mask=mask, other=0.0)
        turned_x = x * c - z * s
        turned_z = z * c + x * s
        x = tl.where(turns[:, None], turned_x, x)
        z = tl.where(turns[:, None], turned_z, z)
    out = tl.load(outs + group * layers_kv + layer_kv)
    offset = tl.load(offset_of + group * stride + token, mask=within, other=-1)
    within = offset >= 0
    offset = tl.multiple_of(offset, RUN)
    to = head.to(tl.int64) * stride_head + offset[None, :]
    # Neighbouring channels with an equal mask are written in one instruction.
    mask_one = within[None, :] if WHOLE else has_one[:, None] & within[None, :]
    mask_two = within[None, :] if WHOLE else has_two[:, None] & within[None, :]
    store(out, to + one[:, None].to(tl.int64) * stride_dim, x, mask_one, KIND, RUN)
    store(out, to + two[:, None].to(tl.int64) * stride_dim, z, mask_two, KIND, RUN)
