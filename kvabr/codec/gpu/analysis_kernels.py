# ruff: noqa: ANN001, ANN201, ANN202, N803  # Triton reads annotations; its constants are in capitals
"""The kernels of the encoder's transform, bit-identical to `kvabr.codec.analysis`.

Importing this module needs Triton. Products of 16-bit numbers use int8 tensor cores. A number is 256 * high + low +
128, with signed bytes high and low. A sum of products is therefore computed from four sums of byte products, and from
the sums of both factors less 128. Each sum of byte products is exact in int32 (at most 2^14 terms of at most 2^14).
They are combined in int64, and the result, which fits 32 bits, is exact.
"""

import triton
import triton.language as tl

MAX_ELEMENT: tl.constexpr = tl.constexpr(2.0**64)
SCALED: tl.constexpr = tl.constexpr(268)
FINEST: tl.constexpr = tl.constexpr(227)
TOP: tl.constexpr = tl.constexpr(32767.0)
ENERGY_BITS: tl.constexpr = tl.constexpr(13)
LENGTH: tl.constexpr = tl.constexpr(65400**2 >> 13)
MAX_HALVINGS: tl.constexpr = tl.constexpr(6)
MAGIC: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds magnitudes below 2^22 to the nearest whole number, halves to even."""


@triton.jit
def centre(
    group,  # float [layer, K/V, head, token, dim]
    mean,  # float32 [layer, K/V, head, dim]
    cos,  # float32 [token, pair]: cosines for undoing the rotation
    sin,
    channels,  # float32 [layer, K/V, head, dim, token], set: elements without rotation and mean
    tokens,
    stride,  # tokens in whole tiles
    stride_layer,
    stride_kv,
    stride_head,
    stride_token,
    stride_dim,
    heads,
    dim,
    pairs,
    begin,  # first rotating dimension
    HALVES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Undo the rotation of keys and subtract the mean; a program handles a tile of channels and tokens of a head."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    which = tl.program_id(2)
    head = which % heads
    kv = (which // heads) % HALVES
    layer = which // heads // HALVES
    group += layer.to(tl.int64) * stride_layer + kv.to(tl.int64) * stride_kv + head.to(tl.int64) * stride_head
    here = (channel < dim)[:, None] & (token < tokens)[None, :]
    by_token = token.to(tl.int64)[None, :] * stride_token
    value = tl.load(group + channel.to(tl.int64)[:, None] * stride_dim + by_token, mask=here, other=0.0).to(tl.float32)

    inside = channel - begin
    pairs = tl.where(kv == 0, pairs, 0)  # values do not rotate
    turns = (inside >= 0) & (inside < 2 * pairs)
    if INTERLEAVED:
        second = inside % 2 == 1
        pair = inside // 2
        partner = tl.where(second, channel - 1, channel + 1)
    else:
        second = inside >= pairs
        pair = tl.where(second, inside - pairs, inside)
        partner = tl.where(second, channel - pairs, channel + pairs)
    here = (turns & (channel < dim))[:, None] & (token < tokens)[None, :]
    other = tl.load(group + partner.to(tl.int64)[:, None] * stride_dim + by_token, mask=here, other=0.0).to(tl.float32)
    at = token.to(tl.int64)[None, :] * pairs + pair[:, None]
    c = tl.load(cos + at, mask=here, other=0.0)
    s = tl.load(sin + at, mask=here, other=0.0)
    turned = tl.where(second[:, None], value * c - other * s, value * c + other * s)
    value = tl.where(turns[:, None], turned, value)

    first = which.to(tl.int64) * dim
    value = value - tl.load(mean + first + channel, mask=channel < dim, other=0.0)[:, None]
    value = tl.where((token < tokens)[None, :], value, 0.0)
    tl.store(channels + (first + channel)[:, None] * stride + token[None, :], value, mask=(channel < dim)[:, None])


@triton.jit
def powers(
    channels,  # float32 [layer, K/V, element, token]
    power,  # float32 [K/V, layer, token]
    elements,
    layers,
    stride,
    HALVES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Sum the squares of each token's keys, or values, in order; a program handles some tokens of a layer."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    layer = tl.program_id(1)
    kv = tl.program_id(2)
    at = channels + (layer * HALVES + kv).to(tl.int64) * elements * stride + token
    total = tl.zeros((TOKENS,), tl.float32)
    for _ in range(elements):
        value = tl.load(at)
        total += value * value
        at += stride
    tl.store(power + (kv * layers + layer).to(tl.int64) * stride + token, total)


@triton.jit
def _even(source, scale, columns, at, component, there, stride, token, SCALES: tl.constexpr):
    value = tl.load(source + (at + component)[:, None] * stride + token[None, :], mask=there[:, None], other=0.0)
    if SCALES:
        value = value * scale
        value = tl.where(value < MAX_ELEMENT, value, MAX_ELEMENT)  # and replace NaN
        value = tl.maximum(value, -MAX_ELEMENT)
    return value, value * tl.load(columns + component, mask=there, other=0.0)[:, None]


@triton.jit
def _word(value, unit):
    # Clamp first: limits are whole, so rounding keeps them, and the sum is exact below 2^22.
    whole = tl.minimum(tl.maximum(value * unit[None, :], -TOP), TOP)
    return ((whole + MAGIC) - MAGIC).to(tl.int32)


@triton.jit
def to_words(
    source,  # float32 [component of any vector, token]
    scales,  # float32 [vector / per_scale]
    columns,  # float32 [component of any vector]: powers of two
    high,  # int8 [component of any vector, token], set: upper bytes
    low,  # int8, set: lower bytes, less 128
    totals,  # int64 [vector, token], set: sums of the numbers, less 128 each
    units,  # float32 [vector, token], set: factors of sums
    largest,  # float32 [vector, token], set: largest magnitudes
    size,
    per_scale,
    stride,
    SCALES: tl.constexpr,
    COMPONENTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Round vectors to 16 bits, each in its own unit; a program handles one vector for some tokens."""
    vector = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at = vector.to(tl.int64) * size
    columns += at
    scale = tl.load(scales + vector // per_scale)
    top = tl.zeros((TOKENS,), tl.float32)
    most = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, size, COMPONENTS):
        component = start + tl.arange(0, COMPONENTS)
        value, even = _even(source, scale, columns, at, component, component < size, stride, token, SCALES)
        top = tl.maximum(top, tl.max(tl.abs(value), 0))
        most = tl.maximum(most, tl.max(tl.abs(even), 0))
    exponent = tl.minimum(SCALED - (most.to(tl.int32, bitcast=True) >> 23), FINEST)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    energy = tl.zeros((TOKENS,), tl.int64) + (size + 1) // 2
    for start in range(0, size, 2 * COMPONENTS):
        component = start + 2 * tl.arange(0, COMPONENTS)
        _, even = _even(source, scale, columns, at, component, component < size, stride, token, SCALES)
        _, odd = _even(source, scale, columns, at, component + 1, component + 1 < size, stride, token, SCALES)
        one = _word(even, unit)
        two = _word(odd, unit)
        energy += tl.sum((one * one + two * two) >> ENERGY_BITS, 0).to(tl.int64)
    for step in tl.static_range(MAX_HALVINGS):
        exponent -= (energy >= (LENGTH << (2 * step))).to(tl.int32)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    total = tl.zeros((TOKENS,), tl.int64)
    for start in range(0, size, COMPONENTS):
        component = start + tl.arange(0, COMPONENTS)
        there = component < size
        _, even = _even(source, scale, columns, at, component, there, stride, token, SCALES)
        word = _word(even, unit)
        place = (at + component)[:, None] * stride + token[None, :]
        tl.store(high + place, (word >> 8).to(tl.int8), mask=there[:, None])
        tl.store(low + place, ((word & 255) - 128).to(tl.int8), mask=there[:, None])
        total += tl.sum(tl.where(there[:, None], word - 128, 0), 0).to(tl.int64)
    place = vector.to(tl.int64) * stride + token
    tl.store(totals + place, total)
    tl.store(units + place, ((254 - exponent) << 23).to(tl.float32, bitcast=True))
    tl.store(largest + place, top)


@triton.jit
def product(
    matrix_high,  # int8 [matrix, row, column]
    matrix_low,
    matrix_totals,  # int64 [matrix, row]: sums of the numbers, less 128 each
    factors,  # float32 [matrix, row]: powers of two
    high,
    low,
    totals,
    units,
    places,  # int32 [matrix, 3]: row count and start for `across`; start for other rows
    across,  # float32 [component, token]
    out,  # float32 [row, token]
    size,
    stride,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPONENTS: tl.constexpr,
):
    """Multiply vectors by integer matrices; a program handles a tile of outputs and tokens of one matrix."""
    which = tl.program_id(2)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    first = which.to(tl.int64) * size
    upper = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    middle = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    other = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    lower = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    for start in range(0, size, COMPONENTS):
        component = start + tl.arange(0, COMPONENTS)
        there = component < size
        at = (first + output)[:, None] * size + component[None, :]
        mask = (output < size)[:, None] & there[None, :]
        left_high = tl.load(matrix_high + at, mask=mask, other=0)
        left_low = tl.load(matrix_low + at, mask=mask, other=0)
        at = (first + component)[:, None] * stride + token[None, :]
        right_high = tl.load(high + at, mask=there[:, None], other=0)
        right_low = tl.load(low + at, mask=there[:, None], other=0)
        upper = tl.dot(left_high, right_high, upper, out_dtype=tl.int32)
        middle = tl.dot(left_high, right_low, middle, out_dtype=tl.int32)
        other = tl.dot(left_low, right_high, other, out_dtype=tl.int32)
        lower = tl.dot(left_low, right_low, lower, out_dtype=tl.int32)
    there = output < size
    sums = (upper.to(tl.int64) << 16) + ((middle.to(tl.int64) + other.to(tl.int64)) << 8) + lower.to(tl.int64)
    shift = tl.load(matrix_totals + first + output, mask=there, other=0)[:, None]
    shift = shift + tl.load(totals + which.to(tl.int64) * stride + token)[None, :]
    sums += 128 * shift + 16384 * size
    value = sums.to(tl.int32).to(tl.float32) * tl.load(units + which.to(tl.int64) * stride + token)[None, :]
    value = value * tl.load(factors + first + output, mask=there, other=0.0)[:, None]
    kept = tl.load(places + which * 3)
    to_across = tl.load(places + which * 3 + 1) + output
    to_rows = tl.load(places + which * 3 + 2) + output - kept
    at = to_across.to(tl.int64)[:, None] * stride + token[None, :]
    tl.store(across + at, value, mask=(there & (output < kept))[:, None])
    at = to_rows.to(tl.int64)[:, None] * stride + token[None, :]
    tl.store(out + at, value, mask=(there & (output >= kept))[:, None])
