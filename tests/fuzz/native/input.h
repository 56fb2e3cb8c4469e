/* An input as what it is asked for: bytes, choices, and the seeds of dice for what would be too long to spell out. */
#ifndef INPUT_H
#define INPUT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(good) \
    do { \
        if (!(good)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #good); \
            abort(); \
        } \
    } while (0)

typedef struct {
    const uint8_t *at, *end;
} Input;

/* 0 when there are no more. */
static inline uint32_t byte(Input *in) { return in->at < in->end ? *in->at++ : 0; }
static inline uint32_t below(Input *in, uint32_t n) { return byte(in) % n; }
static inline size_t left(const Input *in) { return (size_t)(in->end - in->at); }

/* `size` bytes of memory of exactly that size, which the rest of the input fills, again and again. */
static inline uint8_t *filled(const Input *in, size_t size) {
    uint8_t *to = malloc(size ? size : 1);
    CHECK(to);
    size_t n = left(in);
    for (size_t at = 0; at < size; at += n ? n : size)
        if (n)
            memcpy(to + at, in->at, n < size - at ? n : size - at);
        else
            memset(to, 0, size);
    return to;
}

/* splitmix64 */
static inline uint64_t roll(uint64_t *dice) {
    uint64_t z = *dice += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static inline uint32_t rolled(uint64_t *dice, uint32_t n) { return (uint32_t)(roll(dice) % n); }

static inline void *need(void *p) {
    CHECK(p);
    return p;
}

/* Strides, in elements, of a cache [layer, K/V, head, token, dim]; returns how many elements it spans. */
static inline size_t spread(uint32_t kind, const uint32_t *shape, ptrdiff_t *stride) {
    static const int orders[4][5] = {{0, 1, 2, 3, 4}, {0, 1, 3, 2, 4}, {0, 1, 2, 4, 3}, {2, 0, 3, 1, 4}};
    const int *order = orders[kind % 4];
    ptrdiff_t step = kind / 4 % 2 ? 3 : 1; /* every third element */
    size_t last = 0;
    for (int i = 5; i-- > 0; step *= shape[order[i]])
        stride[order[i]] = step;
    for (int i = 0; i < 5; i++)
        last += (size_t)stride[i] * (shape[i] - 1);
    return last + 1;
}

#endif
