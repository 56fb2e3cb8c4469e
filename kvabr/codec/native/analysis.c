/* What all paths of the encoder's transform share. */
#include "analysis.h"

static uint32_t pairs(uint32_t size) { return size / 2 + size % 2; }

size_t analysis_packed(uint32_t size) {
    size_t panels = ((size_t)size + ROWS - 1) / ROWS;
    return panels * ROWS * 2 * pairs(size);
}

void analysis_pack(int16_t *to, const int16_t *from, uint32_t size) {
    for (uint32_t panel = 0; panel < size; panel += ROWS)
        for (uint32_t k = 0; k < 2 * pairs(size); k += 2)
            for (uint32_t row = panel; row < panel + ROWS; row++, to += 2) {
                const int16_t *own = from + (size_t)row * size + k;
                to[0] = row < size ? own[0] : 0;
                to[1] = row < size && k + 1 < size ? own[1] : 0;
            }
}

const AnalysisPath *const *analysis_paths(void) {
    static const AnalysisPath *const every[] = {
#ifdef HAVE_X86
        &analysis_avx2,
#endif
        &analysis_portable};
    static const AnalysisPath *found[sizeof every / sizeof *every + 1];
    size_t n = 0;
    for (size_t i = 0; i < sizeof every / sizeof *every; i++)
        if (every[i]->supported())
            found[n++] = every[i];
    found[n] = NULL;
    return found;
}
