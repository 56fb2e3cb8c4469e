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

#define WIDE 16
#define PANELS 1

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

#include "analysis_x86.h"
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
