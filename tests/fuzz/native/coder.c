/* The coder, path by path: payloads that were tampered with, indices, coefficients. All paths refuse the same, with the same
 * error, or give the same bits; and what was encoded decodes to what it was.
 *
 *   case 1 | mode 1 | kind of output 1 | tokens 1 | ...
 */
#include "rans.h"

#include "input.h"

#define CASES 40
#define MAX_TOKENS 300
#define CHAIN 3

static const uint32_t token_counts[] = {1, 2, 7, 8, 9, 16, 31, 63, 64, 65, 100, 127, 128, 129, 200, MAX_TOKENS};
static const uint8_t separator[4] = {0xF7, 'S', 'E', 'P'};

typedef struct {
    int made;
    Depth *depth[CHAIN];
    Transform transform[3]; /* for each path */
    int depths;
    uint32_t tokens;
    float *scale, *cos, *sin;
    int16_t *index[CHAIN];   /* [row][token] */
    uint8_t *payload[CHAIN]; /* of these */
    size_t size[CHAIN];
    int refers; /* whether tokens refer to others */
} Case;

static const Path *paths[2];
static int path_count;
static Case cases[CASES];

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    __builtin_cpu_init();
    paths[path_count++] = &path_portable;
#ifdef HAVE_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt"))
        paths[path_count++] = &path_avx2;
#endif
    return 0;
}

/* ------------------------------------------------------------------ tables and matrices */

/* Frequencies that sum to TOTAL: none above TOTAL - 1, the last symbol, the escape, at least 1. */
static void table(uint16_t *freqs, uint32_t symbols, uint64_t *dice) {
    uint32_t rest = TOTAL - 2;
    memset(freqs, 0, symbols * sizeof *freqs);
    freqs[symbols - 1] = 1, freqs[symbols / 2 == symbols - 1 ? 0 : symbols / 2] = 1;
    while (rest) {
        uint32_t share = 1 + rolled(dice, rolled(dice, 3) ? 200 : TOTAL);
        share = share > rest ? rest : share;
        uint32_t which = rolled(dice, symbols);
        if (freqs[which] + share >= TOTAL)
            continue;
        freqs[which] = (uint16_t)(freqs[which] + share), rest -= share;
    }
}

/* The tables of tokens that refer to others. */
static void near_tables(Depth *d, const uint8_t *radius, uint64_t *dice) {
    uint32_t contexts = 1 + rolled(dice, MAX_NEAR);
    uint8_t bucket[48];
    uint16_t *freqs = need(calloc((size_t)d->classes * contexts * d->width, sizeof *freqs));
    for (uint32_t t = 0; t < d->classes * contexts; t++)
        table(freqs + (size_t)t * d->width, 2u * radius[t / contexts] + 2, dice);
    for (size_t i = 0; i < sizeof bucket; i++)
        bucket[i] = (uint8_t)rolled(dice, contexts);
    CHECK(depth_near(d, contexts, freqs, bucket) == OK);
    free(freqs);
}

static Depth *tables(uint32_t rows, int refines, int refers, uint64_t *dice) {
    static const uint8_t radii[] = {0, 1, 1, 1, 2, 3, 5, 8, 15, 16, 40, 126};
    uint32_t classes = 1 + rolled(dice, 6), contexts = refines ? 3 : 1, widest = 0;
    uint8_t radius[8], delta[8], *of_row = need(malloc(rows));
    for (uint32_t c = 0; c < classes; c++) {
        radius[c] = radii[rolled(dice, sizeof radii)], delta[c] = (uint8_t)rolled(dice, 8);
        widest = radius[c] > widest ? radius[c] : widest;
    }
    uint32_t width = 2 * widest + 2;
    uint16_t *freqs = need(calloc((size_t)classes * contexts * width, sizeof *freqs));
    uint16_t *flags = need(malloc((refines ? 2 : 1) * (size_t)rows * sizeof *flags));
    uint32_t *order = need(malloc(rows * sizeof *order)), at = 0;
    for (uint32_t t = 0; t < classes * contexts; t++)
        table(freqs + (size_t)t * width, 2u * radius[t / contexts] + 2, dice);
    for (uint32_t r = 0; r < rows; r++)
        of_row[r] = (uint8_t)rolled(dice, classes);
    for (uint32_t c = 0; c < classes; c++)
        for (uint32_t r = 0; r < rows; r++)
            if (of_row[r] == c)
                order[at++] = r;
    for (uint32_t r = 0; r < (refines ? 2 : 1) * rows; r++)
        flags[r] = (uint16_t)(1 + rolled(dice, TOTAL - 1));
    Depth *d = need(depth_new(rows, classes, contexts, width, of_row, radius, freqs, flags, delta, order));
    if (refers)
        near_tables(d, radius, dice);
    free(of_row), free(freqs), free(flags), free(order);
    return d;
}

static int8_t *mantissas(size_t n, uint64_t *dice) {
    int8_t *to = need(malloc(n ? n : 1));
    for (size_t i = 0; i < n; i++)
        to[i] = (int8_t)roll(dice);
    return to;
}

static uint8_t *gains(size_t n, uint64_t *dice) {
    uint8_t *to = need(malloc(n ? n : 1));
    uint32_t kind = rolled(dice, 3), same = rolled(dice, 256);
    for (size_t i = 0; i < n; i++) /* equal, equal in fours, different */
        to[i] = (uint8_t)(kind == 0 ? same : kind == 1 ? (i / 4 % 5 ? 9 : 200) : rolled(dice, 256));
    return to;
}

/* Makes the same transform for every path: from one seed. */
static void make_transform(Transform *t, const Path *path, uint64_t dice) {
    static const uint32_t dims[] = {1, 2, 3, 7, 16, 33};
    t->layers = 1 + rolled(&dice, 3), t->block_heads = 1 + rolled(&dice, 2), t->blocks = 1 + rolled(&dice, 2);
    t->head_dim = dims[rolled(&dice, 6)], t->kv_heads = t->block_heads * t->blocks, t->width = t->block_heads * t->head_dim;
    t->padded_width = (t->width + OUTPUTS - 1) / OUTPUTS * OUTPUTS, t->rows = t->layers * 2 * t->kv_heads * t->head_dim;
    t->rotary = rolled(&dice, t->head_dim / 2 + 1) * 2, t->interleaved = rolled(&dice, 2), t->paired = path->paired;
    size_t count = (size_t)t->layers * 2 * t->blocks;
    t->mean = need(aligned_zeros(count * t->padded_width, sizeof *t->mean));
    for (size_t i = 0; i < count * t->padded_width; i++)
        t->mean[i] = i % t->padded_width < t->width ? (float)(int)rolled(&dice, 2000) / 100 - 10 : 0;
    if (rolled(&dice, 4)) {
        int8_t *from = mantissas(count * t->width * t->width, &dice);
        uint8_t *gain = gains(count * t->width, &dice);
        t->block_entries = packed_entries(t->width);
        t->block = need(aligned_zeros(count * t->block_entries, sizeof *t->block));
        for (size_t i = 0; i < count; i++)
            pack_matrix(t->block + i * t->block_entries, from + i * t->width * t->width, gain + i * t->width, t->width, t->paired);
        free(from), free(gain);
    }
    t->stack = need(aligned_zeros(2 * t->layers, sizeof *t->stack));
    uint32_t row = 0, split = rolled(&dice, 2);
    for (uint32_t kv = 0; kv < 2; kv++)
        for (uint32_t layer = 0; layer < t->layers; layer += split ? 1 : t->layers) {
            StackTransform *s = t->stack + t->stacks++;
            s->kv = kv, s->layers = split ? 1 : t->layers, s->kept = rolled(&dice, t->width / 2 + 1) * 2, s->first_row = row;
            s->layer = need(aligned_zeros(s->layers, sizeof *s->layer));
            for (uint32_t i = 0; i < s->layers; i++)
                s->layer[i] = layer + i;
            s->size = s->layers * t->blocks * s->kept;
            t->most_size = s->size > t->most_size ? s->size : t->most_size;
            row += s->layers * t->blocks * t->width;
            int8_t *from = mantissas((size_t)s->size * s->size, &dice);
            uint8_t *gain = gains(s->size, &dice);
            if (s->size) {
                s->matrix = need(aligned_zeros(packed_entries(s->size), sizeof *s->matrix));
                pack_matrix(s->matrix, from, gain, s->size, t->paired);
            }
            free(from), free(gain);
        }
    CHECK(row == t->rows);
}

/* Some references of a group: the same for the same number of tokens. */
typedef struct {
    uint8_t place[MAX_TOKENS], lane[MAX_TOKENS];
} Referring;

static References references(const Case *it, uint32_t tokens, Referring *to) {
    uint64_t dice = tokens;
    if (!it->refers)
        return (References){NULL, NULL};
    memset(to, 0, sizeof *to);
    for (uint32_t first = 0; first < tokens; first += TILE) {
        uint32_t here = at_most(TILE, tokens - first), early = 0, late = LANES;
        for (uint32_t t = 0; t < here; t++) {
            int second = here > LANES && (early == LANES || (late < here && rolled(&dice, 2)));
            to->place[first + (second ? late++ : early++)] = (uint8_t)t;
        }
        for (uint32_t t = LANES; t < here; t++)
            to->lane[first + t] = (uint8_t)rolled(&dice, LANES);
    }
    return (References){to->place, to->lane};
}

/* Rows of tokens in the order in which they are coded. */
static int16_t *by_place(const int16_t *index, uint32_t rows, uint32_t tokens, References by) {
    int16_t *to = need(malloc((size_t)rows * tokens * sizeof *to));
    for (size_t row = 0; row < rows; row++)
        for (uint32_t p = 0; p < tokens; p++)
            to[row * tokens + p] = index[row * tokens + (by.place ? p / TILE * TILE + by.place[p] : p)];
    return to;
}

static void fill_indices(Case *it, uint64_t *dice) {
    uint32_t rows = it->depth[0]->rows;
    for (int d = it->depths; d-- > 0;)
        it->index[d] = need(malloc((size_t)rows * it->tokens * sizeof(int16_t)));
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t loud = rolled(dice, 4);
        for (uint32_t t = 0; t < it->tokens; t++) {
            int value = loud ? (int)rolled(dice, 1u << 2 * loud) - (1 << (2 * loud - 1)) : 0;
            value = rolled(dice, 500) ? value : (int)rolled(dice, 6000) - 3000;
            for (int d = 0; d < it->depths; d++, value = 3 * value + (int)rolled(dice, 3) - 1)
                it->index[d][(size_t)r * it->tokens + t] = (int16_t)(value > 32767 ? 32767 : value < -32767 ? -32767 : value);
        }
    }
}

static Case *case_of(uint32_t number) {
    Case *it = cases + number % CASES;
    if (it->made)
        return it;
    uint64_t dice = 1000 + number % CASES;
    for (int p = 0; p < path_count; p++)
        make_transform(it->transform + p, paths[p], 5000 + number % CASES);
    const Transform *t = it->transform;
    it->depths = 1 + (int)rolled(&dice, CHAIN), it->tokens = token_counts[rolled(&dice, 14)];
    it->refers = number % CASES % 2;
    for (int d = 0; d < it->depths; d++)
        it->depth[d] = tables(t->rows, d > 0, it->refers, &dice);
    size_t angles = (size_t)MAX_TOKENS * (t->rotary / 2 + 1);
    it->scale = need(malloc(2 * t->layers * sizeof(float)));
    it->cos = need(malloc(angles * sizeof(float))), it->sin = need(malloc(angles * sizeof(float)));
    for (uint32_t i = 0; i < 2 * t->layers; i++)
        it->scale[i] = (float)(1 + rolled(&dice, 1000)) * 1e-8f;
    for (size_t i = 0; i < angles; i++)
        it->cos[i] = (float)(int)rolled(&dice, 2001) / 1000 - 1, it->sin[i] = (float)(int)rolled(&dice, 2001) / 1000 - 1;
    fill_indices(it, &dice);
    Referring some;
    for (int d = 0; d < it->depths; d++) {
        Indices from = {.index = it->index[d], .below = d ? it->index[d - 1] : NULL};
        from.references = references(it, it->tokens, &some);
        uint32_t streams = 1 + rolled(&dice, max_streams(it->depth[d]->rows));
        CHECK(encode_group(paths[0], it->depth[d], &from, it->tokens, streams, 1, it->payload + d, it->size + d) == OK);
    }
    it->made = 1;
    return it;
}

/* ------------------------------------------------------------------ what the input asks for */

typedef struct {
    uint8_t *data;
    size_t size;
} Bytes;

/* A payload as a part of the input means it: 0: raw; 2: number of escapes 1, then states, words and escapes, to which the
 * lengths are set right; anything else: the valid one, changed by (place 2, xor 1) ... */
static Bytes meant(const uint8_t *part, size_t size, const uint8_t *valid, size_t valid_size) {
    uint32_t mode = size ? part[0] : 1;
    const uint8_t *rest = part + (size ? 1 : 0);
    size_t n = size ? size - 1 : 0;
    if (mode == 0) {
        uint8_t *to = need(malloc(n ? n : 1));
        memcpy(to, rest, n);
        return (Bytes){to, n};
    }
    if (mode == 2) {
        size_t body = n ? n - 1 : 0, words = body > STATE_BYTES ? (body - (STATE_BYTES)) / 2 : 0;
        size_t escapes = n && rest[0] < words ? rest[0] : words;
        uint8_t *to = need(calloc((COUNT_BYTES + STATE_BYTES) + 2 * words, 1));
        if (n)
            memcpy(to + 8, rest + 1, body < STATE_BYTES + 2 * words ? body : STATE_BYTES + 2 * words);
        words -= escapes;
        for (int i = 0; i < 4; i++)
            to[i] = (uint8_t)(words >> 8 * i), to[4 + i] = (uint8_t)(escapes >> 8 * i);
        return (Bytes){to, (COUNT_BYTES + STATE_BYTES) + 2 * (words + escapes)};
    }
    uint8_t *to = need(malloc(valid_size));
    memcpy(to, valid, valid_size);
    for (size_t i = 0; i + 2 < n; i += 3)
        to[(size_t)(rest[i] | rest[i + 1] << 8) % valid_size] ^= rest[i + 2];
    return (Bytes){to, valid_size};
}

/* The next part of the input, up to a separator. */
static Bytes next_part(Input *in) {
    const uint8_t *begin = in->at;
    for (; in->at < in->end; in->at++)
        if (in->end - in->at >= 4 && !memcmp(in->at, separator, 4)) {
            Bytes part = {(uint8_t *)(uintptr_t)begin, (size_t)(in->at - begin)};
            in->at += 4;
            return part;
        }
    return (Bytes){(uint8_t *)(uintptr_t)begin, (size_t)(in->at - begin)};
}

typedef struct {
    Output out;
    size_t bytes;
} Memory;

static Memory memory(const Transform *t, uint32_t kind, uint32_t tokens) {
    Memory m = {.out = {.dtype = (int)(kind % 3)}};
    uint32_t shape[5] = {t->layers, 2, t->kv_heads, tokens, t->head_dim};
    m.bytes = spread(kind / 3, shape, m.out.stride) * (m.out.dtype == FLOAT32 ? 4 : 2);
    m.out.data = need(malloc(m.bytes));
    memset(m.out.data, 0x55, m.bytes);
    return m;
}

static void check_alike(const Memory *m, const int *error) {
    for (int p = 1; p < path_count; p++) {
        CHECK(error[p] == error[0]);
        CHECK(error[0] || !memcmp(m[p].out.data, m[0].out.data, m[0].bytes));
    }
    for (int p = 0; p < path_count; p++)
        free(m[p].out.data);
}

/* A chain of payloads to a cache, and each of them to indices. */
static void decode(Input *in, const Case *it, uint32_t kind, uint32_t tokens, uint32_t threads) {
    Bytes payload[CHAIN];
    Chain chain = {0};
    for (int d = 0; d < it->depths && (!d || left(in)); d++) {
        Bytes part = next_part(in);
        payload[d] = meant(part.data, part.size, it->payload[d], it->size[d]);
        chain.depth[d] = it->depth[d], chain.payload[d] = payload[d].data, chain.size[d] = payload[d].size;
        chain.depths++;
    }
    Memory m[3];
    int error[3];
    Tile group = {it->scale, it->cos, it->sin, 0, tokens, NULL};
    Referring some;
    chain.references = references(it, tokens, &some);
    for (int p = 0; p < path_count; p++) {
        m[p] = memory(it->transform + p, kind, tokens);
        error[p] = decode_group(paths[p], it->transform + p, &chain, &group, &m[p].out, threads);
    }
    check_alike(m, error);
    size_t bytes = (size_t)it->depth[0]->rows * tokens * sizeof(int16_t);
    int16_t *index[3];
    for (int p = 0; p < path_count; p++) {
        index[p] = need(calloc(bytes, 1));
        error[p] = OK;
        for (int d = 0; d < chain.depths && !error[p]; d++)
            error[p] = decode_group_indices(paths[p], it->depth[d], payload[d].data, payload[d].size, index[p], tokens,
                                            chain.references.lane);
        CHECK(error[p] == error[0]);
        CHECK(error[p] || !memcmp(index[p], index[0], bytes));
    }
    for (int p = 0; p < path_count; p++)
        free(index[p]);
    for (int d = 0; d < chain.depths; d++)
        free(payload[d].data);
}

/* Indices, or coefficients, of any value to a payload and back. */
static void encode(Input *in, const Case *it, uint32_t kind, uint32_t tokens, int coefficients) {
    int refines = it->depths > 1;
    const Depth *d = it->depth[refines];
    size_t count = (size_t)d->rows * tokens;
    int16_t *keep = need(malloc(tokens * sizeof *keep)), *lower = NULL, *own = NULL;
    float *rows = NULL;
    for (uint32_t t = 0; t < tokens; t++)
        keep[t] = (int16_t)(kind >> t % 8 & 1 ? -1 : 0);
    Indices from = {.keep = keep, .own = {0.25f, (float)(kind % 4) / 10}, .lower = {0.75f, 0}};
    if (coefficients) {
        uint8_t *bits = filled(in, count * sizeof *rows);
        for (size_t i = 3; i < count * sizeof *rows; i += 4)
            bits[i] &= (bits[i] & 0x7F) == 0x7F && bits[i - 1] & 0x80 ? 0xBF : 0xFF; /* finite, as those of a group are */
        from.rows = rows = (float *)(void *)bits;
    } else {
        from.index = own = (int16_t *)(void *)filled(in, count * sizeof *own);
        if (refines) {
            lower = need(malloc(count * sizeof *lower));
            for (size_t i = 0; i < count; i++)
                lower[i] = (int16_t)(own[i] / 3 + (kind & 1 ? (int)(i % 3) - 1 : 0));
            from.below = lower;
        }
    }
    Referring some;
    from.references = references(it, tokens, &some);
    uint8_t *out[3] = {0};
    size_t size[3] = {0};
    int error[3];
    for (int p = 0; p < path_count; p++) {
        error[p] = encode_group(paths[p], d, &from, tokens, 1 + kind % max_streams(d->rows), 1 + kind % 3, out + p, size + p);
        CHECK(error[p] == error[0]);
        CHECK(error[p] || (size[p] == size[0] && !memcmp(out[p], out[0], size[0])));
    }
    for (int p = 0; p < path_count && !error[0] && !coefficients; p++) {
        int16_t *index = lower ? by_place(lower, d->rows, tokens, from.references) : need(calloc(count, sizeof *index));
        int16_t *wanted = by_place(own, d->rows, tokens, from.references);
        CHECK(decode_group_indices(paths[p], d, out[0], size[0], index, tokens, from.references.lane) == OK);
        CHECK(!memcmp(index, wanted, count * sizeof *index));
        free(index), free(wanted);
    }
    for (int p = 0; p < path_count; p++)
        aligned_free(out[p]);
    free(keep), free(own), free(lower), free(rows);
}

static void synthesise_any(Input *in, const Case *it, uint32_t kind, uint32_t tokens) {
    int16_t *z = (int16_t *)(void *)filled(in, (size_t)it->transform[0].rows * tokens * sizeof *z);
    Tile group = {it->scale, it->cos, it->sin, 0, tokens, NULL};
    Memory m[3];
    int error[3];
    for (int p = 0; p < path_count; p++) {
        m[p] = memory(it->transform + p, kind, tokens);
        error[p] = synthesise_group(paths[p], it->transform + p, z, &group, &m[p].out);
        CHECK(error[p] == OK);
    }
    check_alike(m, error);
    free(z);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Input in = {data, data + size};
    const Case *it = case_of(byte(&in));
    uint32_t mode = byte(&in), kind = byte(&in), which = byte(&in);
    uint32_t tokens = which ? token_counts[which % 16] : it->tokens;
    switch (mode % 8) {
    case 0: encode(&in, it, kind, tokens, 0); break;
    case 1: encode(&in, it, kind, tokens, 1); break;
    case 2: synthesise_any(&in, it, kind, tokens); break;
    default: decode(&in, it, kind, tokens, mode / 8 % 16 ? 1 : 3); /* starting threads takes long */
    }
    return 0;
}
