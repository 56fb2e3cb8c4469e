/* Placing without Python: the cache to write to, and place.h for each instruction set. Included once, by _kvplace.c. */
#ifndef PLACING_H
#define PLACING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__)
#define HAVE_X86
#include <immintrin.h>
#endif

#define MOST_DIM 4096 /* KVSpec has the same limit */
#define BLOCK 8       /* tokens whose rows are written together: neighbours in most caches */

enum { F32, F16, BF16 };

typedef struct {
    uint8_t *data;
    uint32_t kind;
    size_t layers, heads, tokens, dim;
    ptrdiff_t step[5]; /* strides of [layer, K/V, head, token, dim], in elements */
} Cache;

typedef struct {
    uint32_t bits;
    size_t tokens, blocks; /* tokens of each unit; blocks of heads that share a scale of the values */
} Units;

static inline float number(uint32_t x) {
    float f;
    memcpy(&f, &x, sizeof f);
    return f;
}

static inline uint32_t bits(float f) {
    uint32_t x;
    memcpy(&x, &f, sizeof x);
    return x;
}

static inline uint8_t *row_of(const Cache *c, size_t l, size_t k, size_t h, size_t t) {
    ptrdiff_t at = (ptrdiff_t)l * c->step[0] + (ptrdiff_t)k * c->step[1] + (ptrdiff_t)h * c->step[2] +
                   (ptrdiff_t)t * c->step[3];
    return c->data + at * (c->kind == F32 ? 4 : 2);
}

#define PATH(name) name##_portable
#include "place.h"
#undef PATH

#ifdef HAVE_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define PATH(name) name##_avx2
#define PLACE_F16C
#include "place.h"
#undef PATH
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

static int fast_here(void) {
#ifdef HAVE_X86
    return __builtin_cpu_supports("avx2"); /* all that have it have F16C, which not every compiler can ask for */
#else
    return 0;
#endif
}

#endif
