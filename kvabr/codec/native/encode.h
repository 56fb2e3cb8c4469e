/* The encoder. rANS encodes the last symbol first, so that the decoder reads them first to last. The same for every path,
 * compiled with each; a path that defines VECTOR_ENCODER provides its own put_row, put_flags, quantised, permuted
 * and refer, and one that defines QUICK_ROWS its own quick_row.
 */
#include "near.h"

#include <stdlib.h>

typedef struct Writer {
    uint32_t state[LANES] __attribute__((aligned(64)));
    uint8_t *word;   /* written downwards */
    uint8_t *escape; /* written downwards as well */
} Writer;

/* The order in which the tokens of a tile are coded. */
typedef struct Order {
    uint16_t place[TILE] __attribute__((aligned(64)));
    /* For each 16 tokens: where in them a place's token is; 0x80 if elsewhere, or if its indices are all 0. */
    uint8_t shuffle[TILE / 16][TILE] __attribute__((aligned(64)));
} Order;

/* A row of a tile, in that order. */
typedef struct Coded {
    int16_t index[TILE], below[TILE], value[TILE]; /* value: what is coded of it, and with which context; see `conditioned` */
    uint8_t context[TILE];
    int under; /* whether an index below is not 0 */
} Coded;

static void fill_order(Order *order, const uint8_t *place, const int16_t *keep, uint32_t tokens) {
    memset(order->place, 0, sizeof order->place);
    memset(order->shuffle, 0x80, sizeof order->shuffle);
    for (uint32_t t = 0; t < tokens; t++) {
        uint8_t token = order->place[t] = place ? place[t] : (uint8_t)t;
        if (!keep || keep[token])
            order->shuffle[token / 16][t] = token % 16;
    }
}

static const int16_t *scattered(const int16_t *from, const Order *order, uint32_t tokens, int16_t *to) {
    for (uint32_t t = 0; t < tokens; t++)
        to[t] = from[order->place[t]];
    return to;
}

/* Positive floats order like their bits. Compilers vectorise comparing bits; comparing floats might trap. */
static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float least(float a, int32_t bits) {
    int32_t own = bits_of(a);
    own = own < bits ? own : bits;
    memcpy(&a, &own, sizeof a);
    return a;
}

static inline float size_of(float value) {
    int32_t bits = bits_of(value) & INT32_MAX;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Adding 2^23 to a small number that is not negative rounds it to the nearest, ties to even. */
static inline float nearest(float size) { return size + 8388608.0f - 8388608.0f; }

static int64_t error_sum(const float *row, float gain, const Quantiser *q, const int32_t *coded, uint32_t tokens) {
    const float step = q->step;
    const int32_t dead = bits_of(q->dead), top = bits_of(INT16_MAX), most = bits_of(4095.0f);
    int64_t sum = 0;
    for (uint32_t first = 0; first < tokens; first += TILE) {
        int32_t part = 0;
        uint32_t end = first + at_most(TILE, tokens - first);
        for (uint32_t t = first; t < end; t++) {
            float exact = row[t] / step, size = least(size_of(exact), top);
            float back = gain * nearest(size - least(size, dead)), error = size - back; /* of the magnitude */
            int32_t ahead = bits_of(error) >> 31, minus = bits_of(exact) >> 31;
            int32_t units = (int32_t)nearest(least(size_of(error), most) * 1024.0f);
            units = (units ^ ahead) - ahead;
            part += ((units ^ minus) - minus) & coded[t];
        }
        sum += part;
    }
    return sum;
}

#ifndef VECTOR_ENCODER
static inline uint32_t quotient(uint32_t x, uint64_t reciprocal) {
#ifdef __SIZEOF_INT128__
    return (uint32_t)((unsigned __int128)x * reciprocal >> 64);
#else
    uint64_t high = (uint64_t)x * (reciprocal >> 32), low = (uint64_t)x * (reciprocal & 0xFFFFFFFF);
    return (uint32_t)((high + (low >> 32)) >> 32);
#endif
}

static inline void put(Writer *w, uint32_t lane, const EncoderSymbol *symbol) {
    uint32_t x = w->state[lane];
    uint32_t full = (uint64_t)x >= (uint64_t)symbol->freq << (32 - PROBABILITY_BITS);
    put16(w->word - 2, x);
    w->word -= 2 * full;
    x = full ? x >> 16 : x;
    w->state[lane] = x + symbol->bias + quotient(x, symbol->reciprocal) * symbol->complement;
}

/* One step of flags. */
static void put_flags(Writer *w, const uint16_t *chance, const uint8_t *set, uint32_t n) {
    for (uint32_t lane = n; lane-- > 0;) {
        uint32_t freq = set[lane] ? chance[lane] : TOTAL - chance[lane], start = set[lane] ? 0 : chance[lane];
        uint32_t x = w->state[lane];
        if ((uint64_t)x >= (uint64_t)freq << (32 - PROBABILITY_BITS)) {
            w->word -= 2;
            put16(w->word, x);
            x >>= 16;
        }
        w->state[lane] = (x / freq << PROBABILITY_BITS) + x % freq + start;
    }
}

static void put_row(Writer *w, const Depth *d, const Tables *of, uint32_t which, const int16_t *value,
                    const uint8_t *context, uint32_t tokens) {
    int radius = d->radius[which];
    const EncoderSymbol *tables = of->encoder + (size_t)which * of->contexts * d->width, *table = tables;
    for (uint32_t t = tokens; t-- > 0;) {
        int v = value[t];
        if (of->contexts > 1)
            table = tables + context[t] * d->width;
        const EncoderSymbol *symbol = table + (v < -radius || v > radius ? 2 * radius + 1 : v + radius);
        if (symbol->freq == 0 || symbol == table + 2 * radius + 1) {
            symbol = table + 2 * radius + 1;
            w->escape -= 2;
            put16(w->escape, (uint16_t)v);
        }
        put(w, t % LANES, symbol);
    }
}

/* The nearest indices, ties to even. */
static void quantised(const float *from, const Quantiser *q, const int16_t *keep, uint32_t tokens, int16_t *index) {
    const float step = q->step;
    const int32_t dead = bits_of(q->dead), top = bits_of(INT16_MAX);
    for (uint32_t t = 0; t < tokens; t++) {
        float exact = from[t] / step, size = size_of(exact);
        size = least(size - least(size, dead), top);
        int whole = (int)nearest(size), minus = bits_of(exact) >> 31;
        index[t] = (int16_t)(((whole ^ minus) - minus) & keep[t]);
    }
}

/* Tokens in the order in which they are coded. */
static const int16_t *permuted(const int16_t *from, const Order *order, uint32_t tokens, int16_t *to) {
    return scattered(from, order, tokens, to);
}

/* The values to code of tokens that refer to another, and their contexts. */
static void refer(const Depth *d, const int16_t *index, const int16_t *below, const Lanes *lanes, uint32_t tokens, int16_t *value,
                  uint8_t *context) {
    for (uint32_t t = LANES; t < tokens; t++) {
        int b = below ? below[t] : 0, minus, change = index[t] - 3 * b;
        context[t] = near_context(d, index[lanes->lane[t - LANES]], b, &minus);
        value[t] = (int16_t)(minus ? -change : change);
    }
}
#endif

/* The values to code for one row of a tile, and their contexts; without indices below, the indices themselves. Sets *bad
 * if a decoder could not reach the indices, and *under to whether there is a nonzero index below. */
static int conditioned(const int16_t *index, const int16_t *below, uint32_t tokens, int16_t *value, uint8_t *context,
                       int *bad, int *under) {
    int any = 0, wrong = 0, lower = 0;
    if (!below) {
        for (uint32_t t = 0; t < tokens; t++) {
            any |= index[t];
            wrong |= index[t] == INT16_MIN;
        }
    } else {
        /* All in 16 bits, so that vectors hold as many as possible. */
        int16_t some = 0, base = 0, beyond = 0;
        for (uint32_t t = 0; t < tokens; t++) {
            int16_t b = below[t], own = index[t], minus = (int16_t)(b >> 15), size = (int16_t)((b ^ minus) - minus);
            int16_t thrice = (int16_t)(3 * b), change = (int16_t)(own - thrice);
            /* Beyond 16 bits: three times the index below, the difference, or a difference without a negative. */
            beyond |= (int16_t)(INT16_MAX / 3 - size) | (int16_t)((own ^ thrice) & (own ^ change));
            beyond |= (int16_t)(size | -(change == INT16_MIN));
            value[t] = (int16_t)((change ^ minus) - minus);
            context[t] = (uint8_t)(size > 2 ? 2 : size);
            some |= change;
            base |= b;
        }
        wrong = beyond < 0, any = some, lower = base;
    }
    *bad |= wrong;
    *under = lower != 0;
    return any != 0;
}

#ifndef QUICK_ROWS
/* What is coded of most rows, with less work: see encode_avx2.h. Returns whether a value is not 0, or -1 for other rows. */
static int quick_row(const float *row, const Order *order, float by, uint32_t tokens, int refines, Coded *to) {
    (void)row, (void)order, (void)by, (void)tokens, (void)refines, (void)to;
    return -1;
}
#endif

/* 1 / step if rows may be quick, or 0: indices below must be a third of the indices, rounded, but for 2^-21 of the step. */
static float quick_factor(const Indices *from, int refines) {
    const Quantiser *q = &from->own, *l = &from->lower;
    double apart = (double)l->step - 3 * (double)q->step, most = (double)l->step / (1 << 21);
    int nested = !refines || (l->dead == 0 && apart <= most && apart >= -most);
    return from->rows && q->dead == 0 && q->step > 1e-30f && q->step < 1e30f && nested ? 1 / q->step : 0;
}

static int encode_stream(const Depth *d, const Indices *from, Cut cut, uint32_t tokens, Written *out) {
    const int16_t *index = from->index, *below = from->below;
    const uint8_t *place = from->references.place;
    const int refines = d->contexts > 1, near = place && d->near.contexts;
    const float by = quick_factor(from, refines);
    int bad = 0;
    size_t rows = cut_before(cut, d->rows), tiles = ((size_t)tokens + TILE - 1) / TILE;
    /* At most a word and an escape per symbol and a word per flag, plus a vector of those that are written before they count. */
    size_t most_words = rows * tokens + rows * tiles + 8, most_escapes = rows * tokens;
    uint8_t *words = malloc(2 * (most_words + most_escapes)), *escapes = words + 2 * most_words, *live = calloc(rows + LANES, 1);
    uint16_t *mixed = calloc(rows + LANES, sizeof *mixed); /* flag probabilities, if they depend on the row below */
    if (!words || !live || !mixed) {
        free(words), free(live), free(mixed);
        return NO_MEMORY;
    }
    Writer w = {{0}, words + 2 * most_words, escapes + 2 * most_escapes};
    for (int lane = 0; lane < LANES; lane++)
        w.state[lane] = LOW;
    for (size_t tile = tiles; tile-- > 0;) {
        uint32_t first = (uint32_t)tile * TILE, here = at_most(TILE, tokens - first);
        uint32_t which = d->classes;
        const int refers = near && here > LANES;
        Lanes lanes;
        if (refers)
            fill_lanes(&lanes, from->references.lane + first, here);
        Order order;
        fill_order(&order, place ? place + first : NULL, from->keep ? from->keep + first : NULL, here);
        while (which-- > 0) {
            uint32_t begin = which ? cut_before(cut, d->class_end[which - 1]) : 0;
            for (uint32_t i = cut_before(cut, d->class_end[which]); i-- > begin;) {
                int16_t own[TILE], lower[TILE];
                Coded c;
                uint32_t position = cut_at(cut, i), ahead = cut_at(cut, i < AHEAD ? 0 : i - AHEAD);
                size_t at = (size_t)d->order[position] * tokens + first, next = (size_t)d->order[ahead] * tokens + first;
                const int16_t *row = c.index, *base = refines ? c.below : NULL;
                int any = -1;
                if (from->rows) {
                    fetch(from->rows + next, here * sizeof(float));
                    if (by != 0)
                        any = quick_row(from->rows + at, &order, by, here, refines, &c);
                }
                if (any < 0) {
                    row = own, base = refines ? lower : NULL;
                    if (from->rows) {
                        quantised(from->rows + at, &from->own, from->keep + first, here, own);
                        if (refines)
                            quantised(from->rows + at, &from->lower, from->keep + first, here, lower);
                    } else {
                        fetch(index + next, here * sizeof *index);
                        row = index + at;
                        if (refines) {
                            fetch(below + next, here * sizeof *below);
                            base = below + at;
                        }
                    }
                    if (place) {
                        row = permuted(row, &order, here, c.index);
                        base = base ? permuted(base, &order, here, c.below) : NULL;
                    }
                    any = conditioned(row, base, here, c.value, c.context, &bad, &c.under);
                }
                live[i] = (uint8_t)any;
                if (refines)
                    mixed[i] = d->flag[c.under][position];
                if (!live[i])
                    continue;
                uint32_t alone = here;
                if (refers) {
                    alone = LANES;
                    refer(d, row, base, &lanes, here, c.value, c.context);
                    put_row(&w, d, &d->near, which, c.value + LANES, c.context + LANES, here - LANES);
                }
                put_row(&w, d, &d->own, which, refines ? c.value : row, c.context, alone);
            }
        }
        for (size_t step = (rows + LANES - 1) / LANES; step-- > 0;) {
            uint32_t at = (uint32_t)step * LANES;
            put_flags(&w, refines ? mixed + at : d->flag[0] + cut_at(cut, at), live + at, at_most(LANES, (uint32_t)rows - at));
        }
    }
    free(live), free(mixed);
    *out = (Written){.word = w.word, .escape = w.escape, .block = words};
    out->word_bytes = (size_t)(words + 2 * most_words - w.word);
    out->escape_bytes = (size_t)(escapes + 2 * most_escapes - w.escape);
    memcpy(out->state, w.state, sizeof w.state);
    if (!bad && out->word_bytes / 2 < STREAMED && out->escape_bytes / 2 <= UINT32_MAX)
        return OK;
    free(words);
    out->block = NULL;
    return BAD_INDEX;
}
