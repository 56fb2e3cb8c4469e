/* The encoder's transform with AVX2. */
#include "analysis.h"

#ifdef HAVE_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

/* 12 sums, and their operands, fill the registers. */
static void sums(const int16_t *a, const int16_t *b, uint32_t pairs, int32_t *out) {
    __m256i sum[ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++)
        sum[i][0] = sum[i][1] = _mm256_setzero_si256();
    for (uint32_t k = 0; k < pairs; k++, a += 2 * ROWS, b += 2 * WIDE) {
        __m256i first = _mm256_load_si256((const __m256i *)b), second = _mm256_load_si256((const __m256i *)b + 1);
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++) {
            int32_t pair;
            __builtin_memcpy(&pair, a + 2 * i, sizeof pair);
            __m256i value = _mm256_set1_epi32(pair);
            sum[i][0] = _mm256_add_epi32(sum[i][0], _mm256_madd_epi16(value, first));
            sum[i][1] = _mm256_add_epi32(sum[i][1], _mm256_madd_epi16(value, second));
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        _mm256_store_si256((__m256i *)(out + i * WIDE), sum[i][0]);
        _mm256_store_si256((__m256i *)(out + i * WIDE) + 1, sum[i][1]);
    }
}

static void transposed(const float *from, size_t stride, float *to) {
    __m256 r[8], t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        r[i] = _mm256_loadu_ps(from + (size_t)i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * WIDE, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * WIDE, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

static inline __attribute__((always_inline)) void paired(const float *first, const float *second, const float *scale, int16_t *to) {
    const __m256i least = _mm256_set1_epi16(-32767);
    for (int t = 0; t < WIDE; t += 8) {
        __m256 by = _mm256_loadu_ps(scale + t);
        __m256i one = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(first + t), by));
        __m256i other = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(second + t), by));
        /* In each half of the vector four of one, then four of the other; saturated. */
        __m256i both = _mm256_max_epi16(_mm256_packs_epi32(one, other), least);
        const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3, 10, 11, 4,
                                               5, 12, 13, 6, 7, 14, 15);
        _mm256_storeu_si256((__m256i *)(to + 2 * t), _mm256_shuffle_epi8(both, order));
    }
}

static void halves(const uint16_t *from, uint32_t n, float *to) {
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < n; i++)
        to[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(from[i])));
}

static inline __attribute__((always_inline)) void squared(const int16_t *word, int32_t *energy) {
    for (int t = 0; t < WIDE; t += 8) {
        __m256i pair = _mm256_loadu_si256((const __m256i *)(word + 2 * t)), *to = (__m256i *)(energy + t);
        __m256i square = _mm256_srli_epi32(_mm256_madd_epi16(pair, pair), ENERGY_BITS);
        _mm256_storeu_si256(to, _mm256_add_epi32(_mm256_loadu_si256(to), square));
    }
}

static void scaled(float *panel, const float *mean, float scale, const float *column, uint32_t dim, const int32_t *on,
                   float *largest, float *power) {
    const __m256 there = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)on)), by = _mm256_set1_ps(scale);
    const __m256 top = _mm256_set1_ps(BIGGEST), bottom = _mm256_set1_ps(-BIGGEST), sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_loadu_ps(largest), sum = _mm256_loadu_ps(power);
    for (uint32_t i = 0; i < dim; i++, panel += WIDE) {
        __m256 value = _mm256_and_ps(_mm256_sub_ps(_mm256_loadu_ps(panel), _mm256_set1_ps(mean[i])), there);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(value, value));
        value = _mm256_min_ps(_mm256_mul_ps(value, by), top); /* the second of two if one is no number */
        value = _mm256_and_ps(_mm256_max_ps(value, bottom), there);
        most = _mm256_max_ps(_mm256_andnot_ps(sign, value), most);
        _mm256_storeu_ps(panel, _mm256_mul_ps(value, _mm256_set1_ps(column ? column[i] : 1)));
    }
    _mm256_storeu_ps(largest, most);
    _mm256_storeu_ps(power, sum);
}

static inline __attribute__((always_inline)) void times(const int32_t *sum, const float *unit, float row, float *to,
                                                        float *largest) {
    const __m256 by = _mm256_set1_ps(row), sign = _mm256_set1_ps(-0.0f);
    for (int t = 0; t < WIDE; t += 8) {
        __m256 value = _mm256_cvtepi32_ps(_mm256_load_si256((const __m256i *)(sum + t)));
        value = _mm256_mul_ps(_mm256_mul_ps(value, _mm256_loadu_ps(unit + t)), by);
        _mm256_storeu_ps(to + t, value);
        _mm256_storeu_ps(largest + t, _mm256_max_ps(_mm256_andnot_ps(sign, value), _mm256_loadu_ps(largest + t)));
    }
}

#include "analysis_tile.h"

static int supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2"); /* all that have it have F16C, which not every compiler can ask for */
}

const AnalysisPath analysis_avx2 = {"avx2", supported, run};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
