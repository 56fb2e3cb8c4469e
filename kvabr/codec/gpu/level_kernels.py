# ruff: noqa: ANN001, ANN201, ANN202, N803, C901, PLR0915  # Triton reads annotations; its constants are in capitals
"""The kernel that expands cast and integer levels, bit-identical to `kvabr.codec.floats`, `affine` and `fp4`.

Importing this module needs Triton. Reads stay within lengths checked by the host; ``status`` reports numbers that are
not finite.
"""

import triton
import triton.language as tl

from kvabr.codec.gpu.kernels import store


@triton.jit
def _half(at, mask):
    low = tl.load(at, mask=mask, other=0).to(tl.int32)
    bits = low | tl.load(at + 1, mask=mask, other=0).to(tl.int32) << 8
    special = (bits & 0x7C00) == 0x7C00
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32), special


@triton.jit
def _small(code, SHIFT: tl.constexpr, MASK: tl.constexpr, SIGN: tl.constexpr):
    bits = ((code << SHIFT) & MASK) | ((code << SIGN) & 0x8000)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def expand(
    data,  # uint8: all payloads
    begins,  # int64 [group]: offset, a multiple of 16
    tokens_of,  # int32 [group]
    outs,  # int64 [group, layer and K/V]: addresses
    offset_of,  # int64 [group, token]: see `WriteTarget.offsets`
    status,  # int32 [group]: set to 1 if a number is not finite
    stride_head,
    stride_dim,
    stride,
    layers,
    heads,
    keys,  # key dims of a head, then value dims
    values,
    head_bytes,
    unit_tokens,
    unit_bytes,
    head_blocks,  # heads that share a value scale
    HALVES: tl.constexpr,  # keys and values, or one vector
    LEVEL: tl.constexpr,  # number in `levels.LEVELS`
    KIND: tl.constexpr,
    PARTS: tl.constexpr,  # 0: keys alone, 1: values alone, 2: both
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,  # at least the dims of a head
    RUN: tl.constexpr,  # common divisor of offsets and strides
    WHOLE: tl.constexpr,  # True if DIMS equals the dims of a head
):
    """Expand a tile of tokens of a head of keys or values."""
    group = tl.program_id(2).to(tl.int64)
    tokens = tl.load(tokens_of + group)
    first = tl.program_id(0) * TOKENS
    if first >= tokens:
        return
    head = tl.program_id(1) % heads
    rest = tl.program_id(1) // heads
    if PARTS == 2:
        part, layer = rest % 2, rest // 2
    else:
        part, layer = PARTS, rest
    before = tl.where((part == 1) & (HALVES == 1), keys, 0)  # channels of the vector
    dims = tl.where(part == 0, keys, values)
    half = tl.where(HALVES == 2, part, 0)
    token = first + tl.arange(0, TOKENS)
    dim = tl.arange(0, DIMS)
    within = token < tokens
    there = within[:, None]
    if not WHOLE:
        there = there & (dim < dims)[None, :]
    payload = data + tl.multiple_of(tl.load(begins + group), 16)
    if LEVEL <= 2:
        # A unit is one token: [layer, K/V, head, dim].
        wide = keys + values if HALVES == 1 else keys
        channel = ((layer * HALVES + half) * heads + head) * wide + before + dim
        units = payload + head_bytes + token.to(tl.int64) * unit_bytes
        if LEVEL == 2:
            code = tl.load(units[:, None] + channel[None, :], mask=there, other=0).to(tl.int32)
            bad = (code & 0x7F) == 0x7F
            scale, special = _half(payload + 2 * channel, dim < dims)
            bad = bad | special[None, :]
            value = _small(code, 7, 0x3F80, 8) * (scale * 256.0)[None, :]
        else:
            units = units.to(tl.pointer_type(tl.int16))
            code = tl.load(units[:, None] + channel[None, :], mask=there, other=0)
            if LEVEL == 0:
                bad = (code & 0x7C00) == 0x7C00
                value = code.to(tl.float16, bitcast=True).to(tl.float32)
            else:
                bad = (code & 0x7F80) == 0x7F80
                value = (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        unit = token // unit_tokens
        nth = token - unit * unit_tokens
        own = tl.minimum(unit_tokens, tokens - unit * unit_tokens)  # tokens of the unit
        units = payload + head_bytes + unit.to(tl.int64) * unit_bytes
        channel = head * dims + dim
        count = own * heads * (keys + values)
        if HALVES == 2 and LEVEL != 3:
            # A byte has a key element and the value element at the same index.
            each = count // 2
            at = (nth * heads * dims)[:, None] + channel[None, :]
            shift = 4 * part
        else:
            position = tl.where(part == 1, own * heads * keys, 0) + nth * heads * dims
            at = position[:, None] + channel[None, :]
            each = count
            shift = 0
            if LEVEL != 3:
                each = (count + 1) // 2
                upper = at >= each[:, None]
                shift = tl.where(upper, 4, 0)
                at = tl.where(upper, at - each[:, None], at)
        if LEVEL == 5:
            shared = (own * heads * values + 31) // 32
            codes = units + layers * (heads * keys + shared) + layer * each
        else:
            codes = units + 4 * layers * (heads // head_blocks if PARTS else 0) + layer * each
        code = tl.load(codes[:, None] + at, mask=there, other=0).to(tl.int32) >> shift
        if LEVEL != 3:
            code = code & 15
        if LEVEL == 5:
            block = (nth[:, None] * heads * values + channel[None, :]) // 32
            place = layers * heads * keys + (layer * shared)[:, None] + block
            if part == 0:
                place = layer * heads * keys + channel[None, :] + tl.zeros((TOKENS, 1), tl.int32)
            stored = tl.load(units[:, None] + place, mask=there, other=0).to(tl.int32)
            scale = ((stored + 872) << 20).to(tl.float32, bitcast=True) * 16384.0
            value = _small(code, 9, 0x0E00, 12) * scale
            bad = code < 0
        else:
            every = (token >= 0)[:, None] & (dim >= 0)[None, :]
            if part == 0:
                place = 2 * (layer * heads * keys + channel)
                own_low, special = _half(payload + place, dim < dims)
                own_scale, more = _half(payload + place + 2 * layers * heads * keys, dim < dims)
                low, scale = tl.where(every, own_low[None, :], 0.0), tl.where(every, own_scale[None, :], 0.0)
                bad = every & (special | more)[None, :]
            else:
                blocks = heads // head_blocks
                shared = 2 * (layer * blocks + head // head_blocks)
                shared_low, odd = _half(units + shared, within)
                shared_scale, also = _half(units + shared + 2 * layers * blocks, within)
                low, scale = tl.where(every, shared_low[:, None], 0.0), tl.where(every, shared_scale[:, None], 0.0)
                bad = every & (odd | also)[:, None]
            value = code.to(tl.float32) * scale + low
    wrong = tl.max(tl.max((bad & there).to(tl.int32), 1), 0)
    tl.store(status + group, 1, mask=wrong != 0)
    out = tl.load(outs + group * (layers * HALVES) + layer * HALVES + half)
    offset = tl.load(offset_of + group * stride + token, mask=within, other=-1)
    offset = tl.multiple_of(offset, RUN)
    to = head.to(tl.int64) * stride_head + offset[:, None] + (before + dim).to(tl.int64)[None, :] * stride_dim
    store(out, to, value, there & (offset >= 0)[:, None], KIND, RUN)
