/* The encoder's transform of caches of any shape and strides. All paths make the same; without matrices and rotation the
 * result is known exactly. */
#include "analysis.h"

#include "input.h"

static float *floats(const Input *in, size_t n) { return (float *)(void *)filled(in, n * sizeof(float)); }

static float *powers(size_t n, uint64_t *dice) {
    float *to = need(malloc(n * sizeof *to + 4));
    for (size_t i = 0; i < n; i++)
        to[i] = float_of((int32_t)(117 + rolled(dice, 21)) << 23);
    return to;
}

static Inverse packed(uint32_t count, uint32_t size, uint64_t *dice) {
    size_t each = analysis_packed(size);
    int16_t *from = need(malloc((size_t)size * size * sizeof *from + 4)), *to = need(malloc(count * each * sizeof *to + 4));
    for (uint32_t m = 0; m < count; m++) {
        for (uint32_t i = 0; i < size * size; i++)
            from[i] = (int16_t)((int)rolled(dice, 2001) - 1000);
        analysis_pack(to + m * each, from, size);
    }
    free(from);
    return (Inverse){to, powers((size_t)count * size, dice), powers((size_t)count * size, dice)};
}

static void unpacked(Inverse *i) { free(i->entries), free(i->rows), free(i->columns); }

static float at(const Group *g, const Analysis *a, uint32_t layer, uint32_t head, uint32_t token, uint32_t dim) {
    ptrdiff_t i = (ptrdiff_t)(a->first + layer) * g->stride[0] + (ptrdiff_t)a->kind * g->stride[1] +
                  (ptrdiff_t)head * g->stride[2] + (ptrdiff_t)token * g->stride[3] + (ptrdiff_t)dim * g->stride[4];
    return ((const float *)(const void *)g->data)[i];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Input in = {data, data + size};
    static const uint32_t dims[] = {1, 2, 3, 7, 15, 16, 17, 32, 33, 40}, tokens[] = {1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 200};
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
    if (how & 16)
        a.block = packed(a.layers * a.blocks, a.width, &dice);
    if (a.size)
        a.stack = packed(1, a.size, &dice);
    size_t rows = (size_t)a.layers * a.blocks * a.width * g.tokens * sizeof(float), most = (size_t)3 * g.tokens;
    Analysed out = {need(malloc(rows)), need(calloc(most, sizeof(float))), need(calloc((size_t)a.layers * g.tokens, sizeof(float)))};
    memset(out.rows, 0x55, rows);
    CHECK(analysis_portable.run(&a, &g, &out) == OK);
    for (const AnalysisPath *const *path = analysis_paths(); *path; path++) {
        Analysed own = {need(malloc(rows)), need(calloc(most, sizeof(float))), need(calloc((size_t)a.layers * g.tokens, sizeof(float)))};
        memset(own.rows, 0x55, rows);
        CHECK((*path)->run(&a, &g, &own) == OK);
        CHECK(memcmp(own.rows, out.rows, rows) == 0 && memcmp(own.largest, out.largest, most * sizeof(float)) == 0);
        free(own.rows), free(own.largest), free(own.power);
    }
    if (!a.block.entries && !a.size && !a.rotary && g.dtype == FLOAT32)
        for (uint32_t l = 0, row = 0; l < a.layers; l++)
            for (uint32_t h = 0; h < a.kv_heads; h++)
                for (uint32_t d = 0; d < a.head_dim; d++, row++)
                    for (uint32_t t = 0; t < g.tokens; t++) {
                        float less = at(&g, &a, l, h, t, d) - a.mean[(l * a.kv_heads + h) * a.head_dim + d];
                        float wanted = less * a.scale[l], found = out.rows[(size_t)row * g.tokens + t];
                        wanted = wanted < BIGGEST ? wanted : BIGGEST;
                        CHECK((wanted > -BIGGEST ? wanted : -BIGGEST) == found);
                    }
    free((void *)(uintptr_t)g.data), free((void *)(uintptr_t)g.cos), free((void *)(uintptr_t)g.sin);
    free(a.mean), free(a.scale), unpacked(&a.block), unpacked(&a.stack), free(out.rows), free(out.largest), free(out.power);
    return 0;
}
