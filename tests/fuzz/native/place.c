/* Payloads of token-separable codecs into caches of any shape and strides: both paths refuse the same, or write the same. */
#include "placing.h"

#include "input.h"

static float finite_half(uint16_t h) { return (float)(int16_t)h / 64.0f; }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Input in = {data, data + size};
    static const uint32_t dims[] = {1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 48, 64};
    Cache c = {.kind = below(&in, 3), .layers = 1 + below(&in, 3), .heads = 1 + below(&in, 4)};
    Units u = {.form = below(&in, 3), .tokens = 1 + below(&in, 5), .blocks = 1 + below(&in, 4)};
    c.tokens = u.tokens * (1 + below(&in, 5)), u.keys = dims[below(&in, 12)];
    while (c.heads % u.blocks)
        u.blocks--;
    uint32_t how = byte(&in), unlike = byte(&in); /* keys and values in an axis of their own, or one behind the other */
    size_t values = unlike & 1 ? unlike >> 1 & 1 ? dims[(unlike >> 2) % 12] : 0 : u.keys;
    c.halves = unlike & 1 ? 1 : 2, c.dim = unlike & 1 ? u.keys + values : u.keys;
    if (!values || u.form == FP4)
        u.blocks = 0;
    uint32_t shape[5] = {(uint32_t)c.layers, (uint32_t)c.halves, (uint32_t)c.heads, (uint32_t)c.tokens, (uint32_t)c.dim};
    size_t each = c.kind == F32 ? 4 : 2, span = spread(how, shape, c.step) * each, odd = how >> 3 & 1;
    size_t numbers = c.layers * c.halves * c.heads * c.dim;
    int casts = how >> 4 & 1;
    uint32_t kind = how >> 6 & 1 ? E4M3 : how >> 5 & 1 ? F16 : BF16;
    size_t bytes = casts ? (kind == E4M3 ? 1 : 2) * numbers * c.tokens : c.tokens / u.tokens * unit_bytes(&c, &u);
    size_t scales = casts ? numbers : 2 * c.layers * c.heads * u.keys;
    float *head = need(malloc(scales * sizeof *head));
    for (size_t i = 0; i < scales; i++)
        head[i] = finite_half((uint16_t)(byte(&in) << 8 | byte(&in)));
    uint8_t *from = filled(&in, bytes);
    uint8_t *memory[2], good[2];
    for (int path = 0; path < 1 + fast_here(); path++) {
        memory[path] = need(malloc(span + odd));
        memset(memory[path], 0x55, span + odd);
        c.data = memory[path] + odd; /* at an odd address */
        if (casts)
            good[path] = (uint8_t)(path ? cast_avx2(&c, from, kind, head) : cast_portable(&c, from, kind, head));
        else
            good[path] = (uint8_t)(path ? dequantised_avx2(&c, from, &u, head, head + scales / 2)
                                        : dequantised_portable(&c, from, &u, head, head + scales / 2));
    }
    if (fast_here()) {
        CHECK(good[0] == good[1]);
        CHECK(!good[0] || !memcmp(memory[0], memory[1], span + odd));
        free(memory[1]);
    }
    free(memory[0]), free(from), free(head);
    return 0;
}
