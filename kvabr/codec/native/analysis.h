/* The encoder's transform, in single precision: from the elements of a stack to its coefficients.
 *
 *   analysis.c     with AVX-512; on processors without it torch is as fast as this would be
 *   _kvanalysis.c  the Python module; analysis.py defines the results
 */
#ifndef ANALYSIS_H
#define ANALYSIS_H

#include "kvcoder.h"

/* The transform of one stack. */
typedef struct {
    uint32_t kind, first, layers; /* 0: keys, 1: values; range of layers */
    uint32_t kv_heads, head_dim, block_heads, blocks, width, kept, size; /* blocks: per layer; size: components per stack */
    uint32_t rotary, interleaved, turned; /* dimensions that rotate, 0 for values; which form pairs; the first of them */
    float *mean;                  /* [layer][head][dim] */
    float *scale;                 /* [layer]: 1 / norm */
    float *block;                 /* [layer][block] of packed matrices; NULL: components are channels */
    float *stack;                 /* packed; NULL: nothing is kept */
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
    float *power;   /* [layer][token]: of keys */
} Analysed;

/* Whether this processor supports it. */
int analysis_runs(void);
/* Number of floats in a packed matrix, and packing from [row][column]. */
size_t analysis_packed(uint32_t size);
void analysis_pack(float *to, const float *from, uint32_t size);
/* OK or NO_MEMORY. */
int analysis_run(const Analysis *, const Group *, const Analysed *);

#endif
