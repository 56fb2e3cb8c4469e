/* Whole groups, tile by tile and stream by stream: payloads to indices, coefficients to a tensor, or both at once; and indices
 * to payloads. */
#include "rans.h"

#include <stdlib.h>

/* Of a tile that begins at a token. */
static const uint8_t *from_token(const uint8_t *of_group, uint32_t first) { return of_group ? of_group + first : NULL; }

/* Readers of all streams of a payload, at most as many as `max_streams` says. */
static int open_payload(const uint8_t *payload, size_t size, uint32_t rows, uint32_t tokens, Reader **readers, uint32_t *streams) {
    size_t directory;
    *streams = streams_of(payload, size, rows, &directory);
    if (!*streams)
        return TOO_SHORT;
    if (!(*readers = aligned_zeros(*streams, sizeof **readers)))
        return NO_MEMORY;
    return readers_open(*readers, *streams, directory, payload, size, rows, tokens);
}

/* The first error of any stream, or of its end. */
static int first_error(const Reader *readers, uint32_t streams, int ended) {
    int error = OK;
    for (uint32_t s = 0; s < streams && !error; s++)
        error = readers[s].error ? readers[s].error : ended ? reader_end(readers + s) : OK;
    return error;
}

int decode_group_indices(const Path *path, const Depth *d, const uint8_t *payload, size_t size, int16_t *index,
                         uint32_t tokens, const uint8_t *lane) {
    Scratch *scratch = scratch_new(d->rows, tokens, NULL, 0);
    Reader *readers = NULL;
    uint32_t streams = 0;
    int error = scratch ? open_payload(payload, size, d->rows, tokens, &readers, &streams) : NO_MEMORY;
    for (uint32_t first = 0; first < tokens && !error; first += TILE) {
        uint32_t here = at_most(TILE, tokens - first);
        for (uint32_t row = 0; row < d->rows && d->contexts > 1; row++) {
            int any = 0;
            for (uint32_t t = 0; t < here; t++)
                any |= index[(size_t)row * tokens + first + t];
            scratch->live[row] = any != 0;
        }
        for (uint32_t s = 0; s < streams && !error; s++)
            error = path->decode_tile(readers + s, d, (Cut){s, streams}, index + first, tokens, here, from_token(lane, first),
                                      scratch->live, scratch);
    }
    error = error ? error : first_error(readers, streams, 1);
    aligned_free(readers);
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

/* A group that is being decoded. Streams have rows of their own, and stacks of the transform layers of their own, so threads
 * need nothing but scratch memory. */
typedef struct {
    const Path *path;
    const Transform *transform;
    const Chain *chain;
    const Output *out;
    Scratch *scratch[MAX_THREADS]; /* of each thread; the first one's has the indices, and which rows are live */
    Reader *readers[MAX_DEPTHS];   /* [stream] of each depth */
    uint32_t streams[MAX_DEPTHS];
    size_t stride;
    Tile tile;
    int depth;
} Decoding;

static void decode_stream(void *context, uint32_t item, uint32_t worker) {
    Decoding *it = context;
    Reader *r = it->readers[it->depth] + item;
    r->error = it->path->decode_tile(r, it->chain->depth[it->depth], (Cut){item, it->streams[it->depth]}, it->scratch[0]->index,
                                     it->stride, it->tile.tokens, from_token(it->chain->references.lane, it->tile.first),
                                     it->scratch[0]->live, it->scratch[worker]);
}

static void synthesise_stack(void *context, uint32_t item, uint32_t worker) {
    const Decoding *it = context;
    const Depth *last = it->chain->depth[it->chain->depths - 1];
    Transform one = *it->transform; /* with a single stack */
    one.stack += item;
    one.stacks = 1;
    it->path->synthesise(&one, &it->tile, it->scratch[0]->index, it->stride, it->scratch[0]->live, last->row_class, last->delta,
                         it->out, it->scratch[worker]);
}

int decode_group(const Path *path, const Transform *t, const Chain *chain, const Tile *group, const Output *out,
                 uint32_t threads) {
    Decoding it = {path, t, chain, out, {NULL}, {NULL}, {0}, 0, *group, 0};
    it.stride = (at_most(group->tokens, TILE) + TOKENS - 1) / TOKENS * TOKENS;
    uint32_t useful = t->stacks, workers = 0;
    int error = OK;
    for (int d = 0; d < chain->depths && !error; d++) {
        error = open_payload(chain->payload[d], chain->size[d], t->rows, group->tokens, &it.readers[d], &it.streams[d]);
        useful = it.streams[d] > useful ? it.streams[d] : useful;
    }
    useful = at_most(at_most(useful, threads ? threads : 1), MAX_THREADS);
    while (!error && workers < useful && (it.scratch[workers] = scratch_new(t->rows, group->tokens, t, workers == 0)))
        workers++;
    Team *team = workers ? team_new(workers) : NULL;
    if (!error && !team)
        error = NO_MEMORY;
    for (uint32_t first = 0; first < group->tokens && !error; first += TILE) {
        it.tile = tile_at(group, first);
        it.tile.place = from_token(chain->references.place, first);
        memset(it.scratch[0]->live, 0, t->rows);
        for (it.depth = 0; it.depth < chain->depths && !error; it.depth++) {
            team_run(team, decode_stream, &it, it.streams[it.depth]);
            error = first_error(it.readers[it.depth], it.streams[it.depth], 0);
        }
        if (!error)
            team_run(team, synthesise_stack, &it, t->stacks);
    }
    for (int d = 0; d < chain->depths && !error; d++)
        error = first_error(it.readers[d], it.streams[d], 1);
    team_free(team);
    for (int d = 0; d < chain->depths; d++)
        aligned_free(it.readers[d]);
    for (int i = 0; i < MAX_THREADS; i++)
        scratch_free(it.scratch[i]);
    return error;
}

/* A group that is being encoded. */
typedef struct {
    const Path *path;
    const Depth *depth;
    const Indices *from;
    uint32_t tokens, streams;
    Written *written; /* [stream] */
} Encoding;

static void encode_one(void *context, uint32_t item, uint32_t worker) {
    Encoding *it = context;
    (void)worker;
    it->written[item].error = it->path->encode_stream(it->depth, it->from, (Cut){item, it->streams}, it->tokens, it->written + item);
}

/* The streams behind their directory. */
static uint8_t *joined(const Written *written, uint32_t streams, size_t *size) {
    const size_t directory = streams > 1 ? 4 : 0;
    *size = directory + (size_t)(COUNT_BYTES + STATE_BYTES) * streams;
    for (uint32_t s = 0; s < streams; s++)
        *size += written[s].word_bytes + written[s].escape_bytes;
    uint8_t *out = aligned_zeros(*size, 1), *at = out + directory + (size_t)COUNT_BYTES * streams;
    if (out && directory)
        put32(out, STREAMED | streams);
    for (uint32_t s = 0; s < streams && out; s++) {
        const Written *w = written + s;
        put32(out + directory + (size_t)COUNT_BYTES * s, (uint32_t)(w->word_bytes / 2));
        put32(out + directory + (size_t)COUNT_BYTES * s + 4, (uint32_t)(w->escape_bytes / 2));
        for (int lane = 0; lane < LANES; lane++)
            put32(at + 4 * lane, w->state[lane]);
        memcpy(at + STATE_BYTES, w->word, w->word_bytes);
        memcpy(at + STATE_BYTES + w->word_bytes, w->escape, w->escape_bytes);
        at += STATE_BYTES + w->word_bytes + w->escape_bytes;
    }
    return out;
}

int encode_group(const Path *path, const Depth *d, const Indices *from, uint32_t tokens, uint32_t streams, uint32_t threads,
                 uint8_t **out, size_t *size) {
    Encoding it = {path, d, from, tokens, streams, calloc(streams, sizeof(Written))};
    Team *team = team_new(at_most(threads, streams));
    int error = it.written && team ? OK : NO_MEMORY;
    if (!error)
        team_run(team, encode_one, &it, streams);
    for (uint32_t s = 0; s < streams && !error; s++)
        error = it.written[s].error;
    if (!error && !(*out = joined(it.written, streams, size)))
        error = NO_MEMORY;
    team_free(team);
    for (uint32_t s = 0; s < streams && it.written; s++)
        free(it.written[s].block);
    free(it.written);
    return error;
}

uint64_t gather_places(Gathered *it, uint32_t payloads) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < payloads; i++) {
        it[i].at = bytes;
        bytes += (it[i].size + 15) / 16 * 16;
    }
    return bytes;
}

int gather_check(Gathered *it, uint32_t payloads, uint32_t rows, uint64_t *streams, uint64_t *bytes) {
    *streams = 0;
    for (uint32_t i = 0; i < payloads; i++) {
        if (!(it[i].streams = streams_of(it[i].data, it[i].size, rows, &it[i].directory)))
            return TOO_SHORT;
        *streams += it[i].streams;
    }
    *bytes = gather_places(it, payloads);
    return OK;
}

int gather_parts(const Gathered *it, uint32_t payloads, uint32_t rows, int64_t *part) {
    for (uint32_t i = 0; i < payloads; i++, it++) {
        uint64_t at = it->directory + (uint64_t)COUNT_BYTES * it->streams;
        for (uint32_t s = 0; s < it->streams; s++, part += PART_NUMBERS) {
            if (at > it->size)
                return TOO_SHORT;
            const uint8_t *count = it->data + it->directory + (size_t)COUNT_BYTES * s;
            uint64_t words = little32(count), escapes = little32(count + 4), states = (it->at + at) / 2;
            uint64_t most = (uint64_t)cut_before((Cut){s, it->streams}, rows) * it->tokens;
            at += STATE_BYTES + 2 * words + 2 * escapes;
            if (at > it->size || escapes > most)
                return TOO_SHORT;
            part[0] = it->group, part[1] = (int64_t)states, part[2] = (int64_t)states + 2 * LANES;
            part[3] = part[2] + (int64_t)words, part[4] = (int64_t)words, part[5] = (int64_t)escapes;
            part[6] = s, part[7] = it->streams;
        }
        if (at != it->size)
            return TOO_SHORT;
    }
    return OK;
}

typedef struct {
    const Gathered *from;
    uint8_t *to;
} Copying;

static void copy_payload(void *context, uint32_t item, uint32_t worker) {
    const Copying *it = context;
    (void)worker;
    memcpy(it->to + it->from[item].at, it->from[item].data, it->from[item].size);
}

int gather_copy(const Gathered *from, uint32_t payloads, uint8_t *to, uint32_t threads) {
    Copying it = {from, to};
    Team *team = team_new(at_most(threads, payloads));
    if (!team)
        return NO_MEMORY;
    team_run(team, copy_payload, &it, payloads);
    team_free(team);
    return OK;
}
