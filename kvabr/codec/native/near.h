/* Tokens that refer to another: of a tile of more than 64 tokens, those of the second step name one of the first each. What
 * the row has there, r, tells which table to use, and with which sign. r is cut to 8 bits.
 *
 *   without indices below:  context bucket[0][min(|r|, 15)]; the value has the sign of r
 *   above an index b:       context bucket[min(|b|, 2)][min(max(d, -8), 7) + 8], where d = r - 3 min(|b|, 42), with r as if
 *                           b were not negative; the value has the sign of b, or of r if b is 0
 */
#ifndef NEAR_H
#define NEAR_H

#include "rans.h"

/* The references of the second step. */
typedef struct {
    uint8_t shuffle[4][LANES] __attribute__((aligned(64))); /* for each 16 places: where in them, or 0x80 if elsewhere */
    uint8_t lane[LANES];
} Lanes;

static inline void fill_lanes(Lanes *lanes, const uint8_t *lane, uint32_t tokens) {
    memset(lanes, 0, sizeof *lanes);
    memcpy(lanes->lane, lane + LANES, tokens - LANES);
    for (int part = 0; part < 4; part++)
        for (int t = 0; t < LANES; t++)
            lanes->shuffle[part][t] = lanes->lane[t] / 16 == part ? lanes->lane[t] % 16 : 0x80;
}

static inline uint8_t near_context(const Depth *d, int r, int b, int *minus) {
    r = r > 127 ? 127 : r < -127 ? -127 : r;
    *minus = b ? b < 0 : r < 0;
    r = *minus ? -r : r;
    if (d->contexts == 1)
        return d->bucket[0][r > 15 ? 15 : r];
    int size = b < 0 ? -b : b, apart = r - 3 * (size > 42 ? 42 : size);
    apart = apart > 7 ? 7 : apart < -8 ? -8 : apart;
    return d->bucket[size > 2 ? 2 : size][apart + 8];
}

#endif
