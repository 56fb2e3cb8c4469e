/* Contexts of tokens that refer to another (near.h), 32 at a time; for paths with AVX2. */
#include "near.h"

#include <immintrin.h>

typedef struct {
    int16_t below[LANES] __attribute__((aligned(64))); /* zeros beyond the tile, and if the depth refines none */
    int16_t value[LANES] __attribute__((aligned(64))); /* decoded, to be written by the path */
    uint8_t context[LANES] __attribute__((aligned(64)));
    int8_t minus[LANES] __attribute__((aligned(64))); /* -1: the sign is the other one */
} Near;

/* Copies n numbers; a whole step in vectors as wide as those that then read them: processors wait where compilers' narrower
 * stores were not all of what is read. */
static inline __attribute__((always_inline)) void copy_step(int16_t *to, const int16_t *from, uint32_t n) {
    if (n != LANES) {
        memcpy(to, from, n * sizeof *to);
        return;
    }
    for (int v = 0; v < LANES; v += 16)
        _mm256_storeu_si256((__m256i *)(to + v), _mm256_loadu_si256((const __m256i *)(from + v)));
}

static inline __attribute__((always_inline)) __m256i in_bytes(const int16_t *from) {
    __m256i first = _mm256_loadu_si256((const __m256i *)from), second = _mm256_loadu_si256((const __m256i *)(from + 16));
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xD8);
    return _mm256_max_epi8(packed, _mm256_set1_epi8(-127));
}

static inline __attribute__((always_inline)) __m256i bucket_of(const uint8_t *bucket, __m256i at) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bucket)), at);
}

/* Fills everything but the values, from the row's values in the first step and those below in the second (if refines). */
static inline __attribute__((always_inline)) void near_begin(Near *near, const Depth *d, const int16_t *row, const int16_t *below,
                                                             uint32_t n, const Lanes *lanes) {
    const __m256i zero = _mm256_setzero_si256();
    const int refines = d->contexts > 1;
    __m256i part[4];
    for (int half = 0; half < 2; half++) {
        __m256i packed = in_bytes(row + 32 * half);
        part[2 * half] = _mm256_permute2x128_si256(packed, packed, 0x00);
        part[2 * half + 1] = _mm256_permute2x128_si256(packed, packed, 0x11);
    }
    if (n != LANES || !refines)
        memset(near->below, 0, sizeof near->below);
    if (refines)
        copy_step(near->below, below, n);
    for (int half = 0; half < 2; half++) {
        __m256i r = zero, context, minus;
        for (int p = 0; p < 4; p++)
            r = _mm256_or_si256(r, _mm256_shuffle_epi8(part[p], _mm256_load_si256((const __m256i *)(lanes->shuffle[p] + 32 * half))));
        __m256i size = _mm256_abs_epi8(r);
        if (!refines) {
            minus = _mm256_cmpgt_epi8(zero, r);
            context = bucket_of(d->bucket[0], _mm256_min_epu8(size, _mm256_set1_epi8(15)));
        } else {
            __m256i b = in_bytes(near->below + 32 * half), none = _mm256_cmpeq_epi8(b, zero);
            minus = _mm256_cmpgt_epi8(zero, _mm256_blendv_epi8(b, r, none));
            r = _mm256_blendv_epi8(_mm256_sign_epi8(r, b), size, none);
            __m256i most = _mm256_min_epu8(_mm256_abs_epi8(b), _mm256_set1_epi8(42));
            __m256i apart = _mm256_subs_epi8(r, _mm256_add_epi8(_mm256_add_epi8(most, most), most));
            apart = _mm256_max_epi8(_mm256_min_epi8(apart, _mm256_set1_epi8(7)), _mm256_set1_epi8(-8));
            apart = _mm256_add_epi8(apart, _mm256_set1_epi8(8));
            context = _mm256_blendv_epi8(bucket_of(d->bucket[2], apart), bucket_of(d->bucket[1], apart),
                                         _mm256_cmpeq_epi8(most, _mm256_set1_epi8(1)));
            context = _mm256_blendv_epi8(context, bucket_of(d->bucket[0], apart), none);
        }
        _mm256_store_si256((__m256i *)(near->context + 32 * half), context);
        _mm256_store_si256((__m256i *)(near->minus + 32 * half), minus);
    }
}

/* Combines the values with what they are coded on top of. */
static inline __attribute__((always_inline)) void near_end(Near *near, int16_t *row, uint32_t n) {
    for (int v = 0; v < LANES; v += 16) {
        __m256i b = _mm256_load_si256((const __m256i *)(near->below + v));
        __m256i minus = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)(near->minus + v)));
        __m256i add = _mm256_load_si256((const __m256i *)(near->value + v));
        add = _mm256_sub_epi16(_mm256_xor_si256(add, minus), minus);
        b = _mm256_adds_epi16(_mm256_adds_epi16(_mm256_adds_epi16(b, b), b), add);
        _mm256_store_si256((__m256i *)(near->below + v), b);
    }
    copy_step(row + LANES, near->below, n);
}

/* For the encoder: the values to code, and their contexts. */
static void refer(const Depth *d, const int16_t *index, const int16_t *below, const Lanes *lanes, uint32_t tokens, int16_t *value,
                  uint8_t *context) {
    Near near;
    uint32_t n = tokens - LANES;
    near_begin(&near, d, index, below ? below + LANES : NULL, n, lanes);
    if (n != LANES)
        memset(near.value, 0, sizeof near.value);
    copy_step(near.value, index + LANES, n);
    for (int v = 0; v < LANES; v += 16) {
        __m256i b = _mm256_load_si256((const __m256i *)(near.below + v));
        __m256i minus = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)(near.minus + v)));
        __m256i change = _mm256_load_si256((const __m256i *)(near.value + v));
        change = _mm256_sub_epi16(change, _mm256_add_epi16(_mm256_add_epi16(b, b), b));
        change = _mm256_sub_epi16(_mm256_xor_si256(change, minus), minus);
        _mm256_store_si256((__m256i *)(near.value + v), change);
    }
    copy_step(value + LANES, near.value, n);
    memcpy(context + LANES, near.context, n);
}
