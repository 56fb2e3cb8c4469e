# ruff: noqa: ANN001, ANN201, ANN202, N803, C901, PLR0915  # Triton reads annotations; its constants are in capitals
"""The kernels: entropy decoding and integer synthesis, bit for bit as in `kvabr.codec.native.reference`.

Importing this module needs Triton. No kernel trusts a payload: reads are masked with lengths that the host has checked,
writes depend only on the model's shapes, and so does the running time. Corrupt payloads are reported in ``status``.

Sums of int16 products use int8 tensor cores. A matrix entry is mantissa * gain[component], and gain * vector fits 24
bits, i.e. three signed int8 limbs. Each limb's sum is exact in int32 (at most 2^14 terms of at most 2^14), and
everything after is done in int64, of which the low 32 bits are kept.
"""

import triton
import triton.language as tl

ROW_BITS: tl.constexpr = tl.constexpr(22)
"""A row and its class share an int32 (`kvabr.codec.transform.MAX_ROWS`)."""
ROW_MASK: tl.constexpr = tl.constexpr((1 << 22) - 1)
ESCAPED: tl.constexpr = tl.constexpr(255)
"""Escape mark in the low byte of a table's entry; other symbols are stored as their value plus 128."""


@triton.jit
def _advance(state, freq, place, active, marked, words, word, word_end):
    """Advance all lanes by one rANS step; return states, words used, ranks of the marked lanes, and their number."""
    state = tl.where(active, freq.to(tl.uint32) * (state >> 12) + place.to(tl.uint32), state)
    low = active & (state < 65536)
    # One scan for two counts: there are only 64 lanes.
    upto = tl.cumsum(low.to(tl.int32) + (marked.to(tl.int32) << 8), 0)
    total = tl.max(upto, 0)
    at = word + (upto & 255) - 1
    more = tl.load(words + at, mask=low & (at < word_end), other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
    state = tl.where(low, (state << 16) | more, state)
    return state, word + (total & 255), (upto >> 8) - 1, total >> 8


@triton.jit
def read_rows(
    data,  # int16: all payloads
    parts,  # int64 [group, 5]: where in it the states are, the words, and how many; the escapes, and how many
    tokens_of,  # int32 [group]
    coding_order,  # int32 [row]: row | class << 22, in coding order
    chances,  # int32 [1 or 2, row]: of a set flag, in coding order
    entries,  # int32 [class, context, slot]: symbol, frequency << 8, place << 20; then those of near tables
    bucket,  # int32 [1 or 3, 16]: contexts of near tables
    refers,  # int32 [group]: whether tokens refer to others
    lane_of,  # uint8 [group, place]: the place of the tile that is referred to, below 64
    below_live,  # int8 [group, tile, row]: whether the row below has any index but 0; unused by a base
    index,  # int16 [group, row, token]: zeros, or thrice the indices below; becomes the indices
    listed,  # int32 [group, row]: scratch
    status,  # int32 [group]: set to 1 if the payload is not one
    rows,
    stride,  # of a row of `index`: tokens in whole tiles
    near_first,  # where in `entries` the near tables begin
    near_count,  # their contexts
    REFINES: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Entropy decode one depth; a program handles a group, whose tokens are in the order in which they are coded."""
    group = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, 64)
    parts += group * 5
    words = data + tl.load(parts + 1)
    word = tl.zeros((), tl.int64)
    word_end = tl.load(parts + 2)
    escapes = data + tl.load(parts + 3)
    escape = tl.zeros((), tl.int64)
    escape_end = tl.load(parts + 4)
    halves = data + tl.load(parts) + 2 * lanes
    low_half = tl.load(halves).to(tl.uint16, bitcast=True).to(tl.uint32)
    state = (tl.load(halves + 1).to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | low_half
    tokens = tl.load(tokens_of + group)
    listed += group * rows
    index += group * rows * stride
    below_live += group * (stride // 128) * rows
    bad = lanes < 0
    lane_of += group * stride
    referring = tl.load(refers + group)

    for tile in range(tl.cdiv(tokens, 128)):
        live = tl.zeros((), tl.int32)
        for start in range(0, rows, 64):
            which = start + lanes
            there = which < rows
            code = tl.load(coding_order + which, mask=there, other=0)
            chance = tl.load(chances + which, mask=there, other=1)
            if REFINES:
                lower_row = tl.load(below_live + (code & ROW_MASK), mask=there, other=0)
                chance = tl.where(lower_row != 0, tl.load(chances + rows + which, mask=there, other=1), chance)
            slot = (state & 4095).to(tl.int32)
            flag = there & (slot < chance)
            freq = tl.where(flag, chance, 4096 - chance)
            place = tl.where(flag, slot, slot - chance)
            state, word, nth, count = _advance(state, freq, place, there, flag, words, word, word_end)
            tl.store(listed + live + nth, code, mask=flag)
            live += count
        tl.debug_barrier()  # other threads read the list

        # A unit is up to 64 tokens of a live row. Rows are prefetched two units ahead and indices below one ahead,
        # since neither depends on the states.
        first = tile * 128
        steps = tl.cdiv(tl.minimum(tokens - first, 128), 64)
        units = live * steps
        code = tl.load(listed, mask=units > 0, other=0)
        after = tl.load(listed + 1 // steps, mask=units > 1, other=0)
        at = first + lanes
        lower = tl.zeros((64,), tl.int32)
        before = tl.zeros((64,), tl.int32)  # indices of the unit before
        lane = lanes
        if NEAR:
            there = first + 64 + lanes < tokens
            lane = tl.load(lane_of + first + 64 + lanes, mask=there, other=0).to(tl.int32) & 63
        if REFINES:
            place_in = (code & ROW_MASK).to(tl.int64) * stride
            lower = tl.load(index + place_in + at, mask=at < tl.where(units > 0, tokens, 0), other=0).to(tl.int32)
        for unit in range(units):
            at = first + (unit % steps) * 64 + lanes
            active = at < tokens
            later = tl.load(listed + (unit + 2) // steps, mask=unit + 2 < units, other=0)
            lower_after = lower
            if REFINES:
                at_after = first + ((unit + 1) % steps) * 64 + lanes
                place_in = (after & ROW_MASK).to(tl.int64) * stride
                there = at_after < tl.where(unit + 1 < units, tokens, 0)
                lower_after = tl.load(index + place_in + at_after, mask=there, other=0).to(tl.int32)
            table = code >> ROW_BITS
            slot = (state & 4095).to(tl.int32)
            if REFINES:
                # `lower` is three times the index below: 3 for 1, 6 or more for larger ones.
                context = (lower != 0).to(tl.int32) + (tl.abs(lower) > 3).to(tl.int32)
                slot += (table * 3 + context) * 4096
            else:
                slot += table * 4096
            minus = lower < 0
            if NEAR:
                near = (referring != 0) & (unit % steps == 1)
                referred = tl.minimum(tl.maximum(tl.gather(before, lane, 0), -127), 127)
                turned = tl.where(lower == 0, referred < 0, minus)
                which = tl.where(turned, -referred, referred)
                if REFINES:
                    which = tl.minimum(tl.maximum(which - tl.minimum(tl.abs(lower), 126), -8), 7) + 8 + context * 16
                else:
                    which = tl.minimum(which, 15)
                which = table * near_count + tl.load(bucket + which)
                slot = tl.where(near, near_first + which * 4096 + (state & 4095).to(tl.int32), slot)
                minus = tl.where(near, turned, minus)
            entry = tl.load(entries + slot)
            symbol = entry & 255
            escaped = active & (symbol == ESCAPED)
            state, word, nth, count = _advance(
                state, (entry >> 8) & 4095, (entry >> 20) & 4095, active, escaped, words, word, word_end
            )
            nth += escape
            far = tl.load(escapes + nth, mask=escaped & (nth < escape_end), other=0).to(tl.int32)
            escape += count
            bad |= escaped & (far == -32768)
            value = tl.where(escaped, far, symbol - 128)
            if REFINES or NEAR:
                value = tl.where(minus, -value, value)
            if REFINES:
                value = tl.minimum(tl.maximum(lower + value, -32768), 32767)
            before = value
            tl.store(index + (code & ROW_MASK).to(tl.int64) * stride + at, value.to(tl.int16), mask=active)
            code = after
            after = later
            lower = lower_after
        below_live += rows
        tl.debug_barrier()  # the next tile overwrites the list

    wrong = tl.max((bad | (state != 65536)).to(tl.int32), 0)
    wrong = tl.where((word != word_end) | (escape != escape_end), 1, wrong)
    tl.store(status + group, wrong)


@triton.jit
def triple(
    index,  # int16 [group, row, token]: becomes three times itself, saturating
    live,  # int8 [group, tile, row]: set to whether any was not 0
    rows,
    stride,
    ROWS: tl.constexpr,
):
    """Triple the indices of one depth for the next one; a program handles a few rows of a tile."""
    group = tl.program_id(2).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    token = tile * 128 + tl.arange(0, 128)
    at = index + (group * rows + row.to(tl.int64))[:, None] * stride + token[None, :]
    value = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
    tl.store(live + (group * (stride // 128) + tile) * rows + row, tl.max((value != 0).to(tl.int8), 1), mask=there)
    value = tl.minimum(tl.maximum(value * 3, -32768), 32767)
    tl.store(at, value.to(tl.int16), mask=there[:, None])


@triton.jit
def _dequantised(index, delta):
    """Return indices as coefficients in units of step/16."""
    value = tl.minimum(tl.maximum(index.to(tl.int32), -2047), 2047)
    return 16 * value - tl.where(value < 0, -1, tl.where(value > 0, 1, 0)) * delta.to(tl.int32)


@triton.jit
def _limbs(value):
    """Split signed 24-bit numbers into three signed int8 limbs, highest first."""
    rest = (value + 128) >> 8
    low = value - (rest << 8)
    high = (rest + 128) >> 8
    return high.to(tl.int8), (rest - (high << 8)).to(tl.int8), low.to(tl.int8)


@triton.jit
def _joined(high, middle, low):
    """Join the sums of limbs exactly."""
    return (high.to(tl.int64) << 16) + (middle.to(tl.int64) << 8) + low.to(tl.int64)


@triton.jit
def unstack(
    index,  # int16 [group, row, token]
    delta,  # int8 [row]
    mantissa,  # int8 [output, component]
    gain,  # uint8 [component]
    y,  # int16 [group, output of any stack, token]
    tokens_of,  # int32 [group]
    first_row,  # of the stack in `index`
    first_y,  # and in `y`
    size,
    rows,
    y_rows,
    stride,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPONENTS: tl.constexpr,
):
    """Apply the inverse transform of one stack; a program handles a tile of outputs and tokens."""
    group = tl.program_id(2).to(tl.int64)
    if tl.program_id(1) * TOKENS >= tl.load(tokens_of + group):
        return
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    index += (group * rows + first_row) * stride
    high = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    middle = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    low = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    for start in range(0, size, COMPONENTS):
        component = start + tl.arange(0, COMPONENTS)
        there = component < size
        matrix = tl.load(
            mantissa + output.to(tl.int64)[:, None] * size + component[None, :],
            mask=(output < size)[:, None] & there[None, :],
            other=0,
        )
        at = index + component.to(tl.int64)[:, None] * stride + token[None, :]
        value = tl.load(at, mask=there[:, None], other=0)
        value = _dequantised(value, tl.load(delta + first_row + component, mask=there, other=0)[:, None])
        weight = tl.load(gain + component, mask=there, other=0).to(tl.int32)
        limb2, limb1, limb0 = _limbs(value * weight[:, None])
        high = tl.dot(matrix, limb2, high, out_dtype=tl.int32)
        middle = tl.dot(matrix, limb1, middle, out_dtype=tl.int32)
        low = tl.dot(matrix, limb0, low, out_dtype=tl.int32)
    total = (_joined(high, middle, low) + 8192).to(tl.int32) >> 14
    total = tl.minimum(tl.maximum(total, -32768), 32767)
    at = y + (group * y_rows + first_y + output.to(tl.int64))[:, None] * stride + token[None, :]
    tl.store(at, total.to(tl.int16), mask=(output < size)[:, None])


@triton.jit
def _components(index, delta, y, row, y_row, component, kept, width, token, stride):
    """Load a tile of one block's input: outputs of a stack, and the components outside of it."""
    from_stack = component < kept
    at = y + (y_row + component).to(tl.int64)[:, None] * stride + token[None, :]
    one = tl.load(at, mask=from_stack[:, None], other=0).to(tl.int32)
    trailing = (component >= kept) & (component < width)
    at = index + (row + component - kept).to(tl.int64)[:, None] * stride + token[None, :]
    other = tl.load(at, mask=trailing[:, None], other=0)
    return one + _dequantised(other, tl.load(delta + row + component - kept, mask=trailing, other=0)[:, None])


@triton.jit
def _store(out, at, value, mask, KIND: tl.constexpr):
    """Round and store for the output type: 0 is float32, 1 float16, 2 bfloat16."""
    if KIND == 0:
        tl.store(out.to(tl.pointer_type(tl.float32)) + at, value, mask=mask)
    elif KIND == 1:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        tl.store(out.to(tl.pointer_type(tl.float16)) + at, value.to(tl.float16), mask=mask)
    else:
        # Round to nearest even in integers; values are never infinite or NaN.
        bits = value.to(tl.uint32, bitcast=True).to(tl.int64)
        bits = (bits + 32767 + ((bits >> 16) & 1)) >> 16
        tl.store(out.to(tl.pointer_type(tl.int16)) + at, bits.to(tl.int16), mask=mask)


@triton.jit
def finish(
    index,  # int16 [group, row, token]
    delta,  # int8 [row]
    y,  # int16 [group, output of any stack, token]
    places,  # int32 [layer, K/V, 3]: first rows of the first block in `index` and in `y`, components kept
    mantissa,  # int8 [layer, K/V, block, channel, component]
    gain,  # uint8 [layer, K/V, block, component]
    scale,  # float32 [layer, K/V]
    mean,  # float32 [group, layer, K/V, head, dim]
    mean_stride,  # from group to group; 0 if all have the same
    cos,  # float32 [group, place, pair]
    sin,
    outs,  # int64 [group, layer, K/V]: addresses
    offset_of,  # int64 [group, place]: where in each of these the token is, in elements; negative: nowhere
    tokens_of,  # int32 [group]
    stride_head,
    stride_dim,
    rows,
    y_rows,
    stride,
    layers_kv,
    heads,
    dim,
    block_heads,
    turned,  # pairs that the rotary embedding turns
    begin,  # first dimension that it turns
    HALVES: tl.constexpr,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPONENTS: tl.constexpr,
):
    """Inverse block transform, scale, mean, rotation, rounding; a program handles some pairs of channels of a head.

    Pairs of keys are those of the rotary embedding. Channels that do not rotate, and values, are paired as well.
    """
    group = tl.program_id(1).to(tl.int64)
    tokens = tl.load(tokens_of + group)
    job = tl.program_id(0)
    token_tiles = stride // TOKENS
    if (job % token_tiles) * TOKENS >= tokens:
        return
    token = (job % token_tiles) * TOKENS + tl.arange(0, TOKENS)
    job = job // token_tiles
    pair_tiles = tl.cdiv(tl.cdiv(dim, 2), PAIRS)
    pair = (job % pair_tiles) * PAIRS + tl.arange(0, PAIRS)
    job = job // pair_tiles
    head = job % heads
    layer_kv = job // heads
    kv = layer_kv % HALVES
    turned = tl.where(kv == 1, 0, turned)
    block = head // block_heads
    width = block_heads * dim
    # Positions of a pair's two channels within a head.
    rest = pair - turned
    halves = (dim - 2 * turned + 1) // 2
    if INTERLEAVED:
        one = tl.where(rest < 0, 2 * pair, 2 * turned + rest)
        two = tl.where(rest < 0, 2 * pair + 1, 2 * turned + rest + halves)
    else:
        one = tl.where(rest < 0, pair, 2 * turned + rest)
        two = tl.where(rest < 0, pair + turned, 2 * turned + rest + halves)
    has_one = rest < halves
    has_two = has_one & (two < dim)
    one = tl.where(has_one, (one + begin) % dim, one)
    two = tl.where(has_two, (two + begin) % dim, two)

    index += group * rows * stride
    y += group * y_rows * stride
    kept = tl.load(places + layer_kv * 3 + 2)
    row = tl.load(places + layer_kv * 3) + block * (width - kept)
    y_row = tl.load(places + layer_kv * 3 + 1) + block * kept
    channel = (head % block_heads) * dim
    if BLOCKS:
        blocks = heads // block_heads
        base = (layer_kv * blocks + block).to(tl.int64) * width
        matrix = mantissa + base * width
        a2 = tl.zeros((PAIRS, TOKENS), tl.int32)
        a1 = tl.zeros((PAIRS, TOKENS), tl.int32)
        a0 = tl.zeros((PAIRS, TOKENS), tl.int32)
        b2 = tl.zeros((PAIRS, TOKENS), tl.int32)
        b1 = tl.zeros((PAIRS, TOKENS), tl.int32)
        b0 = tl.zeros((PAIRS, TOKENS), tl.int32)
        for start in range(0, width, COMPONENTS):
            component = start + tl.arange(0, COMPONENTS)
            there = component < width
            value = _components(index, delta, y, row, y_row, component, kept, width, token, stride)
            weight = tl.load(gain + base + component, mask=there, other=0).to(tl.int32)
            limb2, limb1, limb0 = _limbs(value * weight[:, None])
            at = matrix + (channel + one).to(tl.int64)[:, None] * width + component[None, :]
            part = tl.load(at, mask=has_one[:, None] & there[None, :], other=0)
            a2 = tl.dot(part, limb2, a2, out_dtype=tl.int32)
            a1 = tl.dot(part, limb1, a1, out_dtype=tl.int32)
            a0 = tl.dot(part, limb0, a0, out_dtype=tl.int32)
            at = matrix + (channel + two).to(tl.int64)[:, None] * width + component[None, :]
            part = tl.load(at, mask=has_two[:, None] & there[None, :], other=0)
            b2 = tl.dot(part, limb2, b2, out_dtype=tl.int32)
            b1 = tl.dot(part, limb1, b1, out_dtype=tl.int32)
            b0 = tl.dot(part, limb0, b0, out_dtype=tl.int32)
        first = _joined(a2, a1, a0).to(tl.int32)
        second = _joined(b2, b1, b0).to(tl.int32)
    else:
        beyond = channel + dim  # masks reads beyond the head
        place = tl.where(has_one, channel + one, beyond)
        first = _components(index, delta, y, row, y_row, place, kept, beyond, token, stride) << 14
        place = tl.where(has_two, channel + two, beyond)
        second = _components(index, delta, y, row, y_row, place, kept, beyond, token, stride) << 14

    factor = tl.load(scale + layer_kv)
    means = mean + group * mean_stride + (layer_kv * heads + head) * dim
    x = first.to(tl.float32) * factor + tl.load(means + one, mask=has_one, other=0.0)[:, None]
    z = second.to(tl.float32) * factor + tl.load(means + two, mask=has_two, other=0.0)[:, None]
    within = token < tokens
    turns = pair < turned
    if kv == 0:
        at = (group * stride + token[None, :]) * turned + pair[:, None]
        mask = turns[:, None] & within[None, :]
        c = tl.load(cos + at, mask=mask, other=0.0)
        s = tl.load(sin + at, mask=mask, other=0.0)
        turned_x = x * c - z * s
        turned_z = z * c + x * s
        x = tl.where(turns[:, None], turned_x, x)
        z = tl.where(turns[:, None], turned_z, z)
    out = tl.load(outs + group * layers_kv + layer_kv)
    offset = tl.load(offset_of + group * stride + token, mask=within, other=-1)
    within = offset >= 0
    base = head.to(tl.int64) * stride_head + offset[None, :]
    at = base + one.to(tl.int64)[:, None] * stride_dim
    _store(out, at, x, has_one[:, None] & within[None, :], KIND)
    at = base + two.to(tl.int64)[:, None] * stride_dim
    _store(out, at, z, has_two[:, None] & within[None, :], KIND)
