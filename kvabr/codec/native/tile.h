/* Decoding one tile of one stream: flags, then the live rows. The same for every path, compiled with each.
 *
 * A path defines before it includes this:
 *   step_flags(Reader *, const uint16_t *chance, unsigned n) -> bits       one step of flags, n of 1..64
 *   row_base(Reader *, const Depth *, class, int16_t *row, tokens) -> error; OR of all values to *any
 *   row_refine(...)                                                        the same on top of the indices below
 *   row_near(Reader *, const Depth *, class, int16_t *row, tokens, const Lanes *) -> error
 *                                                                          the places from 64 on, which refer to those before
 */
#include "near.h"

/* A row below to which nothing is added. */
static void triple(int16_t *row, uint32_t tokens) {
    for (uint32_t t = 0; t < tokens; t++) {
        int value = 3 * row[t];
        row[t] = (int16_t)(value > 32767 ? 32767 : value < -32768 ? -32768 : value);
    }
}

static int nonzero(const int16_t *row, uint32_t tokens) {
    int any = 0;
    for (uint32_t t = 0; t < tokens; t++)
        any |= row[t];
    return any != 0;
}

static int decode_flags(Reader *r, const Depth *d, Cut cut, const uint8_t *live, Scratch *scratch) {
    const uint32_t rows = cut_before(cut, d->rows);
    for (uint32_t at = 0; at < rows; at += LANES) {
        uint32_t first = cut_at(cut, at), here = at_most(LANES, rows - at);
        const uint16_t *chance = d->flag[0] + first;
        if (d->contexts > 1) {
            for (uint32_t i = 0; i < here; i++)
                scratch->chance[i] = d->flag[live[d->order[first + i]] != 0][first + i];
            chance = scratch->chance;
        }
        READER_READY(r);
        scratch->flags[at / LANES] = step_flags(r, chance, here);
    }
    return OK;
}

/* Prefetch rows that are refined, since these are read; rows that are only written need none. */
static inline void fetch_refined(const Depth *d, Cut cut, const int16_t *index, size_t stride, uint32_t tokens,
                                 const uint8_t *live, const Scratch *scratch, uint32_t at) {
    if (cut_at(cut, at) >= d->rows)
        return;
    uint32_t row = d->order[cut_at(cut, at)];
    if (scratch->flags[at / LANES] >> at % LANES & 1 || live[row])
        fetch(index + row * stride, tokens * sizeof *index);
}

static int decode_tile(Reader *r, const Depth *d, Cut cut, int16_t *index, size_t stride, uint32_t tokens, const uint8_t *lane,
                       uint8_t *live, Scratch *scratch) {
    int error = decode_flags(r, d, cut, live, scratch);
    if (error)
        return error;
    Lanes lanes;
    int refines = d->contexts > 1, near = lane && tokens > LANES && d->near.contexts;
    uint32_t at = 0, alone = near ? LANES : tokens;
    if (near)
        fill_lanes(&lanes, lane, tokens);
    for (uint32_t which = 0; which < d->classes; which++) {
        const uint32_t end = cut_before(cut, d->class_end[which]);
        while (at < end) {
            uint64_t flags = scratch->flags[at / LANES] >> at % LANES;
            if (!flags && !refines) {
                at = at_most(end, (at / LANES + 1) * LANES);
                continue;
            }
            if (refines)
                fetch_refined(d, cut, index, stride, tokens, live, scratch, at + AHEAD);
            uint32_t row = d->order[cut_at(cut, at++)];
            int16_t *to = index + row * stride;
            if (!refines) {
                if (!(flags & 1))
                    continue;
                error = row_base(r, d, which, to, alone);
            } else if (flags & 1) {
                if (!live[row])
                    memset(to, 0, tokens * sizeof *to);
                error = row_refine(r, d, which, to, alone);
            } else {
                if (live[row])
                    triple(to, tokens);
                continue;
            }
            if (near && !error)
                error = row_near(r, d, which, to, tokens, &lanes);
            if (error)
                return error;
            live[row] = (uint8_t)nonzero(to, tokens);
        }
    }
    return OK;
}
