/* The encoder's transform of caches of any shape and strides. Without matrices and rotation the result is known exactly. */
#include "analysis.h"

#include "input.h"

static float *floats(const Input *in, size_t n) { return (float *)(void *)filled(in, n * sizeof(float)); }

static float *packed(uint32_t count, uint32_t size, uint64_t *dice) {
    float *from = need(malloc((size_t)size * size * sizeof *from + 4));
    float *to = need(malloc(count * analysis_packed(size) * sizeof *to + 4));
    for (uint32_t m = 0; m < count; m++) {
        for (uint32_t i = 0; i < size * size; i++)
            from[i] = (float)(int)rolled(dice, 2001) / 1000 - 1;
        analysis_pack(to + m * analysis_packed(size), from, size);
    }
    free(from);
    return to;
}

static float at(const Group *g, const Analysis *a, uint32_t layer, uint32_t head, uint32_t token, uint32_t dim) {
    ptrdiff_t i = (ptrdiff_t)(a->first + layer) * g->stride[0] + (ptrdiff_t)a->kind * g->stride[1] +
                  (ptrdiff_t)head * g->stride[2] + (ptrdiff_t)token * g->stride[3] + (ptrdiff_t)dim * g->stride[4];
    return ((const float *)(const void *)g->data)[i];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Input in = {data, data + size};
    static const uint32_t dims[] = {1, 2, 3, 7, 15, 16, 17, 32, 33, 40}, tokens[] = {1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 200};
    if (!analysis_runs())
        return 0;
    uint32_t how = byte(&in), layers = 1 + below(&in, 3), kept;
    uint64_t dice = byte(&in);
    Analysis a = {.kind = how & 1, .block_heads = 1 + below(&in, 3), .blocks = 1 + below(&in, 3), .head_dim = dims[below(&in, 10)]};
    a.first = below(&in, layers), a.layers = layers - a.first;
    a.kv_heads = a.block_heads * a.blocks, a.width = a.block_heads * a.head_dim;
    kept = how & 2 ? below(&in, a.width + 1) / 2 * 2 : 0;
    a.rotary = !a.kind && how & 4 ? below(&in, a.head_dim + 1) / 2 * 2 : 0, a.interleaved = how >> 3 & 1;
    a.kept = kept, a.size = a.layers * a.blocks * kept;
    if (a.size > 256)
        return 0; /* too slow */
    Group g = {.dtype = (int)below(&in, 3), .tokens = tokens[below(&in, 12)]};
    uint32_t shape[5] = {layers, 2, a.kv_heads, g.tokens, a.head_dim};
    size_t each = g.dtype == FLOAT32 ? 4 : 2, span = spread(byte(&in), shape, g.stride) * each;
    g.data = (char *)filled(&in, span);
    g.cos = floats(&in, (size_t)g.tokens * (a.rotary / 2)), g.sin = floats(&in, (size_t)g.tokens * (a.rotary / 2));
    a.mean = floats(&in, (size_t)a.layers * a.kv_heads * a.head_dim), a.scale = floats(&in, a.layers);
    a.block = how & 16 ? packed(a.layers * a.blocks, a.width, &dice) : NULL;
    a.stack = a.size ? packed(1, a.size, &dice) : NULL;
    size_t rows = (size_t)a.layers * a.blocks * a.width * g.tokens * sizeof(float);
    Analysed out = {need(malloc(rows)), need(calloc((size_t)3 * g.tokens, sizeof(float))),
                    need(calloc(a.kind ? 1 : (size_t)a.layers * g.tokens, sizeof(float)))};
    memset(out.rows, 0x55, rows);
    CHECK(analysis_run(&a, &g, &out) == OK);
    if (!a.block && !a.size && !a.rotary && g.dtype == FLOAT32)
        for (uint32_t l = 0, row = 0; l < a.layers; l++)
            for (uint32_t h = 0; h < a.kv_heads; h++)
                for (uint32_t d = 0; d < a.head_dim; d++, row++)
                    for (uint32_t t = 0; t < g.tokens; t++) {
                        float less = at(&g, &a, l, h, t, d) - a.mean[(l * a.kv_heads + h) * a.head_dim + d];
                        float wanted = less * a.scale[l], found = out.rows[(size_t)row * g.tokens + t];
                        CHECK(wanted != wanted ? found != found : wanted == found);
                    }
    free((void *)(uintptr_t)g.data), free((void *)(uintptr_t)g.cos), free((void *)(uintptr_t)g.sin);
    free(a.mean), free(a.scale), free(a.block), free(a.stack), free(out.rows), free(out.largest), free(out.power);
    return 0;
}
