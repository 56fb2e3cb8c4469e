/* Prepared once per profile: lookup tables for the decoder and the encoder, packed matrices, scratch memory. */
#include "kvcoder.h"

#include <stdlib.h>
#include <string.h>

void *aligned_zeros(size_t count, size_t size) {
    if (size && count > (SIZE_MAX - 128) / size)
        return NULL;
    size_t bytes = count * size;
    char *raw = calloc(1, bytes + 64 + sizeof(void *));
    if (!raw)
        return NULL;
    char *aligned = (char *)(((uintptr_t)raw + sizeof(void *) + 63) & ~(uintptr_t)63);
    memcpy(aligned - sizeof(void *), &raw, sizeof raw);
    return aligned;
}

void aligned_free(void *p) {
    if (p) {
        void *raw;
        memcpy(&raw, (char *)p - sizeof(void *), sizeof raw);
        free(raw);
    }
}

static uint32_t entry(int value, uint32_t middle, uint32_t freq) {
    return (uint32_t)(uint8_t)(int8_t)value << 24 | middle << 12 | freq;
}

static int symbol_value(uint32_t symbol, uint32_t radius) {
    return symbol == 2 * radius + 1 ? ESCAPE : (int)symbol - (int)radius;
}

static void fill_lookup(uint32_t *lookup, const uint16_t *freqs, uint32_t radius) {
    uint32_t slot = 0;
    for (uint32_t s = 0; s < 2 * radius + 2; s++)
        for (uint32_t place = 0; place < freqs[s] && slot < TOTAL; place++)
            lookup[slot++] = entry(symbol_value(s, radius), place, freqs[s]);
}

static void fill_encoder(EncoderSymbol *to, const uint16_t *freqs, uint32_t width) {
    uint32_t start = 0;
    for (uint32_t s = 0; s < width; s++) {
        uint32_t freq = freqs[s];
        /* A state x becomes x + bias + x / freq * complement. For freq 1 the rounded-down reciprocal makes the quotient
         * one too small (x - 1), which the bias corrects. */
        to[s].freq = freq;
        to[s].start = start;
        to[s].reciprocal = freq > 1 ? UINT64_MAX / freq + 1 : UINT64_MAX;
        to[s].bias = freq > 1 ? start : start + TOTAL - 1;
        to[s].complement = TOTAL - freq;
        start += freq;
    }
}

/* The same in one word per symbol; unused symbols are coded as the escape. */
static void fill_coded(uint32_t *to, const uint16_t *freqs, uint32_t symbols) {
    uint32_t start = 0, escape = TOTAL - freqs[symbols - 1];
    for (uint32_t s = 0; s < symbols; s++) {
        int escapes = s == symbols - 1 || !freqs[s];
        to[s] = escapes ? 1u << 31 | escape << 12 | freqs[symbols - 1] : start << 12 | freqs[s];
        start += freqs[s];
    }
}

static void fill_flat(Flat *flat, const uint16_t *freqs, uint32_t contexts, uint32_t width, uint32_t radius) {
    uint32_t most = contexts == 1 ? FLAT_BASE : FLAT_CONTEXT, widest = 0;
    memset(flat, 0, sizeof *flat);
    for (uint32_t i = 0; i < FLAT_BASE; i++)
        flat->start[i] = TOTAL;
    for (uint32_t i = 0; i < FLAT_CONTEXT; i++)
        for (uint32_t c = 0; c < 8; c++)
            flat->start3[i][c] = TOTAL;
    for (uint32_t c = 0; c < contexts; c++, freqs += width) {
        uint32_t used = 0, start = 0;
        for (uint32_t s = 0; s < 2 * radius + 2; s++) {
            if (!freqs[s])
                continue;
            if (used == most)
                return;
            flat->entry[contexts == 1 ? used : FLAT_CONTEXT * c + used] = entry(symbol_value(s, radius), start, freqs[s]);
            if (used && contexts == 1)
                flat->start[used - 1] = (int16_t)start;
            else if (used)
                flat->start3[used - 1][c] = (int16_t)start;
            start += freqs[s];
            used++;
        }
        widest = used > widest ? used : widest;
    }
    flat->symbols = (uint16_t)widest;
}

static void *copied(const void *from, size_t count, size_t size) {
    void *to = aligned_zeros(count, size);
    if (to)
        memcpy(to, from, count * size);
    return to;
}

static int fill_tables(Tables *to, const Depth *d, uint32_t contexts, const uint16_t *freqs) {
    size_t tables = (size_t)d->classes * contexts, width = d->width;
    to->lookup = aligned_zeros(tables, TOTAL * sizeof *to->lookup);
    to->encoder = aligned_zeros(tables * width, sizeof *to->encoder);
    to->coded = aligned_zeros(tables * width + 32, sizeof *to->coded); /* read 32 at a time */
    if (!to->lookup || !to->encoder || !to->coded)
        return NO_MEMORY;
    for (uint32_t c = 0; c < d->classes; c++)
        for (uint32_t k = 0; k < contexts; k++) {
            uint32_t radius = d->radius[c], symbols = 2 * radius + 2;
            size_t table = (size_t)c * contexts + k;
            fill_lookup(to->lookup + table * TOTAL, freqs + table * width, radius);
            fill_encoder(to->encoder + table * width, freqs + table * width, symbols);
            fill_coded(to->coded + c * contexts * width + k * symbols, freqs + table * width, symbols);
        }
    to->contexts = contexts;
    return OK;
}

Depth *depth_new(uint32_t rows, uint32_t classes, uint32_t contexts, uint32_t width, const uint8_t *row_class,
                 const uint8_t *radius, const uint16_t *freqs, const uint16_t *flag_freq, const uint8_t *delta,
                 const uint32_t *order) {
    Depth *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->rows = rows, d->classes = classes, d->contexts = contexts, d->width = width;
    d->row_class = copied(row_class, rows, 1);
    d->radius = copied(radius, classes, 1);
    d->delta = copied(delta, classes, 1);
    d->order = copied(order, rows, sizeof *order);
    d->class_end = aligned_zeros(classes, sizeof *d->class_end);
    d->flat = aligned_zeros(classes, sizeof *d->flat);
    uint32_t flag_contexts = contexts == 1 ? 1 : 2;
    int good = d->row_class && d->radius && d->delta && d->order && d->class_end && d->flat;
    good = good && fill_tables(&d->own, d, contexts, freqs) == OK;
    for (uint32_t f = 0; f < flag_contexts && good; f++) {
        good = (d->flag[f] = aligned_zeros((size_t)rows + LANES, sizeof(uint16_t))) != NULL;
        for (uint32_t i = 0; i < rows && good; i++)
            d->flag[f][i] = flag_freq[(size_t)f * rows + order[i]];
    }
    if (!good) {
        depth_free(d);
        return NULL;
    }
    for (uint32_t i = 0; i < rows; i++)
        d->class_end[row_class[order[i]]] = i + 1;
    for (uint32_t c = 1; c < classes; c++)
        if (!d->class_end[c]) /* a class without rows */
            d->class_end[c] = d->class_end[c - 1];
    for (uint32_t c = 0; c < classes; c++)
        fill_flat(&d->flat[c], freqs + (size_t)c * contexts * width, contexts, width, radius[c]);
    return d;
}

int depth_near(Depth *d, uint32_t contexts, const uint16_t *freqs, const uint8_t *bucket) {
    if (!(d->near_flat = aligned_zeros(d->classes, sizeof *d->near_flat)) || fill_tables(&d->near, d, contexts, freqs))
        return NO_MEMORY;
    memcpy(d->bucket, bucket, d->contexts > 1 ? 48 : 16);
    for (uint32_t c = 0; c < d->classes; c++) {
        NearFlat *flat = d->near_flat + c;
        uint32_t symbols = 2 * d->radius[c] + 2u;
        if (symbols > FLAT_CONTEXT)
            continue;
        flat->symbols = (uint16_t)symbols;
        for (uint32_t k = 0; k < MAX_NEAR; k++) {
            uint32_t start = 0;
            for (uint32_t s = 0; s + 1 < symbols; s++) {
                start += k < contexts ? freqs[((size_t)c * contexts + k) * d->width + s] : TOTAL;
                flat->start[s][k] = (int16_t)(start < TOTAL ? start : TOTAL);
            }
        }
    }
    return OK;
}

void depth_free(Depth *d) {
    if (!d)
        return;
    void *parts[] = {d->order, d->class_end, d->flag[0], d->flag[1], d->flat, d->near_flat,
                     d->own.lookup, d->own.encoder, d->own.coded, d->near.lookup, d->near.encoder, d->near.coded,
                     d->radius, d->row_class, d->delta};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        aligned_free(parts[i]);
    free(d);
}

size_t packed_entries(uint32_t size) {
    size_t panels = ((size_t)size + OUTPUTS - 1) / OUTPUTS, pairs = ((size_t)size + 1) / 2;
    return panels * pairs * OUTPUTS * 2;
}

/* mantissa[output][component] * gain[component], to panels of 32 outputs, zeros beyond the size. */
void pack_matrix(int16_t *to, const int8_t *mantissa, const uint8_t *gain, uint32_t size, int paired) {
    uint32_t pairs = (size + 1) / 2;
    for (uint32_t i = 0; i < size; i++) {
        int16_t *panel = to + (size_t)(i / OUTPUTS) * pairs * OUTPUTS * 2;
        uint32_t at = i % OUTPUTS;
        for (uint32_t k = 0; k < size; k++) {
            int16_t *pair = panel + (size_t)(k / 2) * OUTPUTS * 2;
            pair[paired ? 2 * at + k % 2 : at + OUTPUTS * (k % 2)] = (int16_t)(mantissa[(size_t)i * size + k] * gain[k]);
        }
    }
}

void transform_free(Transform *t) {
    if (!t)
        return;
    for (uint32_t s = 0; t->stack && s < t->stacks; s++) {
        aligned_free(t->stack[s].layer);
        aligned_free(t->stack[s].matrix);
    }
    aligned_free(t->stack);
    aligned_free(t->block);
    aligned_free(t->mean);
    free(t);
}

Scratch *scratch_new(uint32_t rows, uint32_t tokens, const Transform *t, int index) {
    Scratch *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    size_t tile = at_most(tokens, TILE), blocks = (tile + TOKENS - 1) / TOKENS, padded = blocks * TOKENS;
    int good = (s->chance = aligned_zeros(LANES, sizeof *s->chance)) != NULL;
    good = good && (s->flags = aligned_zeros((size_t)rows / LANES + 1, sizeof *s->flags)) != NULL;
    good = good && (s->live = aligned_zeros(rows, 1)) != NULL;
    if (index)
        good = good && (s->index = aligned_zeros((size_t)rows * padded, sizeof *s->index)) != NULL;
    if (t) {
        size_t pairs = ((t->most_size > t->width ? t->most_size : t->width) + 1) / 2;
        good = good && (s->list = aligned_zeros(pairs, sizeof *s->list)) != NULL;
        good = good && (s->z = aligned_zeros(pairs * padded, sizeof *s->z)) != NULL;
        good = good && (s->y = aligned_zeros(pairs * padded, sizeof *s->y)) != NULL;
        good = good && (s->values = aligned_zeros(padded * t->padded_width, sizeof *s->values)) != NULL;
    }
    if (!good) {
        scratch_free(s);
        return NULL;
    }
    return s;
}

void scratch_free(Scratch *s) {
    if (!s)
        return;
    void *parts[] = {s->chance, s->flags, s->index, s->live, s->list, s->z, s->y, s->values};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        aligned_free(parts[i]);
    free(s);
}
