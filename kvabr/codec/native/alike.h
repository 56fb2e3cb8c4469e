/* How alike the tokens of a tile are: for each pair, the sum over some rows of products of small integers, exact in any
 * order. The same for every path, compiled with each; after encode.h.
 */
#define ROWS_AT_ONCE 128

/* Indices cut to `most`, or what rounding to them takes off, in sixteenths of the step. */
static void small_numbers(const float *from, float step, int32_t most, uint32_t n, int16_t *to) {
    const int32_t whole_from = bits_of(8388608.0f), cut = bits_of((float)most);
    for (uint32_t t = 0; t < n; t++) {
        float exact = from[t] / step, size = least(size_of(exact), whole_from), whole = nearest(size);
        float error = size - whole, part = nearest(16.0f * size_of(error));
        int32_t minus = bits_of(exact) >> 31, back = bits_of(error) >> 31;
        int32_t index = (int32_t)least(whole, cut), units = ((int32_t)part ^ back) - back;
        index = most ? index : units;
        to[t] = (int16_t)((index ^ minus) - minus);
    }
}

/* Adds the products of tokens t >= u to sums[t * n + u]. Sums of products of 16 bits are one instruction. */
static void add_products(int16_t (*x)[ROWS_AT_ONCE + 16], uint32_t n, int32_t *sums) {
    for (uint32_t t = 0; t < n; t++) {
        const int16_t *own = x[t];
        for (uint32_t u = 0; u <= t; u += 4) { /* beyond t: not used, and within x */
            const int16_t *a = x[u], *b = x[u + 1], *c = x[u + 2], *d = x[u + 3];
            int32_t sum[4] = {0};
            for (uint32_t r = 0; r < ROWS_AT_ONCE; r++) {
                sum[0] += (int32_t)own[r] * a[r], sum[1] += (int32_t)own[r] * b[r];
                sum[2] += (int32_t)own[r] * c[r], sum[3] += (int32_t)own[r] * d[r];
            }
            for (uint32_t i = 0; i < 4 && u + i <= t; i++)
                sums[(size_t)t * n + u + i] += sum[i];
        }
    }
}

static int alike(const float *rows, size_t stride, const uint32_t *which, uint32_t count, const uint32_t *token, uint32_t n,
                 float step, int32_t most, int32_t *sums) {
    int16_t (*x)[ROWS_AT_ONCE + 16] = aligned_zeros(TILE + 4, sizeof *x);
    if (!x)
        return NO_MEMORY;
    for (uint32_t first = 0; first < count; first += ROWS_AT_ONCE) {
        uint32_t here = at_most(ROWS_AT_ONCE, count - first);
        for (uint32_t r = 0; r < ROWS_AT_ONCE; r += 2) {
            int16_t value[2][TILE] = {{0}};
            for (uint32_t i = 0; i < 2 && r + i < here; i++) {
                float line[TILE];
                const float *from = rows + which[first + r + i] * stride;
                if (n && token[n - 1] - token[0] == n - 1) /* the usual case, if they ascend as they should */
                    memcpy(line, from + token[0], n * sizeof *line);
                else
                    for (uint32_t t = 0; t < n; t++)
                        line[t] = from[token[t]];
                small_numbers(line, step, most, n, value[i]);
            }
            for (uint32_t t = 0; t < n; t++) {
                uint32_t both = (uint16_t)value[0][t] | (uint32_t)(uint16_t)value[1][t] << 16;
                memcpy(x[t] + r, &both, sizeof both);
            }
        }
        add_products(x, n, sums);
    }
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t u = 0; u < t; u++)
            sums[(size_t)u * n + t] = sums[(size_t)t * n + u];
    aligned_free(x);
    return OK;
}
