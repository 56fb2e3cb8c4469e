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

#define MAX_DIM 8192 /* twice KVSpec's limit: keys and values may lie side by side */
#define BLOCK 8       /* tokens whose rows are written together: neighbours in most caches */
#define SPAN 32       /* numbers of FP4 that share a scale */

enum { F32, F16, BF16, E4M3 }; /* numbers; E4M3 only in payloads */
enum { INT8, INT4, FP4, FP8 }; /* codes; a byte holds two of those with 4 bits */

typedef struct {
    uint8_t *data;
    uint32_t kind;
    size_t layers, halves, heads, tokens, dim;
    ptrdiff_t step[5]; /* strides of [layer, K/V, head, token, dim], in elements */
} Cache;

typedef struct {
    uint32_t form;
    size_t tokens; /* of each unit */
    size_t keys;   /* dims of a key: behind them in a row are the values if there is no axis of both */
    size_t blocks; /* of INT8 and INT4: blocks of heads that share a scale of the values; 0 without values */
} Units;

static inline size_t values_of(const Cache *c, const Units *u) { return c->halves == 2 ? c->dim : c->dim - u->keys; }

/* Codes of one layer of a unit. */
static inline size_t codes_of(const Cache *c, const Units *u) {
    return u->tokens * c->heads * (u->keys + values_of(c, u));
}

static inline size_t code_bytes(const Cache *c, const Units *u) {
    return u->form == INT8 ? codes_of(c, u) : (codes_of(c, u) + 1) / 2;
}

/* FP4's scales of the values of one layer of a unit. */
static inline size_t spans_of(const Cache *c, const Units *u) {
    return (u->tokens * c->heads * values_of(c, u) + SPAN - 1) / SPAN;
}

/* Scales before the codes of a unit. */
static inline size_t scale_bytes(const Cache *c, const Units *u) {
    return c->layers * (u->form == FP4 ? c->heads * u->keys + spans_of(c, u) : 4 * u->blocks);
}

static inline size_t unit_bytes(const Cache *c, const Units *u) {
    return scale_bytes(c, u) + c->layers * code_bytes(c, u);
}

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

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

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
