/* The encoder's transform: from the elements of a stack to its coefficients. tests/codec/native/oracle.py
 * defines the results, bit for bit.
 *
 *   analysis.c         matrices, packed for all paths
 *   analysis_*.c       one per instruction set: a matrix product in integers, and how elements come to lie for it ...
 *   analysis_tile.h    ... and the code that is the same for all, compiled with each of them
 *   _kvanalysis.c      the Python module
 */
#ifndef ANALYSIS_H
#define ANALYSIS_H

#include "kvcoder.h"

#include <string.h>

#define ROWS 6 /* of a matrix that are multiplied together */
#define WIDE 16 /* tokens of a panel */
#define ENERGY_BITS 13
#define BIGGEST 18446744073709551616.0f
#define GROUP_TOKENS 8 /* that are read at a time */

/* An inverse matrix: entries times factors, powers of two, of rows and columns. */
typedef struct {
    int16_t *entries; /* packed: [panel of rows][pair of columns][ROWS][2] */
    float *rows, *columns;
} Inverse;

/* The transform of one stack. */
typedef struct {
    uint32_t kind, first, layers; /* 0: keys, 1: values; range of layers */
    uint32_t kv_heads, head_dim, block_heads, blocks, width, kept, size; /* blocks: per layer; size: components per stack */
    uint32_t rotary, interleaved, turned; /* dimensions that rotate, 0 for values; which form pairs; the first of them */
    float *mean;                  /* [layer][head][dim] */
    float *scale;                 /* [layer]: 1 / norm */
    Inverse block;                /* [layer][block] of each array; NULL: components are channels */
    Inverse stack;                /* NULL: nothing is kept */
} Analysis;

typedef struct {
    const char *data;
    int dtype;
    ptrdiff_t stride[5]; /* elements: layer, K/V, head, token, dim */
    uint32_t tokens;
    const float *cos, *sin; /* [token][rotary / 2], including the inverse factor */
} Group;

typedef struct {
    float *rows;    /* [row of the stack][token] */
    float *largest; /* [3][token], running maxima: of channels, of kept components, of rows */
    float *power;   /* [layer of the stack][token], in units before scaling */
} Analysed;

/* One instruction set. */
typedef struct {
    const char *name;
    int (*supported)(void);
    /* OK or NO_MEMORY. */
    int (*run)(const Analysis *, const Group *, const Analysed *);
} AnalysisPath;

extern const AnalysisPath analysis_portable;
#ifdef HAVE_X86
extern const AnalysisPath analysis_avx2;
#endif

/* All that this processor supports, fastest first, NULL at the end. */
const AnalysisPath *const *analysis_paths(void);
/* Number of entries of a packed matrix, and packing from [row][column]. */
size_t analysis_packed(uint32_t size);
void analysis_pack(int16_t *to, const int16_t *from, uint32_t size);

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Positive floats order like their bits, which compilers like better to vectorise. */
static inline float greatest(float most, float value) {
    int32_t size = bits_of(value) & INT32_MAX, other = bits_of(most);
    return float_of(size > other ? size : other);
}

#endif
