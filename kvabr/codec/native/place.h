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

/* Codes times a scale plus an offset, one of each per number. */
static void PATH(dequantise)(const uint8_t *restrict code, const float *restrict scale, const float *restrict low,
                             float *restrict to, size_t n, int shift, int mask) {
    for (size_t i = 0; i < n; i++)
        to[i] = (float)((int)code[i] >> shift & mask) * scale[i] + low[i];
}

/* The same, with one scale and one offset for all. */
static void PATH(dequantise_all)(const uint8_t *restrict code, float scale, float low, float *restrict to, size_t n,
                                 int shift, int mask) {
    for (size_t i = 0; i < n; i++)
        to[i] = (float)((int)code[i] >> shift & mask) * scale + low;
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

/* Both ways of dequantising, straight to bfloat16, for `n` that sixteen divides; `each` says that every number has a scale
 * and an offset of its own. */
static inline __attribute__((always_inline)) void PATH(dequantise_bf16)(
    const uint8_t *restrict code, const float *restrict scale, const float *restrict low, uint8_t *restrict to, size_t n,
    int shift, int mask, int each) {
    const __m128i used = _mm_set1_epi8((char)mask);
    __m256 factor[2] = {_mm256_set1_ps(*scale), _mm256_set1_ps(*scale)}, offset[2] = {_mm256_set1_ps(*low), _mm256_set1_ps(*low)};
    for (size_t i = 0; i < n; i += 16) {
        __m128i c = _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128((const __m128i *)(code + i)), shift), used);
        __m256 value[2] = {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(c)),
                           _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(c, 8)))};
        for (int half = 0; half < 2; half++) {
            if (each) {
                factor[half] = _mm256_loadu_ps(scale + i + 8 * half);
                offset[half] = _mm256_loadu_ps(low + i + 8 * half);
            }
            value[half] = _mm256_add_ps(_mm256_mul_ps(value[half], factor[half]), offset[half]);
        }
        _mm256_storeu_si256((__m256i *)(to + 2 * i), PATH(rounded)(value[0], value[1]));
    }
}
#endif

/* One row of `n` numbers into a cache. */
static void PATH(store)(const float *restrict from, uint8_t *restrict to, uint32_t kind, ptrdiff_t step, size_t n) {
    uint16_t small[MOST_DIM];
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

static int PATH(cast)(const Cache *c, const uint8_t *from, uint32_t kind) {
    float row[MOST_DIM];
    const size_t rows = c->layers * 2 * c->heads;
    const int plain = c->step[4] == 1 && !((uintptr_t)c->data % (c->kind == F32 ? 4 : 2));
    int good = 1;
    for (size_t first = 0; first < c->tokens && good; first += BLOCK) {
        size_t last = first + BLOCK < c->tokens ? first + BLOCK : c->tokens;
        for (size_t r = 0; r < rows; r++)
            for (size_t t = first; t < last; t++) {
                const uint8_t *source = from + 2 * c->dim * (t * rows + r);
                uint8_t *to = row_of(c, r / (2 * c->heads), r / c->heads % 2, r % c->heads, t);
                if (plain && kind == c->kind)
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
    return good;
}

static int PATH(affine)(const Cache *c, const uint8_t *from, const Units *u, const float *low, const float *scale) {
    float row[MOST_DIM], value[2];
    const size_t width = c->heads * c->dim, own = 4 * c->layers * u->blocks, per_block = c->heads / u->blocks;
    const size_t codes = width * (u->bits == 8 ? 2 : 1), layer = codes * u->tokens, size = own + c->layers * layer;
    const int mask = u->bits == 8 ? 255 : 15;
    int good = 1, fused = 0;
#ifdef PLACE_F16C
    fused = c->kind == BF16 && c->step[4] == 1 && c->dim % 16 == 0;
#endif
    for (size_t first = 0; first < c->tokens && good; first += BLOCK) {
        size_t last = first + BLOCK < c->tokens ? first + BLOCK : c->tokens;
        for (size_t l = 0; l < c->layers; l++)
            for (size_t k = 0; k < 2; k++)
                for (size_t h = 0; h < c->heads; h++)
                    for (size_t t = first; t < last; t++) {
                        const uint8_t *unit = from + t / u->tokens * size;
                        const uint8_t *code = unit + own + l * layer + t % u->tokens * width + h * c->dim;
                        if (u->bits == 8)
                            code += k * u->tokens * width;
                        int shift = u->bits == 4 && k ? 4 : 0;
                        uint8_t *to = row_of(c, l, k, h, t);
                        if (k) {
                            const uint8_t *at = unit + 2 * (l * u->blocks + h / per_block);
                            good &= PATH(load_f16)(at, value, 1);
                            good &= PATH(load_f16)(at + 2 * c->layers * u->blocks, value + 1, 1);
                        }
#ifdef PLACE_F16C
                        if (fused && k)
                            PATH(dequantise_bf16)(code, value + 1, value, to, c->dim, shift, mask, 0);
                        else if (fused)
                            PATH(dequantise_bf16)(code, scale + l * width + h * c->dim, low + l * width + h * c->dim, to,
                                                  c->dim, shift, mask, 1);
                        else
#endif
                        if (k == 0)
                            PATH(dequantise)(code, scale + l * width + h * c->dim, low + l * width + h * c->dim, row,
                                             c->dim, shift, mask);
                        else
                            PATH(dequantise_all)(code, value[1], value[0], row, c->dim, shift, mask);
                        if (!fused)
                            PATH(store)(row, to, c->kind, c->step[4], c->dim);
                    }
    }
    return good;
}
