/* The encoder's transform with AVX-512, tile by tile of tokens. */
#include "analysis.h"

#include <stdlib.h>
#include <string.h>

#define ROWS 12  /* of a matrix at a time, ... */
#define COLUMNS 32 /* ... times this many tokens: 24 sums and their operands fill the registers */

size_t analysis_packed(uint32_t size) { return ((size_t)size + ROWS - 1) / ROWS * ROWS * size; }

void analysis_pack(float *to, const float *from, uint32_t size) {
    for (uint32_t panel = 0; panel < size; panel += ROWS, to += (size_t)ROWS * size)
        for (uint32_t k = 0; k < size; k++)
            for (uint32_t i = 0; i < ROWS; i++)
                to[(size_t)k * ROWS + i] = panel + i < size ? from[(size_t)(panel + i) * size + k] : 0;
}

#ifdef HAVE_X86
#include <immintrin.h>

int analysis_runs(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#define INLINE static inline __attribute__((always_inline))

/* Memory of one run. Panels are [32 tokens][channel][32]. */
typedef struct {
    float *heads;   /* [16][head_dim]: tokens of one head */
    float *channels; /* panels, of a block */
    float *across;  /* panels, of the components that a stack takes */
} Room;

/* Destination of a product: the first rows go to panels, the others to rows of their own. */
typedef struct {
    float *panels;
    size_t panel_stride;
    uint32_t split;
    float *rows;
    size_t row_stride;
    uint32_t tokens; /* of the tile */
    float *largest[2]; /* [token of the tile]: of panels, of rows */
} Product;

INLINE __mmask16 lanes(uint32_t n, uint32_t at) {
    return n >= at + 16 ? 0xFFFF : n <= at ? 0 : (__mmask16)((1u << (n - at)) - 1);
}

/* Sums 12 rows by 32 tokens. Matrices are read once from memory; a quarter of the next rows is prefetched meanwhile. */
static void sums(const float *a, const float *b, uint32_t size, const float *ahead, float *out) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (uint32_t k = 0; k < size; k++, a += ROWS, b += COLUMNS, ahead += ROWS / 4) {
        _mm_prefetch((const char *)ahead, _MM_HINT_T1);
        __m512 first = _mm512_load_ps(b), second = _mm512_load_ps(b + 16);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
            __m512 value = _mm512_set1_ps(a[i]);
            sum[i][0] = _mm512_fmadd_ps(value, first, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(value, second, sum[i][1]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
        _mm512_store_ps(out + i * COLUMNS, sum[i][0]);
        _mm512_store_ps(out + i * COLUMNS + 16, sum[i][1]);
    }
}

/* Stores rows of a product, from `row` on. */
static void put(const Product *p, uint32_t row, uint32_t n, uint32_t token, const float *from) {
    __mmask16 on[2] = {lanes(p->tokens, token), lanes(p->tokens, token + 16)};
    for (uint32_t i = 0; i < n; i++, row++, from += COLUMNS) {
        int beyond = row >= p->split;
        float *largest = p->largest[beyond] + token;
        float *to = beyond ? p->rows + (row - p->split) * p->row_stride + token
                           : p->panels + token / COLUMNS * p->panel_stride + (size_t)row * COLUMNS;
        for (int half = 0; half < 2; half++) {
            __m512 value = _mm512_load_ps(from + 16 * half);
            _mm512_mask_storeu_ps(to + 16 * half, beyond ? on[half] : 0xFFFF, value);
            __m512 most = _mm512_max_ps(_mm512_load_ps(largest + 16 * half), _mm512_abs_ps(value));
            _mm512_store_ps(largest + 16 * half, most);
        }
    }
}

static void product(const float *packed, uint32_t size, const float *panels, const Product *p) {
    float out[ROWS * COLUMNS] __attribute__((aligned(64)));
    for (uint32_t row = 0; row < size; row += ROWS, packed += (size_t)ROWS * size)
        for (uint32_t token = 0; token < p->tokens; token += COLUMNS) {
            const float *next = packed + (size_t)ROWS * size + token / COLUMNS * (size_t)(ROWS / 4) * size;
            sums(packed, panels + (size_t)token * size, size, next, out);
            put(p, row, at_most(ROWS, size - row), token, out);
        }
}

/* The same for the identity matrix. */
static void copied(uint32_t size, const float *panels, const Product *p) {
    for (uint32_t token = 0; token < p->tokens; token += COLUMNS)
        put(p, 0, size, token, panels + (size_t)token * size);
}

INLINE float number(const char *data, int dtype, ptrdiff_t at) {
    if (dtype == FLOAT32)
        return ((const float *)data)[at];
    uint16_t half = ((const uint16_t *)data)[at];
    if (dtype == FLOAT16)
        return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void numbers(const char *data, int dtype, ptrdiff_t at, ptrdiff_t stride, uint32_t n, float *to) {
    if (stride != 1) {
        for (uint32_t i = 0; i < n; i++)
            to[i] = number(data, dtype, at + (ptrdiff_t)i * stride);
        return;
    }
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 on = lanes(n, i);
        __m512 value;
        if (dtype == FLOAT32) {
            value = _mm512_maskz_loadu_ps(on, (const float *)data + at + i);
        } else {
            __m256i half = _mm256_maskz_loadu_epi16(on, (const uint16_t *)data + at + i);
            value = dtype == FLOAT16 ? _mm512_cvtph_ps(half)
                                     : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        }
        _mm512_mask_storeu_ps(to + i, on, value);
    }
}

/* Undoes the rotation of a key. */
static void unturned(float *key, const float *cos, const float *sin, uint32_t half, int interleaved) {
    if (interleaved) {
        for (uint32_t i = 0; i < half; i++) {
            float first = key[2 * i], second = key[2 * i + 1];
            key[2 * i] = first * cos[i] + second * sin[i];
            key[2 * i + 1] = second * cos[i] - first * sin[i];
        }
        return;
    }
    for (uint32_t i = 0; i < half; i += 16) {
        __mmask16 on = lanes(half, i);
        __m512 first = _mm512_maskz_loadu_ps(on, key + i), second = _mm512_maskz_loadu_ps(on, key + half + i);
        __m512 c = _mm512_maskz_loadu_ps(on, cos + i), s = _mm512_maskz_loadu_ps(on, sin + i);
        _mm512_mask_storeu_ps(key + i, on, _mm512_add_ps(_mm512_mul_ps(first, c), _mm512_mul_ps(second, s)));
        _mm512_mask_storeu_ps(key + half + i, on, _mm512_sub_ps(_mm512_mul_ps(second, c), _mm512_mul_ps(first, s)));
    }
}

/* Transposes 16 rows of 16 numbers. */
INLINE void transposed(__m512 *r) {
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    /* r[4 g + c] has columns c, c + 4, c + 8, c + 12 of rows 4 g to 4 g + 3. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512 low = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), high = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xDD);
        __m512 low2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88), high2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xDD);
        t[c] = _mm512_shuffle_f32x4(low, low2, 0x88);
        t[c + 8] = _mm512_shuffle_f32x4(low, low2, 0xDD);
        t[c + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
        t[c + 12] = _mm512_shuffle_f32x4(high, high2, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}

/* Up to 16 tokens of a head to 16 columns of a panel: without the mean, in units of the norm. */
static void head_channels(const float *heads, const float *mean, float scale, uint32_t dim, __mmask16 on, float *panel,
                          float *largest, float *power) {
    __m512 most = _mm512_load_ps(largest), sum = power ? _mm512_load_ps(power) : _mm512_setzero_ps();
    for (uint32_t first = 0; first < dim; first += 16) {
        __mmask16 there = lanes(dim, first);
        __m512 r[16];
        for (int t = 0; t < 16; t++)
            r[t] = _mm512_maskz_loadu_ps(there, heads + (size_t)t * dim + first);
        transposed(r);
        for (uint32_t i = 0; i < at_most(16, dim - first); i++) {
            __m512 value = _mm512_maskz_sub_ps(on, r[i], _mm512_set1_ps(mean[first + i]));
            sum = _mm512_fmadd_ps(value, value, sum);
            value = _mm512_mul_ps(value, _mm512_set1_ps(scale));
            most = _mm512_max_ps(most, _mm512_abs_ps(value));
            _mm512_store_ps(panel + (size_t)(first + i) * COLUMNS, value);
        }
    }
    _mm512_store_ps(largest, most);
    if (power)
        _mm512_store_ps(power, sum);
}

/* A block of a tile to panels. */
static void block_channels(const Analysis *a, const Group *g, uint32_t layer, uint32_t block, uint32_t first, uint32_t tokens,
                           const Room *room, float *largest, float *power) {
    const float *mean = a->mean + ((size_t)layer * a->kv_heads + block * a->block_heads) * a->head_dim;
    for (uint32_t token = 0; token < (tokens + COLUMNS - 1) / COLUMNS * COLUMNS; token += 16) {
        float *panel = room->channels + (size_t)(token / COLUMNS) * a->width * COLUMNS + token % COLUMNS;
        uint32_t here = token < tokens ? at_most(16, tokens - token) : 0;
        for (uint32_t h = 0; h < a->block_heads; h++, panel += (size_t)a->head_dim * COLUMNS) {
            ptrdiff_t at = (ptrdiff_t)(a->first + layer) * g->stride[0] + (ptrdiff_t)a->kind * g->stride[1] +
                           (ptrdiff_t)(block * a->block_heads + h) * g->stride[2] + (ptrdiff_t)(first + token) * g->stride[3];
            for (uint32_t t = 0; t < here; t++, at += g->stride[3]) {
                float *to = room->heads + (size_t)t * a->head_dim;
                size_t angle = (size_t)(first + token + t) * (a->rotary / 2);
                numbers(g->data, g->dtype, at, g->stride[4], a->head_dim, to);
                if (a->rotary)
                    unturned(to + a->turned, g->cos + angle, g->sin + angle, a->rotary / 2, (int)a->interleaved);
            }
            head_channels(room->heads, mean + (size_t)h * a->head_dim, a->scale[layer], a->head_dim, lanes(here, 0), panel,
                          largest + token, power ? power + token : NULL);
        }
    }
}

static void greatest(float *to, const float *from, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        to[i] = from[i] > to[i] ? from[i] : to[i];
}

static void tile(const Analysis *a, const Group *g, const Analysed *out, uint32_t first, const Room *room) {
    uint32_t tokens = at_most(TILE, g->tokens - first), rest = a->width - a->kept;
    float largest[3][TILE] __attribute__((aligned(64))) = {{0}}, power[TILE] __attribute__((aligned(64)));
    Product p = {.panel_stride = (size_t)a->size * COLUMNS, .split = a->kept, .row_stride = g->tokens, .tokens = tokens,
                 .largest = {largest[1], largest[2]}};
    for (uint32_t layer = 0; layer < a->layers; layer++) {
        memset(power, 0, sizeof power);
        for (uint32_t block = 0; block < a->blocks; block++) {
            size_t which = (size_t)layer * a->blocks + block;
            block_channels(a, g, layer, block, first, tokens, room, largest[0], a->kind ? NULL : power);
            p.panels = room->across + which * a->kept * COLUMNS;
            p.rows = out->rows + (a->size + which * rest) * g->tokens + first;
            if (a->block)
                product(a->block + which * analysis_packed(a->width), a->width, room->channels, &p);
            else
                copied(a->width, room->channels, &p);
        }
        if (!a->kind)
            memcpy(out->power + (size_t)layer * g->tokens + first, power, tokens * sizeof *power);
    }
    if (a->size) {
        p.split = 0;
        p.rows = out->rows + first;
        product(a->stack, a->size, room->across, &p);
    }
    for (int i = 0; i < 3; i++)
        greatest(out->largest + (size_t)i * g->tokens + first, largest[i], tokens);
}

int analysis_run(const Analysis *a, const Group *g, const Analysed *out) {
    size_t padded = (at_most(TILE, g->tokens) + COLUMNS - 1) / COLUMNS * COLUMNS;
    size_t heads = ((size_t)16 * a->head_dim + 15) / 16 * 16, channels = a->width * padded, across = a->size * padded;
    float *memory = aligned_alloc(64, (heads + channels + across) * sizeof *memory);
    if (!memory)
        return NO_MEMORY;
    Room room = {memory, memory + heads, memory + heads + channels};
    memset(room.heads, 0, heads * sizeof *memory);
    for (uint32_t first = 0; first < g->tokens; first += TILE)
        tile(a, g, out, first, &room);
    free(memory);
    return OK;
}

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
int analysis_runs(void) { return 0; }

int analysis_run(const Analysis *a, const Group *g, const Analysed *out) {
    (void)a, (void)g, (void)out;
    return NO_MEMORY;
}
#endif
