/* AVX-512 (F, BW, DQ, VL, VNNI): 64 lanes in four vectors of 32-bit states. */
#include "rans.h"

#ifdef HAVE_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c,bmi,bmi2,popcnt,prefer-vector-width=512")
#endif

#include "near_avx2.h"

#define INLINE static inline __attribute__((always_inline))
#define BOTH(a, b) _mm512_or_si512(a, _mm512_slli_epi32(b, 16)) /* two vectors of small numbers, as 16-bit halves */

/* Which of 16 lanes from `at` on take part in a step of n. */
INLINE __mmask16 active(uint32_t n, uint32_t at) {
    return n >= at + 16 ? 0xFFFF : n <= at ? 0 : (__mmask16)((1u << (n - at)) - 1);
}

/* The new state of 16 lanes: freq * (x >> 12) + place, then a word for each state that fell below 2^16. */
INLINE void advance(Reader *r, int v, __m512i x, __m512i freq, __m512i place, __mmask16 on) {
    __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(x, PROBABILITY_BITS)), place);
    __mmask16 low = _mm512_mask_cmplt_epu32_mask(on, next, _mm512_set1_epi32(LOW));
    __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)r->word));
    next = _mm512_mask_or_epi32(next, low, _mm512_slli_epi32(next, 16), _mm512_maskz_expand_epi32(low, words));
    r->word += 2 * __builtin_popcount(low);
    _mm512_store_si512(r->state + 16 * v, _mm512_mask_mov_epi32(x, on, next));
}

static uint64_t step_flags(Reader *r, const uint16_t *chance, uint32_t n) {
    uint64_t bits = 0;
    for (int v = 0; v < 4; v++) {
        __mmask16 on = active(n, 16 * v);
        __m512i x = _mm512_load_si512(r->state + 16 * v);
        __m512i slot = _mm512_and_si512(x, _mm512_set1_epi32(TOTAL - 1));
        __m512i c = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(chance + 16 * v)));
        __mmask16 one = _mm512_mask_cmplt_epi32_mask(on, slot, c);
        __m512i freq = _mm512_mask_mov_epi32(_mm512_sub_epi32(_mm512_set1_epi32(TOTAL), c), one, c);
        __m512i place = _mm512_mask_mov_epi32(_mm512_sub_epi32(slot, c), one, slot);
        advance(r, v, x, freq, place, on);
        bits |= (uint64_t)one << 16 * v;
    }
    return bits;
}

typedef struct {
    __m512i value[4]; /* 32 bits each */
    int escaped;
} Step;

/* Lookup results of 16 states: entries as in Depth.lookup, but with the place still to be added if flat. */
INLINE void take(Reader *r, Step *step, int v, __m512i x, __m512i slot, __m512i found, int flat, __mmask16 on) {
    const __m512i twelve = _mm512_set1_epi32(TOTAL - 1);
    __m512i middle = _mm512_and_si512(_mm512_srli_epi32(found, 12), twelve);
    __m512i place = flat ? _mm512_sub_epi32(slot, middle) : middle;
    step->value[v] = _mm512_srai_epi32(found, 24);
    step->escaped |= _mm512_mask_cmpeq_epi32_mask(on, step->value[v], _mm512_set1_epi32(ESCAPE));
    advance(r, v, x, _mm512_and_si512(found, twelve), place, on);
}

INLINE __m512i counted(__m512i slots, __m512i start, __m512i so_far) {
    __mmask32 beyond = _mm512_cmpge_epi16_mask(slots, start);
    return _mm512_mask_add_epi16(so_far, beyond, so_far, _mm512_set1_epi16(1));
}

/* One step of a row; `context` are four vectors of 0, 1 or 2, if there are any. */
INLINE void step_row(Reader *r, Step *step, const Flat *flat, const uint32_t *lookup, const __m512i *context, uint32_t n) {
    __m512i x[4], slot[4];
    for (int v = 0; v < 4; v++) {
        x[v] = _mm512_load_si512(r->state + 16 * v);
        slot[v] = _mm512_and_si512(x[v], _mm512_set1_epi32(TOTAL - 1));
    }
    step->escaped = 0;
    if (!flat) {
        for (int v = 0; v < 4; v++) {
            __m512i at = context ? _mm512_add_epi32(slot[v], _mm512_slli_epi32(context[v], PROBABILITY_BITS)) : slot[v];
            take(r, step, v, x[v], slot[v], _mm512_i32gather_epi32(at, lookup, 4), 0, active(n, 16 * v));
        }
        return;
    }
    __m512i both[2] = {BOTH(slot[0], slot[1]), BOTH(slot[2], slot[3])};
    __m512i symbol[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    if (context) {
        __m512i which[2] = {BOTH(context[0], context[1]), BOTH(context[2], context[3])};
        for (int j = 0; j + 1 < flat->symbols; j++) {
            __m512i start = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)flat->start3[j]));
            symbol[0] = counted(both[0], _mm512_permutexvar_epi16(which[0], start), symbol[0]);
            symbol[1] = counted(both[1], _mm512_permutexvar_epi16(which[1], start), symbol[1]);
        }
        for (int h = 0; h < 2; h++)
            symbol[h] = _mm512_add_epi16(symbol[h], _mm512_slli_epi16(which[h], 3));
    } else {
        for (int j = 0; j + 1 < flat->symbols; j++) {
            __m512i start = _mm512_set1_epi16(flat->start[j]);
            symbol[0] = counted(both[0], start, symbol[0]);
            symbol[1] = counted(both[1], start, symbol[1]);
        }
    }
    __m512i front = _mm512_loadu_si512(flat->entry), back = _mm512_loadu_si512(flat->entry + 16);
    for (int v = 0; v < 4; v++) {
        __m512i at = v % 2 ? _mm512_srli_epi32(symbol[v / 2], 16) : symbol[v / 2];
        take(r, step, v, x[v], slot[v], _mm512_permutex2var_epi32(front, at, back), 1, active(n, 16 * v));
    }
}

static __attribute__((noinline)) int patch(Reader *r, int16_t *value, uint32_t n) {
    for (uint32_t lane = 0; lane < n; lane++)
        if (value[lane] == ESCAPE && reader_escape(r, value + lane))
            return BAD_ESCAPE;
    return OK;
}

INLINE int rows_base(Reader *r, const Flat *flat, const uint32_t *lookup, int16_t *row, uint32_t tokens) {
    Step step;
    uint32_t at = 0;
    for (; at + LANES <= tokens; at += LANES) {
        READER_READY(r);
        step_row(r, &step, flat, lookup, NULL, LANES);
        for (int v = 0; v < 4; v++)
            _mm256_storeu_si256((__m256i *)(row + at + 16 * v), _mm512_cvtepi32_epi16(step.value[v]));
        if (step.escaped && patch(r, row + at, LANES))
            return BAD_ESCAPE;
    }
    if (at < tokens) {
        uint32_t n = tokens - at;
        READER_READY(r);
        step_row(r, &step, flat, lookup, NULL, n);
        for (int v = 0; v < 4; v++)
            _mm512_mask_cvtepi32_storeu_epi16(row + at + 16 * v, active(n, 16 * v), step.value[v]);
        if (step.escaped && patch(r, row + at, n))
            return BAD_ESCAPE;
    }
    return OK;
}

static int row_base(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens) {
    if (d->flat[which].symbols)
        return rows_base(r, &d->flat[which], NULL, row, tokens);
    return rows_base(r, NULL, d->own.lookup + (size_t)which * TOTAL, row, tokens);
}

INLINE int refine_step(Reader *r, const Flat *flat, const uint32_t *lookup, int16_t *row, uint32_t n) {
    Step step;
    __m512i context[4];
    __m256i below[4], add[4];
    READER_READY(r);
    for (int v = 0; v < 4; v++) {
        below[v] = n == LANES ? _mm256_loadu_si256((const __m256i *)(row + 16 * v))
                              : _mm256_maskz_loadu_epi16(active(n, 16 * v), row + 16 * v);
        context[v] = _mm512_cvtepu16_epi32(_mm256_min_epu16(_mm256_abs_epi16(below[v]), _mm256_set1_epi16(2)));
    }
    step_row(r, &step, flat, lookup, context, n);
    for (int v = 0; v < 4; v++)
        add[v] = _mm512_cvtepi32_epi16(step.value[v]);
    if (__builtin_expect(step.escaped, 0)) {
        int16_t values[LANES] __attribute__((aligned(32)));
        memcpy(values, add, sizeof values);
        if (patch(r, values, n))
            return BAD_ESCAPE;
        memcpy(add, values, sizeof values);
    }
    for (int v = 0; v < 4; v++) {
        __m256i b = below[v];
        __m256i change = _mm256_mask_sub_epi16(add[v], _mm256_movepi16_mask(b), _mm256_setzero_si256(), add[v]);
        __m256i sum = _mm256_adds_epi16(_mm256_adds_epi16(_mm256_adds_epi16(b, b), b), change);
        if (n == LANES)
            _mm256_storeu_si256((__m256i *)(row + 16 * v), sum);
        else
            _mm256_mask_storeu_epi16(row + 16 * v, active(n, 16 * v), sum);
    }
    return OK;
}

INLINE int rows_refine(Reader *r, const Flat *flat, const uint32_t *lookup, int16_t *row, uint32_t tokens) {
    uint32_t at = 0;
    int error = OK;
    for (; at + LANES <= tokens && !error; at += LANES)
        error = refine_step(r, flat, lookup, row + at, LANES);
    if (at < tokens && !error)
        error = refine_step(r, flat, lookup, row + at, tokens - at);
    return error;
}

static int row_refine(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens) {
    if (d->flat[which].symbols)
        return rows_refine(r, &d->flat[which], NULL, row, tokens);
    return rows_refine(r, NULL, d->own.lookup + (size_t)which * 3 * TOTAL, row, tokens);
}

/* 32 lanes of a step, in vectors v and v + 1, of tokens that refer to another, by comparing; returns whether any escaped. */
INLINE int half_near(Reader *r, Near *near, const NearFlat *flat, int radius, int v, uint32_t n) {
    __m512i x[2], slot[2], which[2];
    for (int h = 0; h < 2; h++) {
        x[h] = _mm512_load_si512(r->state + 16 * (v + h));
        slot[h] = _mm512_and_si512(x[h], _mm512_set1_epi32(TOTAL - 1));
        which[h] = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(near->context + 16 * (v + h))));
    }
    __m512i both = BOTH(slot[0], slot[1]), contexts = BOTH(which[0], which[1]), symbol = _mm512_setzero_si512();
    __m512i from = symbol, to = _mm512_set1_epi16(TOTAL); /* of the symbol */
    for (int j = 0; j + 1 < flat->symbols; j++) {
        __m512i start = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)flat->start[j]));
        start = _mm512_permutexvar_epi16(contexts, start);
        __mmask32 beyond = _mm512_cmpge_epi16_mask(both, start);
        symbol = _mm512_mask_add_epi16(symbol, beyond, symbol, _mm512_set1_epi16(1));
        from = _mm512_mask_mov_epi16(from, beyond, start); /* starts ascend */
        to = _mm512_mask_min_epi16(to, (__mmask32)~beyond, to, start);
    }
    __m512i freq = _mm512_sub_epi16(to, from), place = _mm512_sub_epi16(both, from), low = _mm512_set1_epi32(0xFFFF);
    advance(r, v, x[0], _mm512_and_si512(freq, low), _mm512_and_si512(place, low), active(n, 16 * v));
    advance(r, v + 1, x[1], _mm512_srli_epi32(freq, 16), _mm512_srli_epi32(place, 16), active(n, 16 * (v + 1)));
    __mmask32 escaped = _mm512_cmpeq_epi16_mask(symbol, _mm512_set1_epi16((short)(flat->symbols - 1)));
    __m512i value = _mm512_sub_epi16(symbol, _mm512_set1_epi16((short)radius));
    value = _mm512_mask_mov_epi16(value, escaped, _mm512_set1_epi16(ESCAPE));
    _mm256_store_si256((__m256i *)(near->value + 16 * v), _mm512_cvtepi32_epi16(value));
    _mm256_store_si256((__m256i *)(near->value + 16 * (v + 1)), _mm512_cvtepi32_epi16(_mm512_srli_epi32(value, 16)));
    return escaped != 0;
}

static int row_near(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens, const Lanes *lanes) {
    const NearFlat *flat = d->near_flat + which;
    uint32_t n = tokens - LANES;
    Near near;
    int escaped = 0;
    near_begin(&near, d, row, row + LANES, n, lanes);
    READER_READY(r);
    if (flat->symbols) {
        for (int v = 0; v < 4; v += 2)
            escaped |= half_near(r, &near, flat, d->radius[which], v, n);
    } else {
        Step step;
        __m512i context[4];
        for (int v = 0; v < 4; v++)
            context[v] = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(near.context + 16 * v)));
        step_row(r, &step, NULL, d->near.lookup + (size_t)which * d->near.contexts * TOTAL, context, n);
        for (int v = 0; v < 4; v++)
            _mm256_store_si256((__m256i *)(near.value + 16 * v), _mm512_cvtepi32_epi16(step.value[v]));
        escaped = step.escaped;
    }
    if (escaped && patch(r, near.value, n))
        return BAD_ESCAPE;
    near_end(&near, row, n);
    return OK;
}

/* The sums are separate variables and the instructions explicit, because otherwise compilers (GCC 12) keep moving them
 * between registers, or to memory. */
#define EACH_TOKEN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

static void product(const int16_t *panel, const uint32_t *list, uint32_t n, const uint32_t *z, int32_t *out) {
#define BEGIN(t) __m512i first##t = _mm512_setzero_si512(), second##t = first##t;
    EACH_TOKEN(BEGIN)
    for (uint32_t j = 0; j < n; j++, z += TOKENS) {
        const int16_t *pair = panel + (size_t)list[j] * OUTPUTS * 2;
        __m512i first = _mm512_load_si512(pair), second = _mm512_load_si512(pair + 32), value;
#define ADD(t) \
    value = _mm512_set1_epi32((int)z[t]); \
    __asm__("vpdpwssd %2, %1, %0" : "+v"(first##t) : "v"(first), "v"(value)); \
    __asm__("vpdpwssd %2, %1, %0" : "+v"(second##t) : "v"(second), "v"(value));
        EACH_TOKEN(ADD)
    }
#define END(t) \
    _mm512_store_si512(out + t * OUTPUTS, first##t); \
    _mm512_store_si512(out + t * OUTPUTS + 16, second##t);
    EACH_TOKEN(END)
}

/* The same with bytes, four components at a time, added to out. */
static void product8(const uint8_t *panel, const uint32_t *list, uint32_t n, const uint32_t *z, const int32_t *offset, int32_t gain,
                     int32_t *out) {
#define BEGIN8(t) __m512i first##t = _mm512_set1_epi32(offset[t]), second##t = first##t;
    EACH_TOKEN(BEGIN8)
    for (uint32_t j = 0; j < n; j++, z += TOKENS) {
        const uint8_t *four = panel + (size_t)list[j] * OUTPUTS * 4;
        __m512i first = _mm512_load_si512(four), second = _mm512_load_si512(four + 64), value;
#define ADD8(t) \
    value = _mm512_set1_epi32((int)z[t]); \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(first##t) : "v"(first), "v"(value)); \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(second##t) : "v"(second), "v"(value));
        EACH_TOKEN(ADD8)
    }
    const __m512i times = _mm512_set1_epi32(gain);
#define END8(t) \
    _mm512_store_si512(out + t * OUTPUTS, _mm512_add_epi32(_mm512_load_si512(out + t * OUTPUTS), _mm512_mullo_epi32(first##t, times))); \
    _mm512_store_si512(out + t * OUTPUTS + 16, \
                       _mm512_add_epi32(_mm512_load_si512(out + t * OUTPUTS + 16), _mm512_mullo_epi32(second##t, times)));
    EACH_TOKEN(END8)
}

static void to_half(const float *from, uint16_t *to, uint32_t n) {
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 on = active(n, i);
        __m256i half = _mm512_cvtps_ph(_mm512_maskz_loadu_ps(on, from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_mask_storeu_epi16(to + i, on, half);
    }
}

#define VECTOR_ENCODER
struct Writer;
static void put_flags(struct Writer *, const uint16_t *chance, const uint8_t *set, uint32_t n);
static void put_row(struct Writer *, const Depth *, const Tables *, uint32_t which, const int16_t *value, const uint8_t *context,
                    uint32_t tokens);
static void quantised(const float *from, const Quantiser *, const int16_t *keep, uint32_t tokens, int16_t *index);
struct Order;
static const int16_t *permuted(const int16_t *from, const struct Order *, uint32_t tokens, int16_t *to);
#include "encode.h"

static const int16_t *permuted(const int16_t *from, const Order *order, uint32_t tokens, int16_t *to) {
    if (tokens != TILE)
        return scattered(from, order, tokens, to);
    __m512i part[4];
    for (int i = 0; i < 4; i++)
        part[i] = _mm512_loadu_si512(from + 32 * i);
    for (int i = 0; i < 4; i++) {
        __m512i place = _mm512_load_si512(order->place + 32 * i);
        __m512i low = _mm512_permutex2var_epi16(part[0], place, part[1]), high = _mm512_permutex2var_epi16(part[2], place, part[3]);
        __mmask32 second = _mm512_test_epi16_mask(place, _mm512_set1_epi16(64));
        _mm512_storeu_si512(to + 32 * i, _mm512_mask_mov_epi16(low, second, high));
    }
    return to;
}
/* 16 lanes of a step: words from states that would overflow, then the symbols. */
INLINE void put(Writer *w, int v, __m512i freq, __m512i start, __mmask16 on) {
    __m512i before = _mm512_load_si512(w->state + 16 * v);
    __mmask16 full = _mm512_mask_cmpge_epu32_mask(on, before, _mm512_slli_epi32(freq, 32 - PROBABILITY_BITS));
    int count = __builtin_popcount(full);
    __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, before));
    w->word -= 2 * count;
    _mm256_mask_storeu_epi16(w->word, (__mmask16)((1u << count) - 1), words);
    __m512i x = _mm512_mask_srli_epi32(before, full, before, 16);
    /* Now x / freq is below 2^20: float32 is off by at most one. */
    __m512i quotient = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_cvtepu32_ps(x), _mm512_cvtepi32_ps(freq)));
    __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, freq));
    __mmask16 over = _mm512_movepi32_mask(rest);
    quotient = _mm512_mask_sub_epi32(quotient, over, quotient, _mm512_set1_epi32(1));
    rest = _mm512_mask_add_epi32(rest, over, rest, freq);
    __mmask16 under = _mm512_cmpge_epi32_mask(rest, freq);
    quotient = _mm512_mask_add_epi32(quotient, under, quotient, _mm512_set1_epi32(1));
    rest = _mm512_mask_sub_epi32(rest, under, rest, freq);
    x = _mm512_add_epi32(_mm512_slli_epi32(quotient, PROBABILITY_BITS), _mm512_add_epi32(rest, start));
    _mm512_store_si512(w->state + 16 * v, _mm512_mask_mov_epi32(before, on, x));
}

static void quantised(const float *from, const Quantiser *q, const int16_t *keep, uint32_t tokens, int16_t *index) {
    const __m512 step = _mm512_set1_ps(q->step), dead = _mm512_set1_ps(q->dead), minus = _mm512_set1_ps(-q->dead);
    const __m512 top = _mm512_set1_ps(INT16_MAX), bottom = _mm512_set1_ps(-INT16_MAX);
    for (uint32_t t = 0; t < tokens; t += 16) {
        __mmask16 on = active(tokens, t);
        __m512 exact = _mm512_div_ps(_mm512_maskz_loadu_ps(on, from + t), step);
        exact = _mm512_sub_ps(exact, _mm512_min_ps(_mm512_max_ps(exact, minus), dead));
        exact = _mm512_min_ps(_mm512_max_ps(exact, bottom), top);
        __m256i nearest = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(exact));
        _mm256_mask_storeu_epi16(index + t, on, _mm256_and_si256(nearest, _mm256_maskz_loadu_epi16(on, keep + t)));
    }
}

static void put_flags(Writer *w, const uint16_t *chance, const uint8_t *set, uint32_t n) {
    for (int v = 4; v-- > 0;) {
        __m512i c = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(chance + 16 * v)));
        __mmask16 one = _mm_test_epi8_mask(_mm_loadu_si128((const __m128i *)(set + 16 * v)), _mm_set1_epi8(-1));
        put(w, v, _mm512_mask_mov_epi32(_mm512_sub_epi32(_mm512_set1_epi32(TOTAL), c), one, c),
            _mm512_maskz_mov_epi32((__mmask16)~one, c), active(n, 16 * v));
    }
}

static void put_row(Writer *w, const Depth *d, const Tables *of, uint32_t which, const int16_t *value, const uint8_t *context,
                    uint32_t tokens) {
    uint32_t radius = d->radius[which], symbols = 2 * radius + 2;
    const uint32_t *coded = of->coded + (size_t)which * of->contexts * d->width;
    int few = of->contexts * symbols <= 32;
    __m512i front = _mm512_loadu_si512(coded), back = _mm512_loadu_si512(coded + 16);
    const __m512i last = _mm512_set1_epi32((int)symbols - 1), middle = _mm512_set1_epi32((int)radius);
    for (uint32_t v = (tokens + 15) / 16; v-- > 0;) {
        __mmask16 on = active(tokens, 16 * v);
        /* Unsigned: values below -radius wrap to large ones. */
        __m512i symbol = _mm512_add_epi32(_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(on, value + 16 * v)), middle);
        symbol = _mm512_min_epu32(symbol, last);
        if (of->contexts > 1) {
            __m512i table = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(on, context + 16 * v));
            symbol = _mm512_add_epi32(symbol, _mm512_mullo_epi32(table, _mm512_set1_epi32((int)symbols)));
        }
        /* Onto zeros: a gather depends on the previous content of its register. */
        __m512i found = few ? _mm512_permutex2var_epi32(front, symbol, back)
                            : _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), on, symbol, coded, 4);
        uint32_t escaped = _mm512_movepi32_mask(found) & on;
        while (__builtin_expect(escaped, 0)) {
            uint32_t lane = 31 - (uint32_t)__builtin_clz(escaped);
            w->escape -= 2;
            put16(w->escape, (uint16_t)value[16 * v + lane]);
            escaped &= ~(1u << lane);
        }
        const __m512i twelve = _mm512_set1_epi32(TOTAL - 1);
        put(w, (int)(v % 4), _mm512_and_si512(found, twelve), _mm512_and_si512(_mm512_srli_epi32(found, 12), twelve), on);
    }
}

#define PRODUCTS8
#include "alike.h"
#include "count.h"
#include "synth.h"
#include "tile.h"

const Path path_avx512 = {"avx512", 1, 1, decode_tile, synthesise, encode_stream, error_sum, alike,
                          count_row, count_near_row};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
