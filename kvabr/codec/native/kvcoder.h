/* Shared declarations of the native coder. tests/codec/native/oracle.py defines the results, bit for bit.
 *
 *   tables.c     prepared once per profile: lookup tables, packed matrices
 *   rans.h       the state of 64 interleaved rANS decoders, and opening a payload's streams
 *   near.h       contexts of tokens that refer to another of their tile
 *   path_*.c     one per instruction set: a rANS step and an integer matrix product ...
 *   tile.h, synth.h, encode.h, alike.h, count.h    ... and the code that is the same for all, compiled with each of them
 *   group.c      whole groups, tile by tile and stream by stream, in one thread or several
 *   team.c       these threads
 *   capsules.c   what Python keeps between calls: the tables, as capsules
 *   _kvcoder.c   the Python module, and module.h what these two share
 */
#ifndef KVCODER_H
#define KVCODER_H

#include <stddef.h>
#include <stdint.h>

#define LANES 64
#define TILE 128
#define PROBABILITY_BITS 12
#define TOTAL (1 << PROBABILITY_BITS)
#define LOW (1u << 16)
#define FARTHEST 2047
#define MAX_DEPTHS 16
#define MAX_THREADS 16 /* that work on one group */
#define ESCAPE (-128) /* instead of a value in a lookup entry */
#define FLAT_BASE 32  /* most symbols of a table that is searched by comparing, without contexts ... */
#define FLAT_CONTEXT 8 /* ... and with several contexts */
#define CLOSE 32       /* magnitude below which a calibration counts values in four places in turn */
#define MAX_NEAR 8    /* contexts of tokens that refer to another */

/* Matrix products work on 8 tokens and 32 outputs at a time. */
#define TOKENS 8
#define OUTPUTS 32

enum { OK = 0, TOO_SHORT, LEFT_OVER, BAD_ESCAPE, BAD_INDEX, NO_MEMORY };
enum { FLOAT32 = 0, FLOAT16, BFLOAT16 };

static inline uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* A table with few symbols, found by comparing a slot with the start of each. */
typedef struct {
    uint16_t symbols;                /* symbols in use; 0: too many, use the lookup */
    int16_t start[FLAT_BASE];        /* without contexts: of symbol 1, 2 ...; with: see start3 */
    int16_t start3[FLAT_CONTEXT][8]; /* [symbol][context, padded]: of symbol 1, 2 ... */
    uint32_t entry[FLAT_BASE];       /* [symbol], or [8 context + symbol]: as in Depth.lookup, with the start as place */
} Flat;

/* The same for tokens that refer to another, with all symbols, used or not. */
typedef struct {
    uint16_t symbols;               /* 0: too many, use the lookup */
    int16_t start[FLAT_CONTEXT - 1][MAX_NEAR]; /* [symbol][context]: of symbol 1, 2 ... */
} NearFlat;

typedef struct {
    uint32_t freq, start;
    uint64_t reciprocal; /* ceil(2^64 / freq); 2^64 - 1 for 1 */
    uint32_t bias, complement;
} EncoderSymbol;

typedef struct {
    uint32_t contexts;
    uint32_t *lookup;       /* [class][context][slot]: value << 24 | place in symbol << 12 | frequency */
    EncoderSymbol *encoder; /* [class][context][symbol] */
    uint32_t *coded;        /* [class], then [context][symbol] without gaps: escape << 31 | start << 12 | frequency */
} Tables;

/* One depth: a CoderModel. */
typedef struct {
    uint32_t rows, classes, contexts, width;
    uint32_t *order;      /* [row] in coding order */
    uint32_t *class_end;  /* [class]: its end in `order` */
    uint16_t *flag[2];    /* [position in `order`]; the second only with three contexts */
    Tables own, near;     /* near: of tokens that refer to another; without contexts if the depth has no such tables */
    Flat *flat;           /* [class] */
    NearFlat *near_flat;  /* [class] */
    uint8_t bucket[3][16]; /* see near.h */
    uint8_t *radius;      /* [class] */
    uint8_t *row_class, *delta; /* [row], [class] */
} Depth;

typedef struct {
    uint32_t kv, layers, kept, size;
    uint32_t *layer;
    uint32_t first_row;
    int16_t *matrix; /* packed; NULL if size is 0 */
} StackTransform;

/* A transform. A packed matrix is [outputs / 32][components / 2][32][2], or [...][2][32] for the portable path. */
typedef struct {
    uint32_t layers, kv_heads, head_dim, block_heads, blocks, width, padded_width, rows, most_size;
    uint32_t halves;              /* 2: keys and values; 1: one kind of vectors, all like keys */
    uint32_t rotary, interleaved, turned; /* dimensions of a key that rotate; which form pairs; the first of them */
    int paired;                   /* whether the packed matrices hold two components side by side */
    size_t block_entries;         /* int16 per packed block matrix */
    int16_t *block;               /* [layer][kv][block] packed; NULL: identity */
    float *mean;                  /* [layer][kv][block][padded_width] */
    uint32_t stacks;
    StackTransform *stack;
} Transform;

typedef struct {
    char *data;
    int dtype;
    ptrdiff_t stride[5]; /* elements: layer, kv, head, token, dim */
} Output;

/* The input of synthesis besides the transform. */
typedef struct {
    const float *scale;     /* [layer][kv] */
    const float *cos, *sin; /* [token][rotary / 2] */
    uint32_t first, tokens; /* position of the tile in the group, and its size */
    const uint8_t *place;   /* [token]: its offset in the tile, where tokens are coded in another order; or NULL */
} Tile;

/* In which order the tokens of a group are coded, tile by tile, and which of the first 64 places of their tile later
 * ones refer to: both [place], or both NULL. */
typedef struct {
    const uint8_t *place, *lane;
} References;

typedef struct {
    float step, dead;
} Quantiser;

/* The input of an encoder: indices and those below, or the coefficients that both come from. */
typedef struct {
    const int16_t *index, *below; /* [row][token]; below: NULL if the depth refines none */
    const float *rows;            /* [row][token] instead, or NULL */
    Quantiser own, lower;
    const int16_t *keep;          /* [token]: -1; 0 for tokens whose indices are all 0 */
    References references;
} Indices;

/* A depth that a calibration counts. Its counts are [row][context][symbol], `most` + 2 symbols each, and
 * [row][context][live]; if it refines the one before there are three contexts of symbols and two of flags, otherwise one. */
typedef struct {
    Quantiser own;
    int refines;
    int32_t *symbols, *flags;
} CountedDepth;

/* The rows of stream `first` of `step`: in coding order, every `step`-th run of as many rows as a step has flags. */
typedef struct {
    uint32_t first, step;
} Cut;

/* Where in coding order its i-th row is. */
static inline uint32_t cut_at(Cut cut, uint32_t i) { return (i / LANES * cut.step + cut.first) * LANES + i % LANES; }

/* How many of its rows are before a position in coding order. */
static inline uint32_t cut_before(Cut cut, uint32_t position) {
    uint32_t run = position / LANES, runs = run > cut.first ? (run - cut.first - 1) / cut.step + 1 : 0;
    return runs * LANES + (run % cut.step == cut.first ? position % LANES : 0);
}

/* Streams have at least a whole run each. */
static inline uint32_t max_streams(uint32_t rows) { return rows < 2 * LANES ? 1 : at_most(rows / LANES, 0xFFFF); }

/* What an encoder made of one stream. */
typedef struct {
    uint32_t state[LANES];
    uint8_t *word, *escape; /* in `block` */
    size_t word_bytes, escape_bytes;
    void *block; /* free */
    int error;
} Written;

struct Reader;
struct Scratch;

/* One instruction set. */
typedef struct {
    const char *name;
    int paired;   /* whether packed matrices hold two components side by side */
    /* Decodes one tile of one stream into index[row * stride + place], which holds the indices below if the depth refines.
     * live[row]: whether the row has a nonzero index; on entry of the indices below, on return of the result.
     * lane[place]: see References; or NULL. */
    int (*decode_tile)(struct Reader *, const Depth *, Cut, int16_t *index, size_t stride, uint32_t tokens, const uint8_t *lane,
                       uint8_t *live, struct Scratch *);
    /* From indices (delta not NULL) or coefficients to the output. */
    void (*synthesise)(const Transform *, const Tile *, const int16_t *index, size_t stride, const uint8_t *live,
                       const uint8_t *row_class, const uint8_t *delta, const Output *, struct Scratch *);
    /* Indices of a group to a stream; returns OK or an error, without a block then. */
    int (*encode_stream)(const Depth *, const Indices *, Cut, uint32_t tokens, Written *);
    /* What decoding takes from a row where `coded` is -1, not 0, added in units of step/1024. */
    int64_t (*error_sum)(const float *row, float gain, const Quantiser *, const int32_t *coded, uint32_t tokens);
    /* See alike.h: rows[row * stride + token] of `count` rows `which` and `n` tokens; sums: [n][n] zeros. */
    int (*alike)(const float *rows, size_t stride, const uint32_t *which, uint32_t count, const uint32_t *token, uint32_t n,
                 float step, int32_t most, int32_t *sums);
    /* See count.h: counts of the row with this number, for a calibration. */
    void (*count_row)(const float *row, uint32_t tokens, float loud, const CountedDepth *, int depths, size_t number, uint32_t most);
    void (*count_near_row)(const int32_t *index, const int32_t *below, const References *, uint32_t tokens, const Depth *,
                           uint32_t radius, uint32_t width, int64_t *counts);
} Path;

extern const Path path_portable;
#if defined(__GNUC__) && defined(__x86_64__)
#define HAVE_X86 1
extern const Path path_avx2;
#endif

/* Memory of one decode; sized by `scratch_new`. */
typedef struct Scratch {
    void *block;
    size_t bytes;
    uint16_t *chance;   /* [64] */
    uint64_t *flags;    /* [rows / 64 + 1] */
    int16_t *index;     /* [rows][TILE or less]; only if requested */
    uint8_t *live;      /* [rows] */
    uint32_t *list;     /* [most pairs] */
    uint32_t *z, *y;    /* [token block][pair][8] */
    float *values;      /* [token][padded width] */
} Scratch;

Scratch *scratch_new(uint32_t rows, uint32_t tokens, const Transform *transform, int index);
void scratch_free(Scratch *);

/* 64-byte aligned, zeroed; counts in elements; fails if the product overflows. */
void *aligned_zeros(size_t count, size_t size);
void aligned_free(void *);

/* tables.c: all of these check sizes, and rely on model.py for the rest. */
Depth *depth_new(uint32_t rows, uint32_t classes, uint32_t contexts, uint32_t width, const uint8_t *row_class,
                 const uint8_t *radius, const uint16_t *freqs, const uint16_t *flag_freq, const uint8_t *delta,
                 const uint32_t *order);
int depth_near(Depth *, uint32_t contexts, const uint16_t *freqs, const uint8_t *bucket); /* OK or NO_MEMORY */
void depth_free(Depth *);
void pack_matrix(int16_t *to, const int8_t *mantissa, const uint8_t *gain, uint32_t size, int paired);
size_t packed_entries(uint32_t size);
void transform_free(Transform *);

/* The payloads of a group, lowest depth first. */
typedef struct {
    const Depth *depth[MAX_DEPTHS];
    const uint8_t *payload[MAX_DEPTHS];
    size_t size[MAX_DEPTHS];
    int depths;
    References references;
} Chain;

/* group.c: all of these return OK or an error. A whole group is given as a tile that begins at 0. */

/* index [row][place]: in, the indices below if the depth refines; out, the indices. lane: see References; or NULL. */
int decode_group_indices(const Path *, const Depth *, const uint8_t *payload, size_t size, int16_t *index, uint32_t tokens,
                         const uint8_t *lane);
int synthesise_group(const Path *, const Transform *, const int16_t *z, const Tile *group, const Output *);
int decode_group(const Path *, const Transform *, const Chain *, const Tile *group, const Output *, uint32_t threads);
/* Indices of a group to a payload in a new buffer (aligned_free). */
int encode_group(const Path *, const Depth *, const Indices *, uint32_t tokens, uint32_t streams, uint32_t threads, uint8_t **out,
                 size_t *size);

/* Payloads that are to be decoded elsewhere: checks their directories, and copies them one behind another, each to a multiple
 * of 16 bytes. Of each stream, as int64: its group; where states, words and escapes are, in 16-bit words; how many words and
 * escapes; its number, and how many its payload has. */
typedef struct {
    const uint8_t *data;
    size_t size;
    uint32_t tokens;
    int64_t group;
    uint32_t streams; /* set by gather_check */
    size_t directory;
    uint64_t at; /* set by gather_places, which returns how many bytes all take */
} Gathered;

enum { PART_NUMBERS = 8 };
uint64_t gather_places(Gathered *, uint32_t payloads);
int gather_check(Gathered *, uint32_t payloads, uint32_t rows, uint64_t *streams, uint64_t *bytes);
int gather_parts(const Gathered *, uint32_t payloads, uint32_t rows, int64_t *parts);
int gather_copy(const Gathered *, uint32_t payloads, uint8_t *to, uint32_t threads);

/* team.c: threads that share work, item by item. One that cannot be started is done without. */
typedef struct Team Team;
typedef void (*Job)(void *context, uint32_t item, uint32_t worker);
Team *team_new(uint32_t threads); /* at most MAX_THREADS; NULL: no memory */
void team_run(Team *, Job, void *context, uint32_t items); /* returns when all items are done */
void team_free(Team *);

#endif
