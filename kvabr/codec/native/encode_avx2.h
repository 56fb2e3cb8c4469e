/* The encoder's steps with AVX2, 8 lanes at a time; included once, by path_avx2.c. */
#define VECTOR_ENCODER
#define QUICK_ROWS
struct Writer;
static void put_flags(struct Writer *, const uint16_t *chance, const uint8_t *set, uint32_t n);
static void put_row(struct Writer *, const Depth *, const Tables *, uint32_t which, const int16_t *value, const uint8_t *context,
                    uint32_t tokens);
static void quantised(const float *from, const Quantiser *, const int16_t *keep, uint32_t tokens, int16_t *index);
struct Order;
static const int16_t *permuted(const int16_t *from, const struct Order *, uint32_t tokens, int16_t *to);
struct Coded;
static int quick_row(const float *row, const struct Order *, float by, uint32_t tokens, int refines, struct Coded *to);
#include "encode.h"

/* The nearest indices, ties to even. Positive floats order like their bits. */
INLINE __m256i indices_of(__m256 value, const Quantiser *q) {
    __m256 exact = _mm256_div_ps(value, _mm256_set1_ps(q->step));
    __m256i size = _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), exact));
    __m256 dead = _mm256_castsi256_ps(_mm256_min_epi32(size, _mm256_castps_si256(_mm256_set1_ps(q->dead))));
    size = _mm256_castps_si256(_mm256_sub_ps(_mm256_castsi256_ps(size), dead));
    size = _mm256_min_epi32(size, _mm256_castps_si256(_mm256_set1_ps(INT16_MAX)));
    return _mm256_sign_epi32(_mm256_cvtps_epi32(_mm256_castsi256_ps(size)), _mm256_castps_si256(exact));
}

INLINE void quantise_two(const float *from, const Quantiser *q, const int16_t *keep, int16_t *index) {
    __m256i both = _mm256_packs_epi32(indices_of(_mm256_loadu_ps(from), q), indices_of(_mm256_loadu_ps(from + 8), q));
    both = _mm256_and_si256(_mm256_permute4x64_epi64(both, 0xD8), _mm256_loadu_si256((const __m256i *)keep));
    _mm256_storeu_si256((__m256i *)index, both);
}

static void quantised(const float *from, const Quantiser *q, const int16_t *keep, uint32_t tokens, int16_t *index) {
    uint32_t t = 0;
    for (; t + 16 <= tokens; t += 16)
        quantise_two(from + t, q, keep + t, index + t);
    if (t < tokens) {
        float values[16] = {0};
        int16_t kept[16] = {0};
        memcpy(values, from + t, (tokens - t) * sizeof *from);
        memcpy(kept, keep + t, (tokens - t) * sizeof *keep);
        quantise_two(values, q, kept, kept);
        memcpy(index + t, kept, (tokens - t) * sizeof *index);
    }
}

/* For each subset of 8 lanes that give a word: a shuffle of their words to the end of 16 bytes, in order. */
static uint8_t gathered[256][16] __attribute__((aligned(64)));

static __attribute__((constructor)) void fill_gathered(void) {
    for (uint32_t set = 0; set < 256; set++) {
        uint32_t next = 8;
        for (uint32_t lane = 8; lane-- > 0;)
            if (set >> lane & 1) {
                next--;
                gathered[set][2 * next] = (uint8_t)(2 * lane);
                gathered[set][2 * next + 1] = (uint8_t)(2 * lane + 1);
            }
    }
}

static const int16_t *permuted(const int16_t *from, const Order *order, uint32_t tokens, int16_t *to) {
    return scattered(from, order, tokens, to);
}

/* Eight indices by multiplying with 1 / step. Keeps the largest distance from an index: no number is larger than all. */
INLINE __m256i quick_indices(const float *from, __m256 by, __m256i *far) {
    __m256 exact = _mm256_mul_ps(_mm256_loadu_ps(from), by);
    __m256i index = _mm256_cvtps_epi32(exact);
    __m256 error = _mm256_sub_ps(exact, _mm256_cvtepi32_ps(index));
    *far = _mm256_max_epi32(*far, _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), error)));
    return index;
}

/* 32 of them in bytes, the nearest. */
INLINE __m256i quick_bytes(const float *from, __m256 by, __m256i *far) {
    __m256i low = _mm256_packs_epi32(quick_indices(from, by, far), quick_indices(from + 8, by, far));
    __m256i high = _mm256_packs_epi32(quick_indices(from + 16, by, far), quick_indices(from + 24, by, far));
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Whether the largest distance from an index is too near to half of one. */
INLINE int near_middle(__m256i far) {
    __m256i beyond = _mm256_cmpgt_epi32(far, _mm256_castps_si256(_mm256_set1_ps(0.5f - 1.0f / 8192)));
    return !_mm256_testz_si256(beyond, beyond);
}

INLINE int quick_vectors(const float *row, const Order *order, float by, uint32_t vectors, int refines, Coded *to) {
    const __m256i third = _mm256_set1_epi16(10923); /* of 2^15 */
    __m256i bytes[TILE / 32], far = _mm256_setzero_si256(), most = far, any = far, base = far, all = far;
#pragma GCC unroll 4
    for (uint32_t v = 0; v < vectors; v++)
        bytes[v] = quick_bytes(row + 32 * v, _mm256_set1_ps(by), &far), all = _mm256_or_si256(all, bytes[v]);
    if (_mm256_testz_si256(all, all)) { /* most rows of coarse depths */
        to->under = 0;
        return near_middle(far) ? -1 : 0;
    }
    for (uint32_t v = 0; v < vectors; v++) {
        __m256i moved = _mm256_setzero_si256(), size[2];
        for (uint32_t part = 0; part < 2 * vectors; part++) {
            __m256i some = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)bytes + part));
            __m256i where = _mm256_load_si256((const __m256i *)(order->shuffle[part] + 32 * v));
            moved = _mm256_or_si256(moved, _mm256_shuffle_epi8(some, where));
        }
        most = _mm256_max_epu8(most, _mm256_abs_epi8(moved));
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t at = 32 * v + 16 * half;
            __m256i index = _mm256_cvtepi8_epi16(half ? _mm256_extracti128_si256(moved, 1) : _mm256_castsi256_si128(moved));
            _mm256_storeu_si256((__m256i *)(to->index + at), index);
            if (!refines) {
                any = _mm256_or_si256(any, index);
                continue;
            }
            __m256i b = _mm256_mulhrs_epi16(index, third), minus = _mm256_srai_epi16(b, 15);
            __m256i change = _mm256_sub_epi16(index, _mm256_add_epi16(_mm256_add_epi16(b, b), b));
            any = _mm256_or_si256(any, change), base = _mm256_or_si256(base, b);
            size[half] = _mm256_min_epi16(_mm256_abs_epi16(b), _mm256_set1_epi16(2));
            _mm256_storeu_si256((__m256i *)(to->below + at), b);
            _mm256_storeu_si256((__m256i *)(to->value + at), _mm256_sub_epi16(_mm256_xor_si256(change, minus), minus));
        }
        if (refines) {
            __m256i context = _mm256_permute4x64_epi64(_mm256_packs_epi16(size[0], size[1]), 0xD8);
            _mm256_storeu_si256((__m256i *)(to->context + 32 * v), context);
        }
    }
    __m256i beyond = _mm256_cmpeq_epi8(_mm256_max_epu8(most, _mm256_set1_epi8(127)), most);
    to->under = !_mm256_testz_si256(base, base);
    return near_middle(far) || !_mm256_testz_si256(beyond, beyond) ? -1 : !_mm256_testz_si256(any, any);
}

/* Most rows need no division, no second rounding for the indices below, and only bytes to be reordered. Others are those with a
 * token within 2^-13 of the middle of two indices, or one beyond 126. Up to there the product with 1 / step differs from the
 * quotient by less than 2^-15, and where two indices below meet, two of these meet, but for 2^-13.5 in all. So both are what
 * `quantised` finds, and the one below is a third of the other, rounded. */
static int quick_row(const float *row, const Order *order, float by, uint32_t tokens, int refines, Coded *to) {
    if (tokens == TILE && refines)
        return quick_vectors(row, order, by, TILE / 32, 1, to);
    if (tokens == TILE)
        return quick_vectors(row, order, by, TILE / 32, 0, to);
    return tokens % 32 ? -1 : quick_vectors(row, order, by, tokens / 32, refines, to);
}

/* x / freq, or one less, for x < 2^20 freq: four roundings by at most 3.5 / 2^24 in all, and the divisor is 4 / 2^24 larger,
 * so that the float is less than the quotient, by less than a half. */
INLINE __m256i nearly_divided(__m256i x, __m256i freq) {
    __m256 numerator = _mm256_cvtepi32_ps(x), divisor = _mm256_cvtepi32_ps(freq);
    /* The conversion is that of signed numbers. */
    numerator = _mm256_blendv_ps(numerator, _mm256_add_ps(numerator, _mm256_set1_ps(4294967296.0f)), _mm256_castsi256_ps(x));
    divisor = _mm256_mul_ps(divisor, _mm256_set1_ps(1.0f + 1.0f / (1 << 22)));
    return _mm256_cvttps_epi32(_mm256_div_ps(numerator, divisor));
}

/* 8 lanes of a step of n: words from states that would overflow, then the symbols. Returns where the words begin. */
INLINE uint8_t *put(uint32_t *state, uint8_t *word, int v, __m256i freq, __m256i start, uint32_t n) {
    __m256i before = _mm256_load_si256((const __m256i *)(state + 8 * v));
    __m256i fits = _mm256_cmpgt_epi32(freq, _mm256_srli_epi32(before, 32 - PROBABILITY_BITS));
    uint32_t full = 0xFF & ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(fits));
    if (n != LANES)
        full &= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(active(n, 8 * v)));
    __m256i low = _mm256_and_si256(before, _mm256_set1_epi32(0xFFFF));
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    /* Below the words that count are others, which the next ones overwrite. */
    _mm_storeu_si128((__m128i *)(word - 16), _mm_shuffle_epi8(words, _mm_load_si128((const __m128i *)gathered[full])));
    __m256i x = _mm256_blendv_epi8(_mm256_srli_epi32(before, 16), before, fits);
    __m256i quotient = nearly_divided(x, freq), rest = _mm256_sub_epi32(x, _mm256_mullo_epi32(quotient, freq));
    /* One more: 2^12 more, and `freq` less of the rest. */
    __m256i more = _mm256_andnot_si256(_mm256_cmpgt_epi32(freq, rest), _mm256_sub_epi32(_mm256_set1_epi32(TOTAL), freq));
    x = _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(quotient, PROBABILITY_BITS), more), _mm256_add_epi32(rest, start));
    if (n != LANES)
        x = _mm256_blendv_epi8(before, x, active(n, 8 * v));
    _mm256_store_si256((__m256i *)(state + 8 * v), x);
    return word - 2 * __builtin_popcount(full);
}

static void put_flags(Writer *w, const uint16_t *chance, const uint8_t *set, uint32_t n) {
    for (int v = VECTORS; v-- > 0;) {
        __m256i c = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(chance + 8 * v)));
        __m256i zero = _mm256_cmpeq_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(set + 8 * v))), _mm256_setzero_si256());
        __m256i freq = _mm256_blendv_epi8(c, _mm256_sub_epi32(_mm256_set1_epi32(TOTAL), c), zero);
        w->word = put(w->state, w->word, v, freq, _mm256_and_si256(zero, c), n);
    }
}

static __attribute__((noinline)) void put_escapes(Writer *w, const __m256i *entry, const int16_t *value, uint32_t n) {
    for (uint32_t v = (n + 7) / 8; v-- > 0;) {
        uint32_t escaped = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(entry[v]));
        if (n < 8 * v + 8)
            escaped &= (1u << (n - 8 * v)) - 1;
        while (escaped) {
            uint32_t lane = 31 - (uint32_t)__builtin_clz(escaped);
            w->escape -= 2;
            put16(w->escape, (uint16_t)value[8 * v + lane]);
            escaped &= ~(1u << lane);
        }
    }
}

/* How symbols are coded: up to `parts` vectors of them in registers, or a table (parts 0). */
typedef struct {
    const uint32_t *coded;
    __m256i part[4], middle, last, symbols;
} Coding;

/* First all entries, then all states: chains of instructions that depend on each other are half as long, and more of them fit
 * into the processor. */
INLINE void put_step(Writer *w, const Coding *c, int parts, int contexts, const int16_t *value, const uint8_t *context, uint32_t n) {
    const __m256i twelve = _mm256_set1_epi32(TOTAL - 1);
    const uint32_t vectors = (n + 7) / 8;
    __m256i entry[VECTORS], escapes = _mm256_setzero_si256();
    for (uint32_t v = 0; v < vectors; v++) {
        /* Unsigned: values below -radius wrap to large ones. */
        __m256i symbol = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(value + 8 * v)));
        symbol = _mm256_min_epu32(_mm256_add_epi32(symbol, c->middle), c->last);
        if (contexts) {
            __m256i table = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(context + 8 * v)));
            symbol = _mm256_add_epi32(symbol, _mm256_mullo_epi32(table, c->symbols));
        }
        __m256i found;
        if (parts) {
            found = _mm256_permutevar8x32_epi32(c->part[0], symbol);
            for (int part = 1; part < parts; part++)
                found = _mm256_blendv_epi8(found, _mm256_permutevar8x32_epi32(c->part[part], symbol),
                                           _mm256_cmpgt_epi32(symbol, _mm256_set1_epi32(8 * part - 1)));
        } else {
            found = _mm256_i32gather_epi32((const int *)c->coded, symbol, 4);
        }
        escapes = _mm256_or_si256(escapes, found);
        entry[v] = found;
    }
    if (__builtin_expect(_mm256_movemask_ps(_mm256_castsi256_ps(escapes)), 0))
        put_escapes(w, entry, value, n);
    uint8_t *word = w->word;
    for (uint32_t v = vectors; v-- > 0;) {
        __m256i start = _mm256_and_si256(_mm256_srli_epi32(entry[v], 12), twelve);
        word = put(w->state, word, (int)v, _mm256_and_si256(entry[v], twelve), start, n);
    }
    w->word = word;
}

INLINE void put_steps(Writer *w, const Coding *c, int parts, int contexts, const int16_t *value, const uint8_t *context,
                      uint32_t tokens) {
    uint32_t left = tokens % LANES, at = tokens - left;
    if (left) { /* copied, since nothing need follow them */
        int16_t last[LANES] = {0};
        uint8_t tables[LANES] = {0};
        memcpy(last, value + at, left * sizeof *value);
        if (contexts)
            memcpy(tables, context + at, left);
        put_step(w, c, parts, contexts, last, tables, left);
    }
    for (; at; at -= LANES)
        put_step(w, c, parts, contexts, value + at - LANES, context + at - LANES, LANES);
}

static void put_row(Writer *w, const Depth *d, const Tables *of, uint32_t which, const int16_t *value, const uint8_t *context,
                    uint32_t tokens) {
    uint32_t radius = d->radius[which], symbols = 2 * radius + 2, entries = of->contexts * symbols;
    Coding c = {.coded = of->coded + (size_t)which * of->contexts * d->width};
    for (int part = 0; part < 4; part++)
        c.part[part] = _mm256_loadu_si256((const __m256i *)(c.coded + 8 * part));
    c.middle = _mm256_set1_epi32((int)radius), c.last = _mm256_set1_epi32((int)symbols - 1);
    c.symbols = _mm256_set1_epi32((int)symbols);
    if (of->contexts == 1) {
        if (entries <= 8)
            put_steps(w, &c, 1, 0, value, context, tokens);
        else if (entries <= 16)
            put_steps(w, &c, 2, 0, value, context, tokens);
        else
            put_steps(w, &c, 0, 0, value, context, tokens);
    } else if (entries <= 16) {
        put_steps(w, &c, 2, 1, value, context, tokens);
    } else if (entries <= 32) {
        put_steps(w, &c, 4, 1, value, context, tokens);
    } else {
        put_steps(w, &c, 0, 1, value, context, tokens);
    }
}
