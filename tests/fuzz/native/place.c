/* Payloads of token-separable codecs into caches of any shape and strides: both paths refuse the same, or write the same. */
#include "placing.h"

#include "input.h"

static float finite_half(uint16_t h) { return (float)(int16_t)h / 64.0f; }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Input in = {data, data + size};
    static const uint32_t dims[] = {1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 48, 64};
    Cache c = {.kind = below(&in, 3), .layers = 1 + below(&in, 3), .heads = 1 + below(&in, 4)};
    Units u = {.bits = below(&in, 2) ? 8 : 4, .tokens = 1 + below(&in, 5), .blocks = 1 + below(&in, 4)};
    c.tokens = u.tokens * (1 + below(&in, 5)), c.dim = dims[below(&in, 12)];
    while (c.heads % u.blocks)
        u.blocks--;
    uint32_t how = byte(&in), shape[5] = {(uint32_t)c.layers, 2, (uint32_t)c.heads, (uint32_t)c.tokens, (uint32_t)c.dim};
    size_t each = c.kind == F32 ? 4 : 2, span = spread(how, shape, c.step) * each, odd = how >> 3 & 1;
    size_t channels = c.layers * c.heads * c.dim;
    int casts = how >> 4 & 1;
    size_t bytes = casts ? 4 * channels * c.tokens
                         : c.tokens / u.tokens * 4 * c.layers * u.blocks + c.tokens * channels * u.bits / 4;
    float *head = need(malloc(2 * channels * sizeof *head));
    for (size_t i = 0; i < 2 * channels; i++)
        head[i] = finite_half((uint16_t)(byte(&in) << 8 | byte(&in)));
    uint8_t *from = filled(&in, bytes);
    uint8_t *memory[2], good[2];
    for (int path = 0; path < 1 + fast_here(); path++) {
        memory[path] = need(malloc(span + odd));
        memset(memory[path], 0x55, span + odd);
        c.data = memory[path] + odd; /* at an odd address */
        uint32_t kind = how >> 5 & 1 ? F16 : BF16;
        if (casts)
            good[path] = (uint8_t)(path ? cast_avx2(&c, from, kind) : cast_portable(&c, from, kind));
        else
            good[path] = (uint8_t)(path ? affine_avx2(&c, from, &u, head, head + channels)
                                        : affine_portable(&c, from, &u, head, head + channels));
    }
    if (fast_here()) {
        CHECK(good[0] == good[1]);
        CHECK(!good[0] || !memcmp(memory[0], memory[1], span + odd));
        free(memory[1]);
    }
    free(memory[0]), free(from), free(head);
    return 0;
}
