/* AVX2 (with F16C): 64 lanes in eight vectors of 32-bit states. */
#include "rans.h"

#ifdef HAVE_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2,popcnt")
#endif

#include "near_avx2.h"

#define INLINE static inline __attribute__((always_inline))
#define BOTH(a, b) _mm256_or_si256(a, _mm256_slli_epi32(b, 16)) /* two vectors of small numbers, as 16-bit halves */
#define VECTORS (LANES / 8)

/* For each subset of 8 lanes that take a word: which word goes to which lane, 4 bits per lane. */
static uint32_t spread[256];

static __attribute__((constructor)) void fill_spread(void) {
    for (uint32_t set = 0; set < 256; set++) {
        uint32_t next = 0;
        for (uint32_t lane = 0; lane < 8; lane++)
            spread[set] |= (set >> lane & 1 ? next++ : 0) << 4 * lane;
    }
}

/* All ones in the lanes, of 8 from `at` on, that take part in a step of n. */
INLINE __m256i active(uint32_t n, uint32_t at) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n - (int)at), lane);
}

/* The new state of 8 lanes: freq * (x >> 12) + place, then a word for each state that fell below 2^16. */
INLINE void advance(Reader *r, int v, __m256i x, __m256i freq, __m256i place, uint32_t n) {
    __m256i next = _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(x, PROBABILITY_BITS)), place);
    __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256());
    if (n != LANES)
        low = _mm256_and_si256(low, active(n, 8 * v));
    uint32_t set = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low));
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)r->word));
    __m256i from = _mm256_srlv_epi32(_mm256_set1_epi32((int)spread[set]), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    __m256i refilled = _mm256_or_si256(_mm256_slli_epi32(next, 16), _mm256_permutevar8x32_epi32(words, from));
    r->word += 2 * __builtin_popcount(set);
    next = _mm256_blendv_epi8(next, refilled, low);
    if (n != LANES)
        next = _mm256_blendv_epi8(x, next, active(n, 8 * v));
    _mm256_store_si256((__m256i *)(r->state + 8 * v), next);
}

static uint64_t step_flags(Reader *r, const uint16_t *chance, uint32_t n) {
    uint64_t bits = 0;
    for (int v = 0; v < VECTORS; v++) {
        __m256i x = _mm256_load_si256((const __m256i *)(r->state + 8 * v));
        __m256i slot = _mm256_and_si256(x, _mm256_set1_epi32(TOTAL - 1));
        __m256i c = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(chance + 8 * v)));
        __m256i one = _mm256_cmpgt_epi32(c, slot);
        __m256i freq = _mm256_blendv_epi8(_mm256_sub_epi32(_mm256_set1_epi32(TOTAL), c), c, one);
        __m256i place = _mm256_sub_epi32(slot, _mm256_andnot_si256(one, c));
        advance(r, v, x, freq, place, n);
        bits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(one)) << 8 * v;
    }
    return n == LANES ? bits : bits & ((UINT64_C(1) << n) - 1);
}

typedef struct {
    int16_t value[LANES] __attribute__((aligned(32)));
    int escaped;
} Step;

/* Two vectors of 32-bit values to 16 of 16 bits; notes escapes. */
INLINE void keep(Step *step, int v, __m256i first, __m256i second) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_srai_epi32(first, 24), _mm256_srai_epi32(second, 24)), 0xD8);
    step->escaped |= _mm256_movemask_epi8(_mm256_cmpeq_epi16(packed, _mm256_set1_epi16(ESCAPE)));
    _mm256_store_si256((__m256i *)(step->value + 8 * v), packed);
}

INLINE void take(Reader *r, int v, __m256i x, __m256i slot, __m256i found, int flat, uint32_t n) {
    const __m256i twelve = _mm256_set1_epi32(TOTAL - 1);
    __m256i middle = _mm256_and_si256(_mm256_srli_epi32(found, 12), twelve);
    advance(r, v, x, _mm256_and_si256(found, twelve), flat ? _mm256_sub_epi32(slot, middle) : middle, n);
}

/* Entry `at` (its low bits) of up to 32, in vectors of 8. */
INLINE __m256i entry_of(const Flat *flat, __m256i at) {
    __m256i found = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)flat->entry), at);
    for (int part = 1; part < FLAT_BASE / 8 && 8 * part < flat->symbols; part++) {
        __m256i other = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)(flat->entry + 8 * part)), at);
        found = _mm256_blendv_epi8(found, other, _mm256_cmpgt_epi32(at, _mm256_set1_epi32(8 * part - 1)));
    }
    return found;
}

/* 16 lanes of a step, in vectors v and v + 1, without contexts. */
INLINE void half_base(Reader *r, Step *step, const Flat *flat, const uint32_t *lookup, int v, uint32_t n) {
    __m256i x[2], slot[2], found[2];
    for (int h = 0; h < 2; h++) {
        x[h] = _mm256_load_si256((const __m256i *)(r->state + 8 * (v + h)));
        slot[h] = _mm256_and_si256(x[h], _mm256_set1_epi32(TOTAL - 1));
    }
    if (flat) {
        __m256i both = BOTH(slot[0], slot[1]), symbol = _mm256_setzero_si256();
        for (int j = 0; j + 1 < flat->symbols; j++) /* start <= slot: one more */
            symbol = _mm256_sub_epi16(symbol, _mm256_cmpgt_epi16(both, _mm256_set1_epi16((short)(flat->start[j] - 1))));
        found[0] = entry_of(flat, _mm256_and_si256(symbol, _mm256_set1_epi32(0xFFFF)));
        found[1] = entry_of(flat, _mm256_srli_epi32(symbol, 16));
    } else {
        for (int h = 0; h < 2; h++)
            found[h] = _mm256_i32gather_epi32((const int *)lookup, slot[h], 4);
    }
    for (int h = 0; h < 2; h++)
        take(r, v + h, x[h], slot[h], found[h], flat != NULL, n);
    keep(step, v, found[0], found[1]);
}

/* The same with contexts: 16 of them, 16 bits each. */
INLINE void half_refine(Reader *r, Step *step, const Flat *flat, const uint32_t *lookup, __m256i context, int v, uint32_t n) {
    __m256i x[2], slot[2], found[2];
    __m256i which[2] = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(context)),
                        _mm256_cvtepu16_epi32(_mm256_extracti128_si256(context, 1))};
    for (int h = 0; h < 2; h++) {
        x[h] = _mm256_load_si256((const __m256i *)(r->state + 8 * (v + h)));
        slot[h] = _mm256_and_si256(x[h], _mm256_set1_epi32(TOTAL - 1));
    }
    if (flat) {
        __m256i both = BOTH(slot[0], slot[1]), symbol = _mm256_setzero_si256(), contexts = BOTH(which[0], which[1]);
        /* Bytes 2c and 2c + 1 of a table of eight starts. */
        __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(contexts, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
        for (int j = 0; j + 1 < flat->symbols; j++) {
            __m256i starts = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)flat->start3[j]));
            symbol = _mm256_add_epi16(symbol, _mm256_cmpgt_epi16(_mm256_shuffle_epi8(starts, bytes), both)); /* -1 if not */
        }
        symbol = _mm256_add_epi16(symbol, _mm256_set1_epi16((short)(flat->symbols - 1)));
        for (int h = 0; h < 2; h++) {
            __m256i at = h ? _mm256_srli_epi32(symbol, 16) : symbol; /* a permutation uses three bits */
            __m256i zero = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)flat->entry), at);
            __m256i one = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)(flat->entry + 8)), at);
            __m256i two = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)(flat->entry + 16)), at);
            found[h] = _mm256_blendv_epi8(zero, one, _mm256_cmpeq_epi32(which[h], _mm256_set1_epi32(1)));
            found[h] = _mm256_blendv_epi8(found[h], two, _mm256_cmpeq_epi32(which[h], _mm256_set1_epi32(2)));
        }
    } else {
        for (int h = 0; h < 2; h++) {
            __m256i at = _mm256_add_epi32(slot[h], _mm256_slli_epi32(which[h], PROBABILITY_BITS));
            found[h] = _mm256_i32gather_epi32((const int *)lookup, at, 4);
        }
    }
    for (int h = 0; h < 2; h++)
        take(r, v + h, x[h], slot[h], found[h], flat != NULL, n);
    keep(step, v, found[0], found[1]);
}

static __attribute__((noinline)) int patch(Reader *r, int16_t *value, uint32_t n) {
    for (uint32_t lane = 0; lane < n; lane++)
        if (value[lane] == ESCAPE && reader_escape(r, value + lane))
            return BAD_ESCAPE;
    return OK;
}

INLINE int base_step(Reader *r, const Flat *flat, const uint32_t *lookup, int16_t *row, uint32_t n) {
    Step step;
    step.escaped = 0;
    READER_READY(r);
    for (int v = 0; v < VECTORS; v += 2)
        half_base(r, &step, flat, lookup, v, n);
    if (step.escaped && patch(r, step.value, n))
        return BAD_ESCAPE;
    copy_step(row, step.value, n);
    return OK;
}

INLINE int refine_step(Reader *r, const Flat *flat, const uint32_t *lookup, int16_t *row, uint32_t n) {
    Step step;
    int16_t below[LANES] __attribute__((aligned(32)));
    step.escaped = 0;
    if (n != LANES)
        memset(below, 0, sizeof below);
    copy_step(below, row, n);
    READER_READY(r);
    for (int v = 0; v < VECTORS; v += 2) {
        __m256i b = _mm256_load_si256((const __m256i *)(below + 8 * v));
        half_refine(r, &step, flat, lookup, _mm256_min_epu16(_mm256_abs_epi16(b), _mm256_set1_epi16(2)), v, n);
    }
    if (step.escaped && patch(r, step.value, n))
        return BAD_ESCAPE;
    for (int v = 0; v < VECTORS; v += 2) {
        __m256i b = _mm256_load_si256((const __m256i *)(below + 8 * v));
        __m256i add = _mm256_load_si256((const __m256i *)(step.value + 8 * v));
        __m256i minus = _mm256_srai_epi16(b, 15);
        add = _mm256_sub_epi16(_mm256_xor_si256(add, minus), minus);
        b = _mm256_adds_epi16(_mm256_adds_epi16(_mm256_adds_epi16(b, b), b), add);
        _mm256_store_si256((__m256i *)(below + 8 * v), b);
    }
    copy_step(row, below, n);
    return OK;
}

#define STEPS(STEP) \
    uint32_t at = 0; \
    int error = OK; \
    for (; at + LANES <= tokens && !error; at += LANES) \
        error = STEP(r, flat, lookup, row + at, LANES); \
    if (at < tokens && !error) \
        error = STEP(r, flat, lookup, row + at, tokens - at); \
    return error

INLINE int rows_base(Reader *r, const Flat *flat, const uint32_t *lookup, int16_t *row, uint32_t tokens) {
    STEPS(base_step);
}

INLINE int rows_refine(Reader *r, const Flat *flat, const uint32_t *lookup, int16_t *row, uint32_t tokens) {
    STEPS(refine_step);
}

static int row_base(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens) {
    if (d->flat[which].symbols)
        return rows_base(r, &d->flat[which], NULL, row, tokens);
    return rows_base(r, NULL, d->own.lookup + (size_t)which * TOTAL, row, tokens);
}

static int row_refine(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens) {
    if (d->flat[which].symbols)
        return rows_refine(r, &d->flat[which], NULL, row, tokens);
    return rows_refine(r, NULL, d->own.lookup + (size_t)which * 3 * TOTAL, row, tokens);
}

/* 16 lanes of a step, in vectors v and v + 1, of tokens that refer to another. */
INLINE void half_near(Reader *r, Near *near, const NearFlat *flat, const uint32_t *lookup, int radius, int v, uint32_t n,
                      int *escaped) {
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    __m256i x[2], slot[2], which[2], packed;
    for (int h = 0; h < 2; h++) {
        x[h] = _mm256_load_si256((const __m256i *)(r->state + 8 * (v + h)));
        slot[h] = _mm256_and_si256(x[h], _mm256_set1_epi32(TOTAL - 1));
        which[h] = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(near->context + 8 * (v + h))));
    }
    if (flat) {
        __m256i both = BOTH(slot[0], slot[1]), contexts = BOTH(which[0], which[1]);
        __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(contexts, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
        __m256i symbol = _mm256_set1_epi16((short)(flat->symbols - 1)), last = symbol;
        __m256i from = _mm256_setzero_si256(), to = _mm256_set1_epi16(TOTAL); /* of the symbol */
        for (int j = 0; j + 1 < flat->symbols; j++) {
            __m256i start = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)flat->start[j]));
            start = _mm256_shuffle_epi8(start, bytes);
            __m256i behind = _mm256_cmpgt_epi16(start, both);
            symbol = _mm256_add_epi16(symbol, behind);
            from = _mm256_max_epi16(from, _mm256_andnot_si256(behind, start));
            to = _mm256_min_epi16(to, _mm256_blendv_epi8(to, start, behind));
        }
        __m256i freq = _mm256_sub_epi16(to, from), place = _mm256_sub_epi16(both, from);
        advance(r, v, x[0], _mm256_and_si256(freq, low), _mm256_and_si256(place, low), n);
        advance(r, v + 1, x[1], _mm256_srli_epi32(freq, 16), _mm256_srli_epi32(place, 16), n);
        __m256i escape = _mm256_cmpeq_epi16(symbol, last);
        __m256i value = _mm256_sub_epi16(symbol, _mm256_set1_epi16((short)radius));
        value = _mm256_blendv_epi8(value, _mm256_set1_epi16(ESCAPE), escape);
        packed = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_slli_epi32(value, 16), 16), _mm256_srai_epi32(value, 16));
    } else {
        __m256i found[2];
        for (int h = 0; h < 2; h++) {
            __m256i at = _mm256_add_epi32(slot[h], _mm256_slli_epi32(which[h], PROBABILITY_BITS));
            found[h] = _mm256_i32gather_epi32((const int *)lookup, at, 4);
            take(r, v + h, x[h], slot[h], found[h], 0, n);
        }
        packed = _mm256_packs_epi32(_mm256_srai_epi32(found[0], 24), _mm256_srai_epi32(found[1], 24));
    }
    packed = _mm256_permute4x64_epi64(packed, 0xD8);
    *escaped |= _mm256_movemask_epi8(_mm256_cmpeq_epi16(packed, _mm256_set1_epi16(ESCAPE)));
    _mm256_store_si256((__m256i *)(near->value + 8 * v), packed);
}

INLINE int near_step(Reader *r, const Depth *d, const NearFlat *flat, const uint32_t *lookup, int radius, int16_t *row, uint32_t n,
                     const Lanes *lanes) {
    Near near;
    int escaped = 0;
    near_begin(&near, d, row, row + LANES, n, lanes);
    READER_READY(r);
    for (int v = 0; v < VECTORS; v += 2)
        half_near(r, &near, flat, lookup, radius, v, n, &escaped);
    if (escaped && patch(r, near.value, n))
        return BAD_ESCAPE;
    near_end(&near, row, n);
    return OK;
}

static int row_near(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens, const Lanes *lanes) {
    const NearFlat *flat = d->near_flat[which].symbols ? d->near_flat + which : NULL;
    const uint32_t *lookup = d->near.lookup + (size_t)which * d->near.contexts * TOTAL;
    int radius = d->radius[which];
    if (flat && tokens == TILE)
        return near_step(r, d, flat, NULL, radius, row, LANES, lanes);
    if (flat)
        return near_step(r, d, flat, NULL, radius, row, tokens - LANES, lanes);
    return near_step(r, d, NULL, lookup, radius, row, tokens - LANES, lanes);
}

/* 4 tokens by 16 outputs at a time: eight sums stay in registers. `dense`: the list has no gaps. */
INLINE void product_of(const int16_t *panel, const uint32_t *list, uint32_t n, const uint32_t *z, int32_t *out, int dense) {
    for (int part = 0; part < 4; part++) {
        const int16_t *half = panel + 32 * (part & 1) + (dense ? (size_t)list[0] * OUTPUTS * 2 : 0);
        const uint32_t *value = z + 4 * (part >> 1);
        __m256i sum[4][2];
        for (int t = 0; t < 4; t++)
            sum[t][0] = sum[t][1] = _mm256_setzero_si256();
        for (uint32_t j = 0; j < n; j++, value += TOKENS) {
            const __m256i *pair = (const __m256i *)(half + (size_t)(dense ? j : list[j]) * OUTPUTS * 2);
            __m256i first = _mm256_load_si256(pair), second = _mm256_load_si256(pair + 1);
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) {
                __m256i v = _mm256_set1_epi32((int)value[t]);
                sum[t][0] = _mm256_add_epi32(sum[t][0], _mm256_madd_epi16(first, v));
                sum[t][1] = _mm256_add_epi32(sum[t][1], _mm256_madd_epi16(second, v));
            }
        }
        for (int t = 0; t < 4; t++) {
            int32_t *to = out + (4 * (part >> 1) + t) * OUTPUTS + 16 * (part & 1);
            _mm256_store_si256((__m256i *)to, sum[t][0]);
            _mm256_store_si256((__m256i *)(to + 8), sum[t][1]);
        }
    }
}

static void product(const int16_t *panel, const uint32_t *list, uint32_t n, const uint32_t *z, int32_t *out) {
    if (n && list[n - 1] - list[0] == n - 1) /* it ascends */
        product_of(panel, list, n, z, out, 1);
    else
        product_of(panel, list, n, z, out, 0);
}

static void to_half(const float *from, uint16_t *to, uint32_t n) {
    for (uint32_t i = 0; i < n; i += 8) {
        float eight[8] = {0};
        uint32_t here = at_most(8, n - i);
        memcpy(eight, from + i, here * sizeof *eight);
        __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(eight), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        memcpy(to + i, &half, here * sizeof *to);
    }
}

#include "encode_avx2.h"
#include "alike.h"
#include "count.h"
#include "synth.h"
#include "tile.h"

const Path path_avx2 = {"avx2", 1, decode_tile, synthesise, encode_stream, error_sum, alike,
                        count_row, count_near_row};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
