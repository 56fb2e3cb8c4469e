/* What a calibration counts of one row: symbols of live tiles, and which tiles are live. `kvabr.codec.quantiser` and
 * `kvabr.codec.fit_references` have the same in Python. Any numbers are safe. The
 * same for every path, compiled with each; after encode.h.
 */

/* Adding to one place again and again takes long, so small values are counted in four places in turn: [turn][context][value
 * + CLOSE], and then [turn] all others. */
#define SMALL_VALUES (3 * 2 * CLOSE)

typedef struct {
    int32_t count[4 * SMALL_VALUES + 4];
} Close;

static void loud_indices(const float *row, float loud, const Quantiser *q, uint32_t tokens, int32_t *index) {
    const int32_t dead = bits_of(q->dead), most = bits_of(1e6f); /* no table has symbols for more */
    for (uint32_t t = 0; t < tokens; t++) {
        float exact = row[t] * loud / q->step, size = least(size_of(exact), most);
        int32_t whole = (int32_t)nearest(size - least(size, dead)), minus = bits_of(exact) >> 31;
        index[t] = (whole ^ minus) - minus;
    }
}

/* Adds a tile of a row to its counts, as far as they are not in `close`. */
static void count_tile(const int32_t *index, const int32_t *below, uint32_t tokens, uint32_t most, int32_t *symbols, int32_t *flags,
                       Close *close) {
    int32_t value[TILE], context[TILE], place[TILE], live = 0, under = 0, far = 0;
    for (uint32_t t = 0; t < tokens; t++) {
        int32_t b = below ? below[t] : 0, minus = b >> 31, size = (b ^ minus) - minus;
        value[t] = ((index[t] - 3 * b) ^ minus) - minus;
        context[t] = size < 2 ? size : 2;
        live |= value[t], under |= b;
    }
    flags[2 * (under != 0) + (live != 0)]++;
    if (!live)
        return;
    for (uint32_t t = 0; t < tokens; t++) {
        int beyond = (uint32_t)(value[t] + CLOSE) >= 2 * CLOSE;
        int32_t turn = (int32_t)(t % 4), small = turn * SMALL_VALUES + context[t] * (2 * CLOSE) + value[t] + CLOSE;
        place[t] = beyond ? 4 * SMALL_VALUES + turn : small;
        far |= beyond;
    }
    for (uint32_t t = 0; t < tokens; t++)
        close->count[place[t]]++;
    for (uint32_t t = 0; far && t < tokens; t++)
        if (place[t] >= 4 * SMALL_VALUES)
            symbols[(uint32_t)context[t] * (most + 2) + at_most((uint32_t)(value[t] + (int32_t)(most / 2)), most + 1)]++;
}

static void count_row(const float *row, uint32_t tokens, float loud, const CountedDepth *depth, int depths, size_t number,
                      uint32_t most) {
    Close close[MAX_DEPTHS];
    int32_t index[MAX_DEPTHS][TILE];
    memset(close, 0, (size_t)depths * sizeof *close);
    for (uint32_t first = 0; first < tokens; first += TILE) {
        uint32_t n = at_most(TILE, tokens - first);
        for (int d = 0; d < depths; d++) {
            int refines = depth[d].refines;
            loud_indices(row + first, loud, &depth[d].own, n, index[d]);
            count_tile(index[d], refines ? index[d - 1] : NULL, n, most, depth[d].symbols + number * (refines ? 3 : 1) * (most + 2),
                       depth[d].flags + number * (refines ? 4 : 2), close + d);
        }
    }
    for (int d = 0; d < depths; d++)
        for (int context = 0; context < (depth[d].refines ? 3 : 1); context++) {
            int32_t *to = depth[d].symbols + (number * (depth[d].refines ? 3 : 1) + (size_t)context) * (most + 2) + most / 2 - CLOSE;
            for (int place = context * 2 * CLOSE; place < (context + 1) * 2 * CLOSE; place++, to++)
                for (int turn = 0; turn < 4; turn++)
                    *to += close[d].count[turn * SMALL_VALUES + place];
        }
}

/* Adds the symbols of a tile's second step to counts[context][symbol], `width` of them each, if the row is live. The last
 * symbol, 2 radius + 1, stands for all others. Indices are from -10,000 to 10,000, so that their triples do not overflow.
 */
static void count_near_row(const int32_t *index, const int32_t *below, const References *references, uint32_t tokens,
                           const Depth *d, uint32_t radius, uint32_t width, int64_t *counts) {
    int32_t live = 0;
    for (uint32_t t = 0; t < tokens; t++)
        live |= index[t] - (below ? 3 * below[t] : 0);
    for (uint32_t place = LANES; live && place < tokens; place++) {
        uint32_t token = references->place[place];
        int minus, b = below ? below[token] : 0, value = index[token] - 3 * b;
        uint8_t context = near_context(d, index[references->place[references->lane[place]]], b, &minus);
        uint32_t symbol = (uint32_t)((minus ? -value : value) + (int)radius);
        counts[context * width + at_most(symbol, 2 * radius + 1)]++;
    }
}
