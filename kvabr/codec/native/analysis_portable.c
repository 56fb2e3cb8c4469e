/* The encoder's transform in plain C, with the multiplication that every x86-64 has. */
#include "analysis.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#ifdef __SSE2__
static void sums(const int16_t *a, const int16_t *b, uint32_t pairs, int32_t *out) {
    for (int i = 0; i < ROWS; i++, a += 2) {
        __m128i sum[WIDE / 4];
        for (int v = 0; v < WIDE / 4; v++)
            sum[v] = _mm_setzero_si128();
        for (uint32_t k = 0; k < pairs; k++) {
            const __m128i *tokens = (const __m128i *)(b + (size_t)k * 2 * WIDE);
            int32_t pair;
            memcpy(&pair, a + (size_t)k * 2 * ROWS, sizeof pair);
            for (int v = 0; v < WIDE / 4; v++)
                sum[v] = _mm_add_epi32(sum[v], _mm_madd_epi16(_mm_set1_epi32(pair), _mm_loadu_si128(tokens + v)));
        }
        for (int v = 0; v < WIDE / 4; v++)
            _mm_storeu_si128((__m128i *)(out + i * WIDE) + v, sum[v]);
    }
}
#else
static void sums(const int16_t *a, const int16_t *b, uint32_t pairs, int32_t *out) {
    int32_t sum[ROWS][WIDE] = {{0}};
    for (uint32_t k = 0; k < pairs; k++, a += 2 * ROWS, b += 2 * WIDE)
        for (int i = 0; i < ROWS; i++)
            for (int t = 0; t < WIDE; t++)
                sum[i][t] += a[2 * i] * b[2 * t] + a[2 * i + 1] * b[2 * t + 1];
    memcpy(out, sum, sizeof sum);
}
#endif

static void times(const int32_t *sum, const float *unit, float row, float *to, float *largest) {
    for (int t = 0; t < WIDE; t++) {
        to[t] = (float)sum[t] * unit[t] * row;
        largest[t] = greatest(largest[t], to[t]);
    }
}

static void transposed(const float *from, size_t stride, float *to) {
    for (int i = 0; i < 8; i++)
        for (int t = 0; t < 8; t++)
            to[i * WIDE + t] = from[(size_t)t * stride + (size_t)i];
}

/* Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even. */
static inline int16_t nearest(float value) {
    value = (value + 12582912.0f) - 12582912.0f;
    value = value < 32767.0f ? value : 32767.0f;
    return (int16_t)(value > -32767.0f ? value : -32767.0f);
}

static void paired(const float *first, const float *second, const float *scale, int16_t *to) {
    for (int t = 0; t < WIDE; t++) {
        to[2 * t] = nearest(first[t] * scale[t]);
        to[2 * t + 1] = nearest(second[t] * scale[t]);
    }
}

static void scaled(float *panel, const float *mean, float scale, const float *column, uint32_t dim, const int32_t *on,
                   float *largest, float *power) {
    float most[GROUP_TOKENS], sum[GROUP_TOKENS];
    for (uint32_t t = 0; t < GROUP_TOKENS; t++)
        most[t] = largest[t], sum[t] = power[t];
    for (uint32_t i = 0; i < dim; i++, panel += WIDE) {
        float factor = column ? column[i] : 1;
        for (uint32_t t = 0; t < GROUP_TOKENS; t++) {
            float value = float_of(bits_of(panel[t] - mean[i]) & on[t]);
            sum[t] += value * value;
            value *= scale;
            value = value < BIGGEST ? value : BIGGEST; /* and what is no number */
            value = value > -BIGGEST ? value : -BIGGEST;
            value = float_of(bits_of(value) & on[t]);
            most[t] = greatest(most[t], value);
            panel[t] = value * factor;
        }
    }
    memcpy(largest, most, sizeof most);
    memcpy(power, sum, sizeof sum);
}

static inline float half_number(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    /* Its exponent is too small by 112; what has none is subnormal, and a multiple of 2^-24. */
    float small = (float)rest * (1 / 16777216.0f);
    uint32_t bits = rest < 0x400 ? (uint32_t)bits_of(small) : (rest << 13) + (112u << 23);
    bits += rest >= 0x7C00 ? 112u << 23 : 0;
    return float_of((int32_t)(bits | sign));
}

static void halves(const uint16_t *from, uint32_t n, float *to) {
    for (uint32_t i = 0; i < n; i++)
        to[i] = half_number(from[i]);
}

static void squared(const int16_t *word, int32_t *energy) {
    for (int t = 0; t < WIDE; t++)
        energy[t] += (word[2 * t] * word[2 * t] + word[2 * t + 1] * word[2 * t + 1]) >> ENERGY_BITS;
}

#include "analysis_tile.h"

static int always(void) { return 1; }

const AnalysisPath analysis_portable = {"portable", always, run};
