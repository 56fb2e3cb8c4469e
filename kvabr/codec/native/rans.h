/* State of 64 interleaved rANS decoders over one stream, between steps.
 *
 * A step reads at most 64 words, and may look at 64 words from its start. The words of a stream are therefore read in
 * place except for the last ones, which are read from a copy followed by zeros: no step reads outside of it, and
 * running past the end shows as a position in the zeros.
 */
#ifndef RANS_H
#define RANS_H

#include "kvcoder.h"
#include <string.h>

#define COUNT_BYTES 8 /* of a stream in the directory: words, escapes */
#define STATE_BYTES (4 * LANES)
#define STREAMED 0xFFFF0000u /* and their number, before the directory of several streams */
#define TAIL 128 /* maximum words of a stream in the copy */

#define AHEAD 8 /* rows */

/* Rows are coded class by class, so hardware prefetchers cannot predict the next row. */
static inline void fetch(const void *row, size_t bytes) {
#ifdef __GNUC__
    for (size_t at = 0; at < bytes; at += 64)
        __builtin_prefetch((const char *)row + at);
#else
    (void)row, (void)bytes;
#endif
}

typedef struct Reader {
    uint32_t state[LANES] __attribute__((aligned(64)));
    const uint8_t *word;   /* next */
    const uint8_t *safe;   /* a step may start up to here */
    const uint8_t *end;    /* end of the payload's words, or of those in the copy */
    const uint8_t *escape, *escape_end;
    int in_tail, error;
    uint8_t tail[2 * (TAIL + 2 * LANES)];
} Reader;

static inline uint32_t little32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline void put16(uint8_t *p, uint32_t value) { p[0] = (uint8_t)value, p[1] = (uint8_t)(value >> 8); }
static inline void put32(uint8_t *p, uint32_t value) { put16(p, value), put16(p + 2, value >> 16); }

static inline void reader_to_tail(Reader *r) {
    size_t left = (size_t)(r->end - r->word);
    memcpy(r->tail, r->word, left);
    memset(r->tail + left, 0, sizeof r->tail - left);
    r->word = r->tail;
    r->end = r->tail + left;
    r->safe = r->end;
    r->in_tail = 1;
}

/* The number of streams of a payload, and where its directory begins; 0 if no encoder writes such a number. */
static inline uint32_t streams_of(const uint8_t *data, size_t size, uint32_t rows, size_t *directory) {
    uint32_t first = size < COUNT_BYTES ? 0 : little32(data), n = first & 0xFFFF;
    *directory = first < STREAMED ? 0 : sizeof first;
    return first < STREAMED ? 1 : n > 1 && n <= max_streams(rows) ? n : 0;
}

/* Opens a stream at its states, which has at most `symbols` symbols. */
static inline int reader_open(Reader *r, const uint8_t *data, uint64_t words, uint64_t escapes, uint64_t symbols) {
    if (escapes > symbols)
        return TOO_SHORT;
    for (int lane = 0; lane < LANES; lane++)
        r->state[lane] = little32(data + 4 * lane);
    r->word = data + STATE_BYTES;
    r->end = r->word + 2 * words;
    r->escape = r->end;
    r->escape_end = r->escape + 2 * escapes;
    r->in_tail = 0;
    if (words <= TAIL)
        reader_to_tail(r);
    else
        r->safe = r->end - 2 * LANES;
    return OK;
}

/* Opens the streams of a payload: `n` and `directory` are what `streams_of` found. */
static inline int readers_open(Reader *r, uint32_t n, size_t directory, const uint8_t *data, size_t size, uint32_t rows,
                               uint32_t tokens) {
    uint64_t at = directory + (uint64_t)COUNT_BYTES * n;
    for (uint32_t s = 0; s < n; s++) {
        const uint8_t *count = data + directory + (size_t)COUNT_BYTES * s;
        if (at > size || size - directory < (uint64_t)COUNT_BYTES * n)
            return TOO_SHORT;
        uint64_t words = little32(count), escapes = little32(count + 4), bytes = STATE_BYTES + 2 * words + 2 * escapes;
        uint32_t own = cut_before((Cut){s, n}, rows);
        if (bytes > size - at || reader_open(r + s, data + at, words, escapes, (uint64_t)own * tokens))
            return TOO_SHORT;
        at += bytes;
    }
    return at == size ? OK : TOO_SHORT;
}

/* Called before a step if word > safe: switches to the copy, or reports that the words are used up. */
static inline int reader_refill(Reader *r) {
    if (r->in_tail)
        return TOO_SHORT;
    reader_to_tail(r);
    return OK;
}

#define READER_READY(r) \
    do { \
        if (__builtin_expect((r)->word > (r)->safe, 0) && reader_refill(r)) \
            return TOO_SHORT; \
    } while (0)

static inline int reader_end(const Reader *r) {
    int left = r->word != r->end || r->escape != r->escape_end;
    for (int lane = 0; lane < LANES; lane++)
        left |= r->state[lane] != LOW;
    return left ? LEFT_OVER : OK;
}

static inline int reader_escape(Reader *r, int16_t *value) {
    if (r->escape == r->escape_end)
        return BAD_ESCAPE;
    *value = (int16_t)(r->escape[0] | r->escape[1] << 8);
    r->escape += 2;
    return *value == INT16_MIN ? BAD_ESCAPE : OK;
}

#endif
