/* The encoder's transform with AVX-512 (F, BW, DQ, VL, VNNI). */
#include "analysis.h"

#ifdef HAVE_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c,prefer-vector-width=512")
#endif

#define WIDE 32
#define PANELS 2

/* 24 sums, and their operands, fill the registers. */
static void sums(const int16_t *a, const int16_t *b, uint32_t pairs, int32_t *out) {
    __m512i sum[2 * ROWS][2];
    const int16_t *below = a + (size_t)2 * ROWS * pairs;
#pragma GCC unroll 12
    for (int i = 0; i < 2 * ROWS; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_si512();
    for (uint32_t k = 0; k < pairs; k++, a += 2 * ROWS, below += 2 * ROWS, b += 2 * WIDE) {
        __m512i first = _mm512_load_si512(b), second = _mm512_load_si512(b + WIDE);
#pragma GCC unroll 12
        for (int i = 0; i < 2 * ROWS; i++) {
            int32_t pair;
            __builtin_memcpy(&pair, i < ROWS ? a + 2 * i : below + 2 * (i - ROWS), sizeof pair);
            __m512i value = _mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpwssd_epi32(sum[i][0], value, first);
            sum[i][1] = _mm512_dpwssd_epi32(sum[i][1], value, second);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < 2 * ROWS; i++) {
        _mm512_store_si512(out + i * WIDE, sum[i][0]);
        _mm512_store_si512(out + i * WIDE + 16, sum[i][1]);
    }
}

#include "analysis_x86.h"
#include "analysis_tile.h"

static int supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

const AnalysisPath analysis_avx512 = {"avx512", supported, run};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
