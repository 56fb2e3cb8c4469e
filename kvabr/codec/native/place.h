/* Rows of numbers: read as float32, and written as the element type of a cache. Included once for each instruction set, with
 * PATH(name) naming the functions. The loops are plain C, which compilers vectorise. Nothing here is rounded otherwise than
 * torch does it: to nearest, ties to even. */

/* `n` half-precision numbers; returns whether all are finite. */
static int PATH(load_f16)(const uint8_t *restrict from, float *restrict to, size_t n) {
    uint32_t bad = 0;
#ifdef PLACE_F16C
    size_t i = 0;
    const __m128i exponent = _mm_set1_epi16(0x7C00);
    __m128i worst = _mm_setzero_si128();
    for (; i + 8 <= n; i += 8) {
        __m128i h = _mm_loadu_si128((const __m128i *)(from + 2 * i));
        worst = _mm_or_si128(worst, _mm_cmpeq_epi16(_mm_and_si128(h, exponent), exponent));
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(h));
    }
    bad = (uint32_t)_mm_movemask_epi8(worst);
#else
    size_t i = 0;
#endif
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, from + 2 * i, 2);
        bad |= (h & 0x7C00) == 0x7C00;
        to[i] = number((uint32_t)(h & 0x7FFF) << 13) * 0x1p112f; /* exact, for subnormals too */
        to[i] = number(bits(to[i]) | (uint32_t)(h & 0x8000) << 16);
    }
    return !bad;
}

static int PATH(load_bf16)(const uint8_t *restrict from, float *restrict to, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, from + 2 * i, 2);
        bad |= (h & 0x7F80) == 0x7F80;
        to[i] = number((uint32_t)h << 16);
    }
    return !bad;
}

/* A copy of numbers of 16 bits, of which `mask` has the exponent's bits; returns whether all are finite. */
static int PATH(copy16)(const uint8_t *restrict from, uint8_t *restrict to, size_t n, uint16_t mask) {
    uint16_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, from + 2 * i, 2);
        memcpy(to + 2 * i, &h, 2);
        bad |= (uint16_t)-((h & mask) == mask);
    }
    return !bad;
}

#ifdef PLACE_F16C
/* Sixteen numbers, rounded to bfloat16. */
static inline __m256i PATH(rounded)(__m256 a, __m256 b) {
    const __m256i half = _mm256_set1_epi32(0x7FFF), one = _mm256_set1_epi32(1);
    __m256i x = _mm256_castps_si256(a), y = _mm256_castps_si256(b);
    x = _mm256_add_epi32(_mm256_add_epi32(x, half), _mm256_and_si256(_mm256_srli_epi32(x, 16), one));
    y = _mm256_add_epi32(_mm256_add_epi32(y, half), _mm256_and_si256(_mm256_srli_epi32(y, 16), one));
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_srli_epi32(x, 16), _mm256_srli_epi32(y, 16)), 0xD8);
}
#endif

static void PATH(store_bf16)(const float *restrict from, uint16_t *restrict to, size_t n) {
    size_t i = 0;
#ifdef PLACE_F16C
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(to + i), PATH(rounded)(_mm256_loadu_ps(from + i), _mm256_loadu_ps(from + i + 8)));
#endif
    for (; i < n; i++) {
        uint32_t x = bits(from[i]);
        to[i] = (uint16_t)((x + 0x7FFF + (x >> 16 & 1)) >> 16);
    }
}

/* Saturates. */
static void PATH(store_f16)(const float *restrict from, uint16_t *restrict to, size_t n) {
    size_t i = 0;
#ifdef PLACE_F16C
    const __m256 top = _mm256_set1_ps(65504.0f), bottom = _mm256_set1_ps(-65504.0f);
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(from + i), top), bottom);
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#endif
    for (; i < n; i++) {
        int32_t x = (int32_t)(bits(from[i]) & 0x7FFFFFFF), top = 0x477FE000; /* 65504 */
        x = x < top ? x : top;
        int32_t small = (int32_t)bits(number((uint32_t)x) + 0.5f) - 0x3F000000; /* of subnormals the addition rounds */
        int32_t large = (x + 0xFFF + (x >> 13 & 1) - (112 << 23)) >> 13;
        x = x < 113 << 23 ? small : large;
        to[i] = (uint16_t)((bits(from[i]) >> 16 & 0x8000) | (uint32_t)x);
    }
}

#ifdef PLACE_F16C
/* From half precision to bfloat16, for `n` that sixteen divides; returns whether all are finite. */
static int PATH(f16_to_bf16)(const uint8_t *restrict from, uint8_t *restrict to, size_t n) {
    const __m256i exponent = _mm256_set1_epi16(0x7C00);
    __m256i worst = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 16) {
        __m256i h = _mm256_loadu_si256((const __m256i *)(from + 2 * i));
        worst = _mm256_or_si256(worst, _mm256_cmpeq_epi16(_mm256_and_si256(h, exponent), exponent));
        __m256 a = _mm256_cvtph_ps(_mm256_castsi256_si128(h)), b = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
        _mm256_storeu_si256((__m256i *)(to + 2 * i), PATH(rounded)(a, b));
    }
    return _mm256_testz_si256(worst, worst);
}
#endif

/* Whether none of `n` numbers in E4M3 is NaN. */
static int PATH(all_numbers)(const uint8_t *restrict code, size_t n) {
    uint8_t bad = 0;
    for (size_t i = 0; i < n; i++)
        bad |= (uint8_t)-((code[i] & 0x7F) == 0x7F);
    return !bad;
}

/* What a code stands for. FP4 is 2^14 times too small and FP8 2^8 times, as if their bits were those of half precision. */
INLINE float PATH(meaning)(uint32_t code, int form) {
    static const float levels[16] = {0.0f,   0x1p-15f,  0x1p-14f,  0x3p-15f,  0x1p-13f,  0x3p-14f,  0x1p-12f,  0x3p-13f,
                                     -0.0f, -0x1p-15f, -0x1p-14f, -0x3p-15f, -0x1p-13f, -0x3p-14f, -0x1p-12f, -0x3p-13f};
    if (form == FP4)
        return levels[code];
    if (form == FP8) {
        float x = number((code & 0x7F) << 20) * 0x1p112f; /* exact, for subnormals too */
        return number(bits(x) | (code & 0x80) << 24);
    }
    return (float)(int)code;
}

/* Codes times a scale, integers plus an offset, as F32 or BF16 one after another; `each` says that every number has a scale
 * and an offset of its own. */
INLINE void PATH(dequantise)(const uint8_t *restrict code, const float *restrict scale, const float *restrict low,
                             uint8_t *restrict to, uint32_t kind, size_t n, int shift, int form, int each) {
    const uint32_t mask = form == INT8 || form == FP8 ? 255 : 15;
    const int real = form == FP4 || form == FP8;
    size_t i = 0;
#ifdef PLACE_F16C
    const __m128i used = _mm_set1_epi8((char)mask);
    const __m256i sign = _mm256_set1_epi16((short)0x8000), rest = _mm256_set1_epi16(form == FP8 ? 0x3F80 : 0x0E00);
    __m256 factor = _mm256_set1_ps(*scale), offset = _mm256_set1_ps(real ? 0.0f : *low);
    for (; i + 16 <= n; i += 16) {
        __m128i c = _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128((const __m128i *)(code + i)), shift), used);
        __m256 value[2];
        if (real) {
            __m256i w = _mm256_cvtepu8_epi16(c), up = _mm256_slli_epi16(w, form == FP8 ? 8 : 12);
            w = _mm256_and_si256(_mm256_slli_epi16(w, form == FP8 ? 7 : 9), rest);
            w = _mm256_or_si256(w, _mm256_and_si256(up, sign));
            value[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(w));
            value[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1));
        } else {
            value[0] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(c));
            value[1] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(c, 8)));
        }
        for (int half = 0; half < 2; half++) {
            if (each)
                factor = _mm256_loadu_ps(scale + i + 8 * half);
            if (each && !real)
                offset = _mm256_loadu_ps(low + i + 8 * half);
            value[half] = _mm256_mul_ps(value[half], factor);
            if (!real)
                value[half] = _mm256_add_ps(value[half], offset);
        }
        if (kind == BF16)
            _mm256_storeu_si256((__m256i *)(to + 2 * i), PATH(rounded)(value[0], value[1]));
        else {
            _mm256_storeu_ps((float *)(to + 4 * i), value[0]);
            _mm256_storeu_ps((float *)(to + 4 * i) + 8, value[1]);
        }
    }
#endif
    for (; i < n; i++) {
        float x = PATH(meaning)((uint32_t)code[i] >> shift & mask, form) * scale[each ? i : 0];
        if (!real)
            x += low[each ? i : 0];
        if (kind == BF16) {
            uint16_t small = (uint16_t)((bits(x) + 0x7FFF + (bits(x) >> 16 & 1)) >> 16);
            memcpy(to + 2 * i, &small, 2);
        } else
            memcpy(to + 4 * i, &x, 4);
    }
}

static void PATH(dequantise_as)(const uint8_t *code, const float *scale, const float *low, uint8_t *to, uint32_t kind,
                                size_t n, int shift, int form, int each) {
    /* A loop for each case, without branches. */
#define CASE(f, e)                                                                      \
    if (form == f && each == e) {                                                       \
        if (kind == BF16)                                                               \
            PATH(dequantise)(code, scale, low, to, BF16, n, shift, f, e);               \
        else                                                                            \
            PATH(dequantise)(code, scale, low, to, F32, n, shift, f, e);                \
        return;                                                                         \
    }
    CASE(INT8, 0)
    CASE(INT8, 1)
    CASE(INT4, 0)
    CASE(INT4, 1)
    CASE(FP4, 1)
    CASE(FP8, 1)
#undef CASE
}

/* One row of `n` numbers into a cache. */
static void PATH(store)(const float *restrict from, uint8_t *restrict to, uint32_t kind, ptrdiff_t step, size_t n) {
    uint16_t small[MAX_DIM];
    if (kind == F32 && step == 1)
        memcpy(to, from, n * sizeof *from);
    else if (kind == F32)
        for (size_t i = 0; i < n; i++)
            memcpy(to + (ptrdiff_t)(i * sizeof *from) * step, from + i, sizeof *from);
    else {
        uint16_t *row = step == 1 && !((uintptr_t)to & 1) ? (uint16_t *)to : small;
        (kind == F16 ? PATH(store_f16) : PATH(store_bf16))(from, row, n);
        if (row == small)
            for (size_t i = 0; i < n; i++)
                memcpy(to + (ptrdiff_t)(2 * i) * step, small + i, 2);
    }
}

/* One row of `n` codes into a cache: of the `all` codes from `code` on those from number `at`. If two share a byte, its
 * low half is one of the first half of all. */
static void PATH(place_codes)(const Cache *c, uint8_t *to, const uint8_t *code, size_t at, size_t all, size_t n,
                              const float *scale, const float *low, int form, int each) {
    float row[MAX_DIM];
    const int two = form == INT4 || form == FP4, direct = c->step[4] == 1 && c->kind != F16;
    const size_t half = (all + 1) / 2;
    for (size_t size; n; n -= size, at += size) {
        const size_t high = two && at >= half, place = high ? at - half : at;
        size = two && !high && n > half - at ? half - at : n;
        PATH(dequantise_as)(code + place, scale, low, direct ? to : (uint8_t *)row, direct ? c->kind : F32, size,
                            high ? 4 : 0, form, each);
        if (!direct)
            PATH(store)(row, to, c->kind, c->step[4], size);
        to += (ptrdiff_t)(size * (c->kind == F32 ? 4 : 2)) * c->step[4];
        if (each)
            scale += size;
        if (each && low)
            low += size;
    }
}

/* Tokens one after another, of each [layer, K/V, head, dim]; those of E4M3 have a scale of each channel. */
static int PATH(cast)(const Cache *c, const uint8_t *from, uint32_t kind, const float *scale) {
    float row[MAX_DIM];
    const size_t rows = c->layers * c->halves * c->heads, width = c->dim * (kind == E4M3 ? 1 : 2);
    const int plain = c->step[4] == 1 && !((uintptr_t)c->data % (c->kind == F32 ? 4 : 2));
    int good = 1;
    for (size_t first = 0; first < c->tokens && good; first += BLOCK) {
        size_t last = first + BLOCK < c->tokens ? first + BLOCK : c->tokens;
        for (size_t r = 0; r < rows; r++) {
            /* What is written might be what `c` points to, as far as compilers know: nothing of it is read for each row. */
            const ptrdiff_t step = c->step[3] * (c->kind == F32 ? 4 : 2);
            uint8_t *to = row_of(c, r / (c->halves * c->heads), r / c->heads % c->halves, r % c->heads, first);
            const uint8_t *source = from + width * (first * rows + r);
            for (size_t t = first; t < last; t++, to += step, source += width * rows) {
                if (kind == E4M3) {
                    good &= PATH(all_numbers)(source, c->dim);
                    PATH(place_codes)(c, to, source, 0, c->dim, c->dim, scale + r * c->dim, NULL, FP8, 1);
                } else if (plain && kind == c->kind)
                    good &= PATH(copy16)(source, to, c->dim, kind == F16 ? 0x7C00 : 0x7F80);
#ifdef PLACE_F16C
                else if (plain && kind == F16 && c->kind == BF16 && c->dim % 16 == 0)
                    good &= PATH(f16_to_bf16)(source, to, c->dim);
#endif
                else if (plain && c->kind == F32)
                    good &= (kind == F16 ? PATH(load_f16) : PATH(load_bf16))(source, (float *)to, c->dim);
                else {
                    good &= (kind == F16 ? PATH(load_f16) : PATH(load_bf16))(source, row, c->dim);
                    PATH(store)(row, to, c->kind, c->step[4], c->dim);
                }
            }
        }
    }
    return good;
}

/* FP4's scale of 8 bits, for what `meaning` returns. */
INLINE float PATH(scale_of)(uint8_t stored) { return number(((uint32_t)stored + (109 << 3)) << 20) * 0x1p14f; }

/* The scales of `n` numbers of FP4 from number `at` on, which each span of them has in common. */
static void PATH(spread_scales)(const uint8_t *restrict stored, size_t at, float *restrict to, size_t n) {
    for (size_t i = 0; i < n;) {
        const size_t span = (at + i) / SPAN, left = (span + 1) * SPAN - at, end = left < n ? left : n;
        const float scale = PATH(scale_of)(stored[span]);
        for (; i < end; i++)
            to[i] = scale;
    }
}

/* Rows of one head of keys (`each`) or values that are alike, whose elements lie one behind the other: most caches. A key's
 * code is in the low half of a byte, if two codes share it, and that of its value in the high one. */
INLINE int PATH(alike)(const Cache *c, const uint8_t *from, const Units *u, const float *restrict scale,
                       const float *restrict low, size_t l, size_t h, size_t first, size_t last, uint32_t kind, int form,
                       int each) {
    const size_t dim = c->dim, heads = c->heads, tokens = u->tokens, width = heads * dim, size = unit_bytes(c, u);
    const size_t code = scale_bytes(c, u) + l * code_bytes(c, u) + h * dim + (form == INT8 && !each ? tokens * width : 0);
    const size_t block = each ? 0 : 2 * (l * u->blocks + h / (heads / u->blocks)), other = 2 * c->layers * u->blocks;
    const ptrdiff_t step = c->step[3] * (kind == F32 ? 4 : 2);
    uint8_t *to = row_of(c, l, !each, h, first);
    float value[2], row[MAX_DIM];
    int good = 1;
    for (size_t t = first; t < last; t++, to += step) {
        const uint8_t *unit = from + t / tokens * size, *codes = unit + code + t % tokens * width;
        if (!each) {
            good &= PATH(load_f16)(unit + block, value, 1) & PATH(load_f16)(unit + block + other, value + 1, 1);
            low = value, scale = value + 1;
        }
        const int shift = form == INT4 && !each ? 4 : 0;
        if (kind == F16) {
            PATH(dequantise)(codes, scale, low, (uint8_t *)row, F32, dim, shift, form, each);
            PATH(store_f16)(row, (uint16_t *)to, dim);
        } else
            PATH(dequantise)(codes, scale, low, to, kind, dim, shift, form, each);
    }
    return good;
}

static int PATH(alike_as)(const Cache *c, const uint8_t *from, const Units *u, const float *scale, const float *low, size_t l,
                          size_t h, size_t first, size_t last, int each) {
    /* A loop for each case, without branches. */
#define CASE(n, f, e)                                      \
    if (c->kind == n && (int)u->form == f && each == e)     \
        return PATH(alike)(c, from, u, scale, low, l, h, first, last, n, f, e);
    CASE(BF16, INT8, 0)
    CASE(BF16, INT8, 1)
    CASE(BF16, INT4, 0)
    CASE(BF16, INT4, 1)
    CASE(F16, INT8, 0)
    CASE(F16, INT8, 1)
    CASE(F16, INT4, 0)
    CASE(F16, INT4, 1)
    CASE(F32, INT8, 0)
    CASE(F32, INT8, 1)
    CASE(F32, INT4, 0)
    CASE(F32, INT4, 1)
#undef CASE
    return 0;
}

/* Units one after another. `low` and `scale` are those of the keys, [layer, head, dim]; FP4 has them in its units. */
static int PATH(dequantised)(const Cache *c, const uint8_t *from, const Units *u, const float *low, const float *scale) {
    float value[2], each[MAX_DIM];
    const size_t dims[2] = {u->keys, values_of(c, u)}, width = c->heads * u->keys;
    const size_t size = unit_bytes(c, u), own = scale_bytes(c, u), layer = code_bytes(c, u), all = codes_of(c, u);
    const size_t spans = spans_of(c, u), per_block = u->blocks ? c->heads / u->blocks : 1;
    const int whole = c->step[4] == 1 && !((uintptr_t)c->data % (c->kind == F32 ? 4 : 2));
    const int plain = whole && c->halves == 2 && u->form <= INT4;
    int good = 1;
    for (size_t first = 0; first < c->tokens && good; first += BLOCK) {
        size_t last = first + BLOCK < c->tokens ? first + BLOCK : c->tokens;
        for (size_t l = 0; l < c->layers; l++)
            for (size_t k = 0; k < 2; k++)
                for (size_t h = 0; h < c->heads && dims[k]; h++) {
                    const uint8_t *known = NULL;
                    if (plain) {
                        const size_t channel = l * width + h * dims[0];
                        good &= PATH(alike_as)(c, from, u, scale + channel, low + channel, l, h, first, last, !k);
                        continue;
                    }
                    for (size_t t = first; t < last; t++) {
                        const uint8_t *unit = from + t / u->tokens * size, *code = unit + own + l * layer;
                        const size_t row = t % u->tokens * c->heads + h; /* of the unit's keys, or of its values */
                        const size_t at = (k ? u->tokens * width : 0) + row * dims[k];
                        uint8_t *to = row_of(c, l, c->halves == 2 ? k : 0, h, t);
                        if (c->halves == 1 && k)
                            to += (ptrdiff_t)(u->keys * (c->kind == F32 ? 4 : 2)) * c->step[4];
                        if (u->form == FP4) {
                            if (k)
                                PATH(spread_scales)(unit + c->layers * width + l * spans, row * dims[1], each, dims[1]);
                            else if (unit != known)
                                for (size_t i = 0; i < dims[0]; i++)
                                    each[i] = PATH(scale_of)(unit[l * width + h * dims[0] + i]);
                            known = unit;
                            PATH(place_codes)(c, to, code, at, all, dims[k], each, NULL, FP4, 1);
                        } else if (k) {
                            const uint8_t *shared = unit + 2 * (l * u->blocks + h / per_block);
                            good &= PATH(load_f16)(shared, value, 1);
                            good &= PATH(load_f16)(shared + 2 * c->layers * u->blocks, value + 1, 1);
                            PATH(place_codes)(c, to, code, at, all, dims[1], value + 1, value, (int)u->form, 0);
                        } else {
                            const size_t channel = l * width + h * dims[0];
                            PATH(place_codes)(c, to, code, at, all, dims[0], scale + channel, low + channel,
                                              (int)u->form, 1);
                        }
                    }
                }
    }
    return good;
}
