/* From the coefficients of one tile to the cache: stack transform, block transform, mean, rotation, cast, store.
 *
 * Vectors run along outputs (channels), tokens come 8 at a time, and components in pairs: a pair of int16 is one uint32,
 * two products and a sum are one instruction. Pairs of dead rows are skipped. Stacks are processed one at a time, so
 * that the matrix and the coefficients stay in the L2 cache.
 *
 * A path defines before it includes this:
 *   product(const int16_t *panel, const uint32_t *list, unsigned n, const uint32_t *z, int32_t *sums)
 *       sums[token 8][output 32] = over j < n: the panel's pair list[j] times z[j][token 8], wrapping
 *   to_half(const float *, uint16_t *, unsigned)        round to nearest even; finite and within +-65504
 */
#include "kvcoder.h"
#include <string.h>

/* Coefficients of one row as int16 in units of step/16, zeros up to a whole number of 8 tokens. */
static void coefficients(int16_t *to, const int16_t *from, uint32_t tokens, const uint8_t *delta, uint32_t which) {
    if (!delta) {
        memcpy(to, from, tokens * sizeof *to);
        return;
    }
    int16_t shift = delta[which];
    for (uint32_t t = 0; t < tokens; t++) {
        int16_t q = from[t];
        q = q > FARTHEST ? FARTHEST : q < -FARTHEST ? -FARTHEST : q;
        to[t] = (int16_t)(16 * q - (q > 0 ? shift : q < 0 ? -shift : 0));
    }
}

typedef struct {
    const int16_t *index;
    size_t stride;
    const uint8_t *live, *row_class, *delta;
    uint32_t tokens;
} Rows;

/* Two rows side by side into column j of n of z[token block][column][8]; the second row may be missing. */
static void interleave(uint32_t *z, uint32_t n, uint32_t j, const Rows *rows, uint32_t row, int has_second) {
    int16_t pair[2][TILE] __attribute__((aligned(64))) = {{0}};
    for (int k = 0; k <= has_second; k++)
        if (rows->live[row + k])
            coefficients(pair[k], rows->index + (row + k) * rows->stride, rows->tokens, rows->delta,
                         rows->row_class ? rows->row_class[row + k] : 0);
    for (uint32_t t = 0; t < rows->tokens; t += TOKENS) {
        uint32_t *to = z + ((size_t)(t / TOKENS) * n + j) * TOKENS;
        for (uint32_t i = 0; i < TOKENS; i++)
            to[i] = (uint16_t)pair[0][t + i] | (uint32_t)(uint16_t)pair[1][t + i] << 16;
    }
}

static uint32_t saturated(int32_t sum) {
    int32_t y = (int32_t)((uint32_t)sum + 8192u) >> 14;
    return (uint16_t)(int16_t)(y > 32767 ? 32767 : y < -32768 ? -32768 : y);
}

/* Lists the live pairs of a stack; returns how many. */
static uint32_t live_pairs(const StackTransform *stack, const Rows *rows, uint32_t *list) {
    uint32_t n = 0;
    const uint8_t *live = rows->live + stack->first_row;
    for (uint32_t pair = 0; pair < stack->size / 2; pair++)
        if (live[2 * pair] | live[2 * pair + 1])
            list[n++] = pair;
    return n;
}

/* The stack transform: fills scratch->y[token block][pair][8]; returns 0 if all its rows are dead (y is then zero). */
static int unstack(const StackTransform *stack, const Rows *rows, Scratch *scratch) {
    uint32_t pairs = stack->size / 2, blocks = (rows->tokens + TOKENS - 1) / TOKENS;
    uint32_t n = live_pairs(stack, rows, scratch->list);
    if (!n)
        return 0;
    for (uint32_t j = 0; j < n; j++)
        interleave(scratch->z, n, j, rows, stack->first_row + 2 * scratch->list[j], 1);
    for (uint32_t panel = 0; panel * OUTPUTS < stack->size; panel++) {
        const int16_t *matrix = stack->matrix + (size_t)panel * pairs * OUTPUTS * 2;
        uint32_t here = at_most(OUTPUTS / 2, pairs - panel * (OUTPUTS / 2));
        for (uint32_t b = 0; b < blocks; b++) {
            int32_t sums[TOKENS * OUTPUTS] __attribute__((aligned(64)));
            product(matrix, scratch->list, n, scratch->z + (size_t)b * n * TOKENS, sums);
            uint32_t *y = scratch->y + ((size_t)b * pairs + panel * (OUTPUTS / 2)) * TOKENS;
            for (uint32_t i = 0; i < here; i++)
                for (uint32_t t = 0; t < TOKENS; t++)
                    y[i * TOKENS + t] = saturated(sums[t * OUTPUTS + 2 * i]) | saturated(sums[t * OUTPUTS + 2 * i + 1]) << 16;
        }
    }
    return 1;
}

/* values[token][channel] = sums * scale + mean; separately rounded. */
static void scaled(float *values, uint32_t width, const int32_t *sums, float scale, const float *mean) {
    for (uint32_t t = 0; t < TOKENS; t++, values += width)
        for (uint32_t i = 0; i < OUTPUTS; i++) {
            float product = (float)sums[t * OUTPUTS + i] * scale;
            values[i] = product + mean[i];
        }
}

/* The block transform: its components are `kept` from y (if there are any), the others from rows. */
static void unblock(const Transform *t, const StackTransform *stack, const Rows *rows, uint32_t number, int stacked,
                    float scale, const int16_t *matrix, const float *mean, Scratch *scratch) {
    uint32_t width = t->width, kept = stack->kept, pairs = (width + 1) / 2, n = 0;
    uint32_t blocks = (rows->tokens + TOKENS - 1) / TOKENS, of_stack = stack->size / 2;
    uint32_t trailing = stack->first_row + stack->size + number * (width - kept);
    uint32_t *list = scratch->list;
    if (stacked)
        for (; n < kept / 2; n++)
            list[n] = n;
    uint32_t from_stack = n;
    for (uint32_t p = kept / 2; p < pairs; p++) {
        uint32_t row = trailing + 2 * p - kept;
        if (rows->live[row] || (2 * p + 1 < width && rows->live[row + 1]))
            list[n++] = p;
    }
    for (uint32_t b = 0; b < blocks && from_stack; b++)
        memcpy(scratch->z + (size_t)b * n * TOKENS, scratch->y + ((size_t)b * of_stack + number * (kept / 2)) * TOKENS,
               (size_t)from_stack * TOKENS * sizeof *scratch->z);
    for (uint32_t j = from_stack; j < n; j++)
        interleave(scratch->z, n, j, rows, trailing + 2 * list[j] - kept, 2 * list[j] + 1 < width);
    for (uint32_t panel = 0; panel * OUTPUTS < width; panel++)
        for (uint32_t b = 0; b < blocks; b++) {
            int32_t sums[TOKENS * OUTPUTS] __attribute__((aligned(64)));
            const uint32_t *z = scratch->z + (size_t)b * n * TOKENS;
            if (matrix) {
                product(matrix + (size_t)panel * pairs * OUTPUTS * 2, list, n, z, sums);
            } else { /* identity */
                memset(sums, 0, sizeof sums);
                for (uint32_t j = 0; j < n; j++)
                    if (list[j] / (OUTPUTS / 2) == panel)
                        for (uint32_t i = 0; i < TOKENS; i++) {
                            int32_t *to = sums + i * OUTPUTS + 2 * (list[j] % (OUTPUTS / 2));
                            to[0] = (int16_t)z[j * TOKENS + i] * 16384;
                            to[1] = (int16_t)(z[j * TOKENS + i] >> 16) * 16384;
                        }
            }
            scaled(scratch->values + (size_t)b * TOKENS * t->padded_width + panel * OUTPUTS, t->padded_width, sums, scale,
                   mean + panel * OUTPUTS);
        }
}

/* Rotates one key of one head by its position. Products and sums are rounded separately (-ffp-contract=off). */
static void turn(float *restrict key, const float *restrict cos, const float *restrict sin, uint32_t half, int interleaved) {
    if (interleaved) {
        for (uint32_t i = 0; i < half; i++) {
            float first = key[2 * i], second = key[2 * i + 1];
            key[2 * i] = first * cos[i] - second * sin[i];
            key[2 * i + 1] = second * cos[i] + first * sin[i];
        }
        return;
    }
    for (uint32_t i = 0; i < half; i++) {
        float first = key[i], second = key[half + i];
        key[i] = first * cos[i] - second * sin[i];
        key[half + i] = second * cos[i] + first * sin[i];
    }
}

static void to_bfloat(const float *restrict from, uint16_t *restrict to, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        to[i] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}

/* Stores one head of one token. */
static void store(float *from, uint32_t dim, const Output *out, ptrdiff_t at) {
    ptrdiff_t step = out->stride[4];
    uint16_t halves[256];
    for (uint32_t first = 0; first < dim; first += 256) {
        uint32_t n = at_most(256, dim - first);
        ptrdiff_t here = at + (ptrdiff_t)first * step;
        if (out->dtype == FLOAT32) {
            float *to = (float *)out->data + here;
            if (step == 1)
                memcpy(to, from + first, n * sizeof *to);
            else
                for (uint32_t i = 0; i < n; i++)
                    to[(ptrdiff_t)i * step] = from[first + i];
            continue;
        }
        uint16_t *to = (uint16_t *)out->data + here, *cast = step == 1 ? to : halves;
        if (out->dtype == BFLOAT16) {
            to_bfloat(from + first, cast, n);
        } else {
            for (uint32_t i = 0; i < n; i++) {
                float x = from[first + i];
                from[first + i] = x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x;
            }
            to_half(from + first, cast, n);
        }
        if (step != 1)
            for (uint32_t i = 0; i < n; i++)
                to[(ptrdiff_t)i * step] = halves[i];
    }
}

static void finish(const Transform *t, const Tile *tile, uint32_t kv, uint32_t layer, uint32_t block, const Output *out,
                   float *values) {
    uint32_t half = t->rotary / 2;
    for (uint32_t h = 0; h < t->block_heads; h++) {
        ptrdiff_t at = (ptrdiff_t)layer * out->stride[0] + (ptrdiff_t)kv * out->stride[1] +
                       (ptrdiff_t)(block * t->block_heads + h) * out->stride[2];
        for (uint32_t i = 0; i < tile->tokens; i++) {
            float *head = values + (size_t)i * t->padded_width + (size_t)h * t->head_dim;
            size_t token = tile->first + (tile->place ? tile->place[i] : i), position = token * half;
            if (kv == 0 && half)
                turn(head + t->turned, tile->cos + position, tile->sin + position, half, (int)t->interleaved);
            store(head, t->head_dim, out, at + (ptrdiff_t)token * out->stride[3]);
        }
    }
}

static void synthesise(const Transform *t, const Tile *tile, const int16_t *index, size_t stride, const uint8_t *live,
                       const uint8_t *row_class, const uint8_t *delta, const Output *out, Scratch *scratch) {
    Rows rows = {index, stride, live, row_class, delta, tile->tokens};
    for (uint32_t s = 0; s < t->stacks; s++) {
        const StackTransform *stack = t->stack + s;
        int stacked = unstack(stack, &rows, scratch);
        for (uint32_t n = 0; n < stack->layers * t->blocks; n++) {
            uint32_t layer = stack->layer[n / t->blocks], block = n % t->blocks;
            size_t half = (size_t)layer * t->halves + stack->kv, which = half * t->blocks + block;
            unblock(t, stack, &rows, n, stacked, tile->scale[half],
                    t->block ? t->block + which * t->block_entries : NULL, t->mean + which * t->padded_width, scratch);
            finish(t, tile, stack->kv, layer, block, out, scratch->values);
        }
    }
}
