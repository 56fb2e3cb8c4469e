/* Whole groups, tile by tile: payloads to indices, coefficients to a tensor, or both at once. */
#include "rans.h"
#include <pthread.h>

/* Of a tile that begins at a token. */
static const uint8_t *from_token(const uint8_t *of_group, uint32_t first) { return of_group ? of_group + first : NULL; }

int decode_group_indices(const Path *path, const Depth *d, const uint8_t *payload, size_t size, int16_t *index,
                         uint32_t tokens, const uint8_t *lane) {
    Scratch *scratch = scratch_new(d->rows, tokens, NULL, 0);
    Reader *r = aligned_zeros(1, sizeof *r);
    int error = scratch && r ? reader_open(r, payload, size, (uint64_t)d->rows * tokens) : NO_MEMORY;
    for (uint32_t first = 0; first < tokens && !error; first += TILE) {
        uint32_t here = at_most(TILE, tokens - first);
        for (uint32_t row = 0; row < d->rows && d->contexts > 1; row++) {
            int any = 0;
            for (uint32_t t = 0; t < here; t++)
                any |= index[(size_t)row * tokens + first + t];
            scratch->live[row] = any != 0;
        }
        error = path->decode_tile(r, d, index + first, tokens, here, from_token(lane, first), scratch->live, scratch);
    }
    error = error ? error : reader_end(r);
    aligned_free(r);
    scratch_free(scratch);
    return error;
}

/* The tile of a group that begins at a token. */
static Tile tile_at(const Tile *group, uint32_t first) {
    return (Tile){group->scale, group->cos, group->sin, first, at_most(TILE, group->tokens - first),
                  NULL};
}

int synthesise_group(const Path *path, const Transform *t, const int16_t *z, const Tile *group, const Output *out) {
    Scratch *scratch = scratch_new(t->rows, group->tokens, t, 0);
    if (!scratch)
        return NO_MEMORY;
    for (uint32_t row = 0; row < t->rows; row++) {
        int any = 0;
        for (uint32_t i = 0; i < group->tokens; i++)
            any |= z[(size_t)row * group->tokens + i];
        scratch->live[row] = any != 0;
    }
    for (uint32_t first = 0; first < group->tokens; first += TILE) {
        Tile tile = tile_at(group, first);
        path->synthesise(t, &tile, z + first, group->tokens, scratch->live, NULL, NULL, out, scratch);
    }
    scratch_free(scratch);
    return OK;
}

/* A share of a tile's synthesis. Stacks write to layers of their own, so threads need nothing but scratch memory. */
typedef struct {
    const Path *path;
    Transform stacks; /* the transform with some of its stacks */
    const Tile *tile;
    const int16_t *index;
    size_t stride;
    const uint8_t *live;
    const Depth *last;
    const Output *out;
    Scratch *scratch;
    pthread_t thread;
    int begun;
} Share;

static void *synthesise_share(void *share) {
    Share *s = share;
    s->path->synthesise(&s->stacks, s->tile, s->index, s->stride, s->live, s->last->row_class, s->last->delta, s->out, s->scratch);
    return NULL;
}

/* Synthesises a tile in up to `threads` threads; in fewer if there are too few stacks, no memory, or no threads. */
static void synthesise_tile(const Path *path, const Transform *t, const Tile *tile, size_t stride, Scratch *scratch,
                            const Depth *last, const Output *out, uint32_t threads) {
    Share share[MOST_THREADS];
    uint32_t n = at_most(at_most(threads, MOST_THREADS), t->stacks), at = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t end = (uint32_t)((uint64_t)t->stacks * (i + 1) / n);
        share[i] = (Share){path, *t, tile, scratch->index, stride, scratch->live, last, out, scratch, 0, 0};
        share[i].stacks.stack = t->stack + at;
        share[i].stacks.stacks = end - at;
        at = end;
        if (i && (share[i].scratch = scratch_new(t->rows, tile->tokens, t, 0)))
            share[i].begun = pthread_create(&share[i].thread, NULL, synthesise_share, share + i) == 0;
    }
    for (uint32_t i = 0; i < n; i++) { /* this thread's own share, and those that got none */
        if (share[i].begun)
            continue;
        Scratch *own = share[i].scratch;
        share[i].scratch = scratch;
        synthesise_share(share + i);
        share[i].scratch = own;
    }
    for (uint32_t i = 1; i < n; i++) {
        if (share[i].begun)
            pthread_join(share[i].thread, NULL);
        scratch_free(share[i].scratch);
    }
}

int decode_group(const Path *path, const Transform *t, const Chain *chain, const Tile *group, const Output *out,
                 uint32_t threads) {
    size_t stride = (at_most(group->tokens, TILE) + TOKENS - 1) / TOKENS * TOKENS;
    Scratch *scratch = scratch_new(t->rows, group->tokens, t, 1);
    Reader *readers = aligned_zeros((size_t)chain->depths, sizeof *readers);
    int error = scratch && readers ? OK : NO_MEMORY;
    for (int d = 0; d < chain->depths && !error; d++)
        error = reader_open(readers + d, chain->payload[d], chain->size[d], (uint64_t)t->rows * group->tokens);
    const Depth *last = chain->depth[chain->depths - 1];
    for (uint32_t first = 0; first < group->tokens && !error; first += TILE) {
        Tile tile = tile_at(group, first);
        tile.place = from_token(chain->references.place, first);
        memset(scratch->live, 0, t->rows);
        for (int d = 0; d < chain->depths && !error; d++)
            error = path->decode_tile(readers + d, chain->depth[d], scratch->index, stride, tile.tokens,
                                      from_token(chain->references.lane, first), scratch->live, scratch);
        if (!error)
            synthesise_tile(path, t, &tile, stride, scratch, last, out, threads);
    }
    for (int d = 0; d < chain->depths && !error; d++)
        error = reader_end(readers + d);
    aligned_free(readers);
    scratch_free(scratch);
    return error;
}
