/* The encoder's transform, tile by tile of tokens. The same for every path, compiled with each; vectors span tokens only.
 *
 * A path defines before it includes this:
 *   sums(const int16_t *a, const int16_t *b, pairs, int32_t *out)    ROWS rows by WIDE tokens, [row][token]
 *   times(const int32_t *sum, const float *unit, float row, float *to, float *largest)
 *                 a row of sums times each token's unit and the row's; keeps their largest magnitudes
 *   transposed(const float *from, size_t stride, float *to)  8 rows of 8 numbers to columns, WIDE numbers apart
 *   scaled(float *panel, const float *mean, float scale, const float *column, uint32_t dim, const int32_t *on,
 *          float *largest, float *power)
 *                 channels of GROUP_TOKENS tokens, [channel][WIDE]: without the mean, in units of the norm, limited, times
 *                 the factor of their column (NULL: 1); zero for tokens whose `on` is 0, not -1. Adds to power, in order
 *   halves(const uint16_t *from, uint32_t n, float *to)      from half precision
 *   squared(const int16_t *word, int32_t *energy)            adds [token][2] squared, each pair in units of 2^ENERGY_BITS
 *   paired(const float *first, const float *second, const float *scale, int16_t *to)
 *                 two components of a panel, times each token's scale, to 16 bits: [token][2]; beyond them, the nearest
 */
#include "analysis.h"

#include <stdlib.h>

#define SCALED 268
#define FINEST 227
#define LENGTH (65400LL * 65400 >> ENERGY_BITS)
#define EACH(t) for (uint32_t t = 0; t < WIDE; t++)

/* Memory of one run. */
typedef struct {
    float *heads;     /* [GROUP_TOKENS][head_dim, padded]: tokens of one head */
    float *channels;  /* panels [WIDE tokens][channel][WIDE] of a block */
    float *across;    /* panels of the components that a stack takes */
    int16_t *words;   /* panels [WIDE tokens][pair of components][WIDE][2] */
} Room;

/* Destination of a product: the first rows go to panels, the others to rows of their own. */
typedef struct {
    float *panels;
    size_t panel_stride;
    uint32_t split;
    float *rows;
    size_t row_stride;
    uint32_t tokens;   /* of the tile */
    float *largest[2]; /* [token of the tile]: of panels, of rows */
} Product;

static inline uint32_t panels_of(uint32_t tokens) { return (tokens + WIDE - 1) / WIDE; }

/* Stores one row of a panel's tokens. */
static inline void put(const Product *p, uint32_t row, uint32_t token, const float *value) {
    int beyond = row >= p->split;
    float *to = beyond ? p->rows + (row - p->split) * p->row_stride + token
                       : p->panels + token / WIDE * p->panel_stride + (size_t)row * WIDE;
    if (beyond && p->tokens - token < WIDE)
        memcpy(to, value, (p->tokens - token) * sizeof *value);
    else
        memcpy(to, value, WIDE * sizeof *value);
}

/* Exponents, as in a float's bits, of the scales by which each token of a panel comes to 16 bits; see `times` in tests/codec/native/oracle.py. */
static void exponents(const float *panel, uint32_t size, int32_t *out) {
    static const float zero[WIDE];
    float most[WIDE] = {0}, scale[WIDE];
    int32_t energy[WIDE] = {0};
    for (uint32_t k = 0; k < size; k++, panel += WIDE)
        EACH(t) most[t] = greatest(most[t], panel[t]);
    panel -= (size_t)size * WIDE;
    EACH(t) {
        out[t] = SCALED - (bits_of(most[t]) >> 23);
        out[t] = out[t] < FINEST ? out[t] : FINEST;
        scale[t] = float_of(out[t] << 23);
    }
    for (uint32_t k = 0; k < size; k += 2, panel += 2 * WIDE) {
        int16_t word[WIDE * 2];
        paired(panel, k + 1 < size ? panel + WIDE : zero, scale, word);
        squared(word, energy);
    }
    EACH(t) {
        int64_t all = (int64_t)energy[t] + size / 2 + size % 2;
        for (int64_t limit = LENGTH; limit <= LENGTH << 10; limit <<= 2)
            out[t] -= all >= limit;
    }
}

/* Multiplies a matrix by panels. */
static void product(const Inverse *inverse, uint32_t size, const float *panels, int16_t *words, const Product *p) {
    static const float zero[WIDE];
    uint32_t pairs = size / 2 + size % 2;
    float unit[TILE + WIDE];
    for (uint32_t token = 0; token < p->tokens; token += WIDE) {
        const float *panel = panels + (size_t)token * size;
        int16_t *to = words + (size_t)token * pairs * 2;
        int32_t exponent[WIDE];
        float scale[WIDE];
        exponents(panel, size, exponent);
        EACH(t) scale[t] = float_of(exponent[t] << 23), unit[token + t] = float_of((254 - exponent[t]) << 23);
        for (uint32_t k = 0; k < size; k += 2, panel += 2 * WIDE, to += 2 * WIDE)
            paired(panel, k + 1 < size ? panel + WIDE : zero, scale, to);
    }
    const int16_t *entries = inverse->entries;
    int32_t out[ROWS * WIDE] __attribute__((aligned(64)));
    for (uint32_t row = 0; row < size; row += ROWS, entries += (size_t)ROWS * 2 * pairs)
        for (uint32_t token = 0; token < p->tokens; token += WIDE) {
            sums(entries, words + (size_t)token * pairs * 2, pairs, out);
            for (uint32_t i = 0; i < ROWS && row + i < size; i++) {
                float value[WIDE];
                times(out + i * WIDE, unit + token, inverse->rows[row + i], value, p->largest[row + i >= p->split] + token);
                put(p, row + i, token, value);
            }
        }
}

/* The same for the identity matrix. */
static void copied(uint32_t size, const float *panels, const Product *p) {
    for (uint32_t token = 0; token < p->tokens; token += WIDE)
        for (uint32_t row = 0; row < size; row++) {
            const float *value = panels + (size_t)token * size + (size_t)row * WIDE;
            float *largest = p->largest[row >= p->split] + token;
            EACH(t) largest[t] = greatest(largest[t], value[t]);
            put(p, row, token, value);
        }
}

static inline float number(const char *data, int dtype, ptrdiff_t at) {
    if (dtype == FLOAT32)
        return ((const float *)data)[at];
    const uint16_t *half = (const uint16_t *)data + at;
    float value = float_of((int32_t)((uint32_t)*half << 16));
    if (dtype == FLOAT16)
        halves(half, 1, &value);
    return value;
}

static void numbers(const char *data, int dtype, ptrdiff_t at, ptrdiff_t stride, uint32_t n, float *to) {
    if (stride != 1) {
        for (uint32_t i = 0; i < n; i++)
            to[i] = number(data, dtype, at + (ptrdiff_t)i * stride);
        return;
    }
    const uint16_t *half = (const uint16_t *)data + at;
    if (dtype == FLOAT32)
        memcpy(to, (const float *)data + at, n * sizeof *to);
    else if (dtype == FLOAT16)
        halves(half, n, to);
    else
        for (uint32_t i = 0; i < n; i++)
            to[i] = float_of((int32_t)((uint32_t)half[i] << 16));
}

/* Undoes the rotation of a key. */
static void unturned(float *restrict key, const float *restrict cos, const float *restrict sin, uint32_t half, int interleaved) {
    if (!interleaved) {
        float *restrict other = key + half;
        for (uint32_t i = 0; i < half; i++) {
            float first = key[i], second = other[i];
            key[i] = first * cos[i] + second * sin[i];
            other[i] = second * cos[i] - first * sin[i];
        }
        return;
    }
    for (uint32_t i = 0; i < half; i++, key += 2) {
        float first = key[0], second = key[1];
        key[0] = first * cos[i] + second * sin[i];
        key[1] = second * cos[i] - first * sin[i];
    }
}

/* A block of a tile to panels. */
static void block_channels(const Analysis *a, const Group *g, uint32_t layer, uint32_t block, uint32_t first, uint32_t tokens,
                           const Room *room, float *largest, float *power) {
    size_t which = (size_t)layer * a->blocks + block;
    const float *mean = a->mean + which * a->width, *column = a->block.columns ? a->block.columns + which * a->width : NULL;
    const uint32_t dim = a->head_dim, padded = (dim + 7) / 8 * 8;
    for (uint32_t token = 0; token < panels_of(tokens) * WIDE; token += GROUP_TOKENS) {
        float *panel = room->channels + (size_t)(token / WIDE) * a->width * WIDE + token % WIDE;
        uint32_t here = token < tokens ? at_most(GROUP_TOKENS, tokens - token) : 0;
        int32_t on[GROUP_TOKENS];
        for (uint32_t t = 0; t < GROUP_TOKENS; t++)
            on[t] = t < here ? -1 : 0;
        for (uint32_t h = 0; h < a->block_heads; h++, panel += (size_t)dim * WIDE) {
            ptrdiff_t at = (ptrdiff_t)(a->first + layer) * g->stride[0] + (ptrdiff_t)a->kind * g->stride[1] +
                           (ptrdiff_t)(block * a->block_heads + h) * g->stride[2] + (ptrdiff_t)(first + token) * g->stride[3];
            for (uint32_t t = 0; t < here; t++, at += g->stride[3]) {
                float *to = room->heads + (size_t)t * padded;
                size_t angle = (size_t)(first + token + t) * (a->rotary / 2);
                numbers(g->data, g->dtype, at, g->stride[4], dim, to);
                if (a->rotary)
                    unturned(to + a->turned, g->cos + angle, g->sin + angle, a->rotary / 2, (int)a->interleaved);
            }
            uint32_t i = 0;
            for (; i + 8 <= dim; i += 8)
                transposed(room->heads + i, padded, panel + (size_t)i * WIDE);
            for (; i < dim; i++)
                for (uint32_t t = 0; t < GROUP_TOKENS; t++)
                    panel[(size_t)i * WIDE + t] = room->heads[(size_t)t * padded + i];
            scaled(panel, mean + (size_t)h * dim, a->scale[layer], column ? column + (size_t)h * dim : NULL, dim, on,
                   largest + token, power + token);
        }
    }
}

static Inverse block_inverse(const Analysis *a, size_t which) {
    return (Inverse){a->block.entries + which * analysis_packed(a->width), a->block.rows + which * a->width, NULL};
}

static void tile(const Analysis *a, const Group *g, const Analysed *out, uint32_t first, const Room *room) {
    uint32_t tokens = at_most(TILE, g->tokens - first), rest = a->width - a->kept;
    float largest[3][TILE + WIDE] __attribute__((aligned(64))) = {{0}}, power[TILE + WIDE] __attribute__((aligned(64)));
    Product p = {.panel_stride = (size_t)a->size * WIDE, .split = a->kept, .row_stride = g->tokens, .tokens = tokens,
                 .largest = {largest[1], largest[2]}};
    for (uint32_t layer = 0; layer < a->layers; layer++) {
        memset(power, 0, sizeof power);
        for (uint32_t block = 0; block < a->blocks; block++) {
            size_t which = (size_t)layer * a->blocks + block;
            block_channels(a, g, layer, block, first, tokens, room, largest[0], power);
            p.panels = room->across + which * a->kept * WIDE;
            p.rows = out->rows + (a->size + which * rest) * g->tokens + first;
            if (a->block.entries) {
                Inverse inverse = block_inverse(a, which);
                product(&inverse, a->width, room->channels, room->words, &p);
            } else {
                copied(a->width, room->channels, &p);
            }
        }
        memcpy(out->power + (size_t)layer * g->tokens + first, power, tokens * sizeof *power);
    }
    if (a->size) {
        for (uint32_t panel = 0; panel < panels_of(tokens); panel++)
            for (uint32_t k = 0; k < a->size; k++) {
                float *to = room->across + ((size_t)panel * a->size + k) * WIDE, by = a->stack.columns[k];
                EACH(t) to[t] *= by;
            }
        p.split = 0;
        p.rows = out->rows + first;
        product(&a->stack, a->size, room->across, room->words, &p);
    }
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t t = 0; t < tokens; t++) {
            float *to = out->largest + (size_t)i * g->tokens + first + t;
            *to = greatest(*to, largest[i][t]);
        }
}

static int run(const Analysis *a, const Group *g, const Analysed *out) {
    size_t padded = (size_t)panels_of(at_most(TILE, g->tokens)) * WIDE, most = a->width > a->size ? a->width : a->size;
    size_t heads = (size_t)GROUP_TOKENS * ((a->head_dim + 7) / 8 * 8), channels = a->width * padded, across = a->size * padded;
    size_t words = (most + 1) * padded;
    float *all = malloc((heads + channels + across + words / 2 + 64 + 16) * sizeof *all);
    if (!all)
        return NO_MEMORY;
    heads = (heads + 15) / 16 * 16;
    float *memory = (float *)(((uintptr_t)all + 63) & ~(uintptr_t)63);
    memset(memory, 0, heads * sizeof *memory);
    Room room = {memory, memory + heads, memory + heads + channels, (int16_t *)(memory + heads + channels + across)};
    for (uint32_t first = 0; first < g->tokens; first += TILE)
        tile(a, g, out, first, &room);
    free(all);
    return OK;
}
