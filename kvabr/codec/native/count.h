/* What a calibration counts of one row: symbols of live tiles, and which tiles are live. `kvabr.codec.quantiser` has the
 * same in Python. Any numbers are safe: arithmetic is modulo 2^32.
 */
#include "kvcoder.h"

/* Adds tiles of a row to symbols[context][symbol], `most` + 2 of them each, and to flags[context][live]; with indices below
 * (not NULL) there are three contexts of symbols and two of flags, otherwise one. */
static void count_row(const int32_t *index, const int32_t *below, uint32_t tokens, uint32_t most, int32_t *symbols, int32_t *flags) {
    const uint32_t radius = most / 2;
    for (uint32_t first = 0; first < tokens; first += TILE) {
        uint32_t n = at_most(TILE, tokens - first), live = 0, under = 0, value[TILE];
        for (uint32_t t = 0; t < n; t++) {
            uint32_t b = below ? (uint32_t)below[first + t] : 0, minus = 0u - (b >> 31);
            value[t] = (((uint32_t)index[first + t] - 3 * b) ^ minus) - minus;
            live |= value[t], under |= b;
        }
        flags[2 * (under != 0) + (live != 0)]++;
        for (uint32_t t = 0; live && t < n; t++) {
            uint32_t b = below ? (uint32_t)below[first + t] : 0, minus = 0u - (b >> 31);
            uint32_t symbol = value[t] + radius;
            symbols[at_most((b ^ minus) - minus, 2) * (most + 2) + at_most(symbol, most + 1)]++;
        }
    }
}
