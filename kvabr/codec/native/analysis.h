/* The encoder's transform, in single precision: from the elements of a stack to its coefficients.
 *
 *   analysis.c     by AVX-512; on processors without it torch does as well as anything here would
 *   _kvanalysis.c  the Python module; analysis.py says what is computed
 */
#ifndef ANALYSIS_H
#define ANALYSIS_H

#include "kvcoder.h"

/* What one stack is transformed by. */
typedef struct {
    uint32_t kind, first, layers; /* 0: keys; of which layers */
    uint32_t kv_heads, head_dim, block_heads, blocks, width, kept, size; /* blocks: of a layer; size: what a stack takes */
    uint32_t rotary, interleaved; /* leading dimensions that turn, 0 for values; which form pairs */
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
    const float *cos, *sin; /* [token][rotary / 2], the factor undone, too */
} Group;

typedef struct {
    float *rows;    /* [row of the stack][token] */
    float *largest; /* [3][token], not below what it was: of channels, of components that are kept, of rows */
    float *power;   /* [layer][token]: of keys */
} Analysed;

/* Whether this processor can. */
int analysis_runs(void);
/* Floats of a packed matrix, and from [row][column] to it. */
size_t analysis_packed(uint32_t size);
void analysis_pack(float *to, const float *from, uint32_t size);
/* OK or NO_MEMORY. */
int analysis_run(const Analysis *, const Group *, const Analysed *);

#endif
