/* Plain C, for any processor. */
#include "near.h"

static inline uint32_t next_word(Reader *r) { return (uint32_t)r->word[0] | (uint32_t)r->word[1] << 8; }

/* Refills a state that fell below 2^16, without a branch. */
static inline uint32_t renormalised(Reader *r, uint32_t x) {
    uint32_t low = x < LOW;
    uint32_t refilled = x << 16 | next_word(r);
    r->word += 2 * low;
    return low ? refilled : x;
}

static uint64_t step_flags(Reader *r, const uint16_t *chance, uint32_t n) {
    uint64_t bits = 0;
    for (uint32_t lane = 0; lane < n; lane++) {
        uint32_t x = r->state[lane], slot = x & (TOTAL - 1), one = slot < chance[lane];
        uint32_t freq = one ? chance[lane] : TOTAL - chance[lane];
        x = freq * (x >> PROBABILITY_BITS) + (one ? slot : slot - chance[lane]);
        r->state[lane] = renormalised(r, x);
        bits |= (uint64_t)one << lane;
    }
    return bits;
}

static inline int32_t decoded(Reader *r, uint32_t lane, const uint32_t *lookup) {
    uint32_t x = r->state[lane], found = lookup[x & (TOTAL - 1)];
    x = (found & (TOTAL - 1)) * (x >> PROBABILITY_BITS) + (found >> 12 & (TOTAL - 1));
    r->state[lane] = renormalised(r, x);
    return (int32_t)found >> 24;
}

static int row_base(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens) {
    const uint32_t *lookup = d->own.lookup + (size_t)which * TOTAL;
    for (uint32_t at = 0; at < tokens; at += LANES) {
        uint32_t n = at_most(LANES, tokens - at);
        int escaped = 0;
        READER_READY(r);
        for (uint32_t lane = 0; lane < n; lane++) {
            int32_t value = decoded(r, lane, lookup);
            escaped |= value == ESCAPE;
            row[at + lane] = (int16_t)value;
        }
        for (uint32_t lane = 0; escaped && lane < n; lane++)
            if (row[at + lane] == ESCAPE && reader_escape(r, row + at + lane))
                return BAD_ESCAPE;
    }
    return OK;
}

static int16_t bounded(int32_t value) { return (int16_t)(value > 32767 ? 32767 : value < -32768 ? -32768 : value); }

static int row_refine(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens) {
    const uint32_t *lookup = d->own.lookup + (size_t)which * 3 * TOTAL;
    for (uint32_t at = 0; at < tokens; at += LANES) {
        uint32_t n = at_most(LANES, tokens - at);
        int16_t value[LANES];
        int escaped = 0;
        READER_READY(r);
        for (uint32_t lane = 0; lane < n; lane++) {
            int32_t below = row[at + lane], size = below < 0 ? -below : below;
            int32_t decoded_value = decoded(r, lane, lookup + (size > 2 ? 2 : size) * TOTAL);
            escaped |= decoded_value == ESCAPE;
            value[lane] = (int16_t)decoded_value;
        }
        for (uint32_t lane = 0; escaped && lane < n; lane++)
            if (value[lane] == ESCAPE && reader_escape(r, value + lane))
                return BAD_ESCAPE;
        for (uint32_t lane = 0; lane < n; lane++) {
            int32_t below = row[at + lane];
            row[at + lane] = bounded(bounded(3 * below) + (below < 0 ? -value[lane] : value[lane]));
        }
    }
    return OK;
}

static int row_near(Reader *r, const Depth *d, uint32_t which, int16_t *row, uint32_t tokens, const Lanes *lanes) {
    const uint32_t *lookup = d->near.lookup + (size_t)which * d->near.contexts * TOTAL;
    uint32_t n = tokens - LANES;
    int16_t value[LANES];
    int minus[LANES], escaped = 0, refines = d->contexts > 1;
    READER_READY(r);
    for (uint32_t lane = 0; lane < n; lane++) {
        uint32_t context = near_context(d, row[lanes->lane[lane]], refines ? row[LANES + lane] : 0, minus + lane);
        int32_t decoded_value = decoded(r, lane, lookup + context * TOTAL);
        escaped |= decoded_value == ESCAPE;
        value[lane] = (int16_t)decoded_value;
    }
    for (uint32_t lane = 0; escaped && lane < n; lane++)
        if (value[lane] == ESCAPE && reader_escape(r, value + lane))
            return BAD_ESCAPE;
    for (uint32_t lane = 0; lane < n; lane++) {
        int32_t below = refines ? row[LANES + lane] : 0;
        row[LANES + lane] = bounded(bounded(3 * below) + (minus[lane] ? -value[lane] : value[lane]));
    }
    return OK;
}

/* Here the pairs of a panel lie as [2][32], which compilers turn into plain vector products. */
static void product(const int16_t *panel, const uint32_t *list, uint32_t n, const uint32_t *z, int32_t *out) {
    uint32_t sums[TOKENS][OUTPUTS] = {{0}};
    for (uint32_t j = 0; j < n; j++) {
        const int16_t *a = panel + (size_t)list[j] * OUTPUTS * 2, *b = a + OUTPUTS;
        for (uint32_t t = 0; t < TOKENS; t++) {
            int16_t first = (int16_t)z[j * TOKENS + t], second = (int16_t)(z[j * TOKENS + t] >> 16);
            for (uint32_t i = 0; i < OUTPUTS; i++)
                sums[t][i] += (uint32_t)((int32_t)a[i] * first) + (uint32_t)((int32_t)b[i] * second);
        }
    }
    __builtin_memcpy(out, sums, sizeof sums);
}

/* Converts to FP16, to nearest even; the input is finite and within +-65504. */
static void to_half(const float *from, uint16_t *to, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits, sign;
        __builtin_memcpy(&bits, from + i, sizeof bits);
        sign = bits >> 16 & 0x8000;
        bits &= 0x7FFFFFFF;
        if (bits < 0x38800000) { /* subnormal: let an addition do the rounding */
            float size;
            __builtin_memcpy(&size, &bits, sizeof size);
            size += 0.5f;
            __builtin_memcpy(&bits, &size, sizeof bits);
            bits -= 0x3F000000;
        } else {
            bits = (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13;
        }
        to[i] = (uint16_t)(sign | bits);
    }
}

#include "encode.h"
#include "alike.h"
#include "count.h"
#include "synth.h"
#include "tile.h"

const Path path_portable = {"portable", 0, decode_tile, synthesise, encode_stream, error_sum, alike,
                            count_row, count_near_row};
