/* State of 64 interleaved rANS decoders over one payload, between steps.
 *
 * A step reads at most 64 words, and may look at 64 words from its start. The words of a payload are therefore read in
 * place except for the last ones, which are read from a copy followed by zeros: no step reads outside of it, and
 * running past the end shows as a position in the zeros.
 */
#ifndef RANS_H
#define RANS_H

#include "kvcoder.h"
#include <string.h>

#define HEAD_BYTES (8 + 4 * LANES)
#define TAIL 128 /* maximum words of the payload in the copy */

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
    int in_tail;
    uint8_t tail[2 * (TAIL + 2 * LANES)];
} Reader;

static inline uint32_t little32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline void reader_to_tail(Reader *r) {
    size_t left = (size_t)(r->end - r->word);
    memcpy(r->tail, r->word, left);
    memset(r->tail + left, 0, sizeof r->tail - left);
    r->word = r->tail;
    r->end = r->tail + left;
    r->safe = r->end;
    r->in_tail = 1;
}

/* Opens a payload of `symbols` symbols. */
static inline int reader_open(Reader *r, const uint8_t *data, size_t size, uint64_t symbols) {
    if (size < HEAD_BYTES)
        return TOO_SHORT;
    uint64_t words = little32(data), escapes = little32(data + 4);
    if (size != HEAD_BYTES + 2 * words + 2 * escapes || escapes > symbols)
        return TOO_SHORT;
    for (int lane = 0; lane < LANES; lane++)
        r->state[lane] = little32(data + 8 + 4 * lane);
    r->word = data + HEAD_BYTES;
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
