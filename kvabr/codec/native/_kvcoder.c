/* The Python module. Private: coder.py checks the arguments, and model.py the profile. Only sizes are checked here, so that
 * no bug above can make this read or write outside of a buffer. For tensors, which are passed by address, coder.py has
 * checked shape and strides. Work is done without the GIL. */
#include <stdlib.h>
#include <string.h>

#include "module.h"

static const char *message(int error) {
    switch (error) {
    case TOO_SHORT: return "it ends too early, or its parts do not add up; truncated, or of another profile";
    case LEFT_OVER: return "it has the wrong length; corrupt, or of another profile";
    case BAD_ESCAPE: return "an escape is missing or invalid; corrupt, or of another profile";
    case BAD_INDEX: return "an index exceeds 16 bits, or cannot refine the index below; keep such tokens exact";
    default: return "?";
    }
}

static PyObject *raised(int error) {
    if (error == NO_MEMORY)
        return PyErr_NoMemory();
    PyErr_SetString(PyExc_ValueError, message(error));
    return NULL;
}

static int runs(const Path *path) {
#ifdef HAVE_X86
    if (path == &path_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
#endif
    return path == &path_portable;
}

static const Path *const all_paths[] = {
#ifdef HAVE_X86
    &path_avx2,
#endif
    &path_portable, NULL};

const Path *path_named(const char *name) {
    for (int i = 0; all_paths[i]; i++)
        if (!strcmp(all_paths[i]->name, name) && runs(all_paths[i]))
            return all_paths[i];
    PyErr_Format(PyExc_LookupError, "this processor has no path %s", name);
    return NULL;
}

static PyObject *paths(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && all_paths[i]; i++) {
        if (!runs(all_paths[i]))
            continue;
        PyObject *name = PyUnicode_FromString(all_paths[i]->name);
        if (!name || PyList_Append(list, name) < 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *encoded(const Path *path, const Depth *d, const Indices *from, uint32_t tokens, uint32_t streams, uint32_t threads) {
    uint8_t *out = NULL;
    size_t size = 0;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = encode_group(path, d, from, tokens, streams, threads, &out, &size);
    Py_END_ALLOW_THREADS
    PyObject *result = error ? raised(error) : PyBytes_FromStringAndSize((const char *)out, (Py_ssize_t)size);
    aligned_free(out);
    return result;
}

/* Whether rows can be cut into as many streams. */
static int cuts(const Depth *d, uint32_t streams) { return streams && streams <= max_streams(d->rows); }

/* Reads optional references, u8 [token] each; returns whether they are as `References` says. */
static int references_of(const Py_buffer *place, const Py_buffer *lane, uint32_t tokens, References *to) {
    const uint8_t *places = place->buf, *lanes = lane->buf;
    if (!places && !lanes)
        return 1;
    if (!places || !lanes || !holds(place, tokens, 1) || !holds(lane, tokens, 1))
        return 0;
    for (uint32_t t = 0; t < tokens; t++)
        if (places[t] >= at_most(TILE, tokens - t / TILE * TILE) || lanes[t] >= LANES)
            return 0;
    *to = (References){places, lanes};
    return 1;
}

/* encode(path, depth, index i16 [row, token], below i16 or None, tokens, streams, threads, place u8, lane u8) -> bytes */
static PyObject *encode(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[4] = {{0}};
    PyObject *capsule, *result = NULL;
    const char *name;
    unsigned tokens, streams, threads;
    Indices from = {0};
    if (!PyArg_ParseTuple(args, "sOy*z*III|z*z*", &name, &capsule, b, b + 1, &tokens, &streams, &threads, b + 2, b + 3)) {
        release(b, 4);
        return NULL;
    }
    const Path *path = path_named(name);
    const Depth *d = path ? PyCapsule_GetPointer(capsule, DEPTH_NAME) : NULL;
    if (d && (!tokens || !cuts(d, streams) || !references_of(b + 2, b + 3, tokens, &from.references) ||
              !holds(b, (size_t)d->rows * tokens, 2) || (d->contexts == 1) != !b[1].buf ||
              (b[1].buf && b[1].len != b[0].len))) {
        size_error();
    } else if (d) {
        from.index = b[0].buf, from.below = b[1].buf;
        result = encoded(path, d, &from, tokens, streams, threads);
    }
    release(b, 4);
    return result;
}

/* encode_rows(path, depth, rows f32 [row, token], (step, dead), (step, dead) below, keep i16 [token], tokens, streams,
 * threads, place u8, lane u8) -> bytes */
static PyObject *encode_rows(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[4] = {{0}};
    PyObject *capsule, *result = NULL;
    const char *name;
    unsigned tokens, streams, threads;
    Indices from = {0};
    if (!PyArg_ParseTuple(args, "sOy*(ff)(ff)y*III|z*z*", &name, &capsule, b, &from.own.step, &from.own.dead, &from.lower.step,
                          &from.lower.dead, b + 1, &tokens, &streams, &threads, b + 2, b + 3)) {
        release(b, 4);
        return NULL;
    }
    const Path *path = path_named(name);
    const Depth *d = path ? PyCapsule_GetPointer(capsule, DEPTH_NAME) : NULL;
    if (d && (!tokens || !cuts(d, streams) || !holds(b, (size_t)d->rows * tokens, 4) || !holds(b + 1, tokens, 2) ||
              !references_of(b + 2, b + 3, tokens, &from.references))) {
        size_error();
    } else if (d) {
        from.rows = b[0].buf, from.keep = b[1].buf;
        result = encoded(path, d, &from, tokens, streams, threads);
    }
    release(b, 4);
    return result;
}

/* decode_indices(path, depth, payload, index i16 [row, place], tokens, place u8, lane u8): index holds the indices below, or
 * zeros */
static PyObject *decode_indices(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[4] = {{0}};
    References references = {0};
    PyObject *capsule;
    const char *name;
    unsigned tokens;
    if (!PyArg_ParseTuple(args, "sOy*w*I|z*z*", &name, &capsule, b, b + 1, &tokens, b + 2, b + 3)) {
        release(b, 4);
        return NULL;
    }
    const Path *path = path_named(name);
    const Depth *d = path ? PyCapsule_GetPointer(capsule, DEPTH_NAME) : NULL;
    if (!d || !tokens || !holds(b + 1, (size_t)d->rows * tokens, 2) || !references_of(b + 2, b + 3, tokens, &references)) {
        release(b, 4);
        return PyErr_Occurred() ? NULL : size_error();
    }
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = decode_group_indices(path, d, b[0].buf, (size_t)b[0].len, b[1].buf, tokens, references.lane);
    Py_END_ALLOW_THREADS
    release(b, 4);
    if (error)
        return raised(error);
    Py_RETURN_NONE;
}

/* The output: (address, dtype, 5 strides in elements), then the tokens and the tables to multiply with. */
typedef struct {
    Output out;
    Py_buffer buffer[3]; /* scale, cos, sin */
    Tile group;
} Target;

static int read_target(PyObject *tuple, Target *target) {
    unsigned long long address;
    Output *o = &target->out;
    Py_ssize_t s[5];
    if (!PyArg_ParseTuple(tuple, "Ki(nnnnn)Iy*y*y*", &address, &o->dtype, s, s + 1, s + 2, s + 3, s + 4, &target->group.tokens,
                          target->buffer, target->buffer + 1, target->buffer + 2))
        return -1;
    o->data = (char *)(uintptr_t)address;
    for (int i = 0; i < 5; i++)
        o->stride[i] = s[i];
    target->group.scale = target->buffer[0].buf, target->group.cos = target->buffer[1].buf;
    target->group.sin = target->buffer[2].buf;
    return 0;
}

static int fits(const Target *target, const Transform *t) {
    uint32_t tokens = target->group.tokens;
    size_t angles = (size_t)tokens * (t->rotary / 2);
    return tokens && tokens < (1u << 24) && target->out.dtype >= FLOAT32 && target->out.dtype <= BFLOAT16 &&
           holds(target->buffer, (size_t)t->layers * t->halves, 4) && holds(target->buffer + 1, angles, 4) &&
           holds(target->buffer + 2, angles, 4);
}

/* synthesise(path, transform, z i16 [row, token], target) */
static PyObject *synthesise(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer z = {0};
    Target target = {0};
    PyObject *capsule, *tuple;
    const char *name;
    if (!PyArg_ParseTuple(args, "sOy*O!", &name, &capsule, &z, &PyTuple_Type, &tuple))
        return NULL;
    const Path *path = path_named(name);
    const Transform *t = path ? PyCapsule_GetPointer(capsule, TRANSFORM_NAME) : NULL;
    int good = t && read_target(tuple, &target) == 0;
    if (good && (t->paired != path->paired || !fits(&target, t) || !holds(&z, (size_t)t->rows * target.group.tokens, 2))) {
        size_error();
        good = 0;
    }
    int error = OK;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        error = synthesise_group(path, t, z.buf, &target.group, &target.out);
        Py_END_ALLOW_THREADS
    }
    release(&z, 1);
    release(target.buffer, 3);
    if (!good)
        return NULL;
    if (error)
        return raised(error);
    Py_RETURN_NONE;
}

/* error_sums(path, rows f32 [row, token], which u32, gains f32, (step, dead), coded i32 [token], sums i64): in units of
 * step/1024 */
static PyObject *error_sums(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[5] = {{0}};
    Quantiser q;
    const char *name;
    if (!PyArg_ParseTuple(args, "sy*y*y*(ff)y*w*", &name, b, b + 1, b + 4, &q.step, &q.dead, b + 2, b + 3))
        return NULL;
    const Path *path = path_named(name);
    size_t tokens = (size_t)b[2].len / 4, count = (size_t)b[1].len / 4, rows = tokens ? (size_t)b[0].len / 4 / tokens : 0;
    const uint32_t *which = b[1].buf;
    int good = path && tokens && tokens < (1u << 24) && holds(b, rows * tokens, 4) && holds(b + 3, count, 8) &&
               holds(b + 4, count, 4);
    for (size_t i = 0; good && i < count; i++)
        good = which[i] < rows;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < count; i++)
            ((int64_t *)b[3].buf)[i] = path->error_sum((const float *)b[0].buf + which[i] * tokens, ((const float *)b[4].buf)[i],
                                                       &q, b[2].buf, (uint32_t)tokens);
        Py_END_ALLOW_THREADS
    }
    release(b, 5);
    if (!good)
        return PyErr_Occurred() ? NULL : size_error();
    Py_RETURN_NONE;
}

/* alike(path, rows f32 [row, token], tokens, which u32, token u32, step, most, sums i32 [n, n] of zeros) */
static PyObject *alike(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[4] = {{0}};
    const char *name;
    unsigned tokens, most;
    float step;
    if (!PyArg_ParseTuple(args, "sy*Iy*y*fIw*", &name, b, &tokens, b + 1, b + 2, &step, &most, b + 3))
        return NULL;
    const Path *path = path_named(name);
    size_t count = (size_t)b[1].len / 4, n = (size_t)b[2].len / 4, rows = tokens ? (size_t)b[0].len / 4 / tokens : 0;
    const uint32_t *which = b[1].buf, *token = b[2].buf;
    int error = OK, good = path && tokens && n <= TILE && count < (1u << 20) && most <= 8 && holds(b, rows * tokens, 4) &&
                           holds(b + 1, count, 4) && holds(b + 2, n, 4) && holds(b + 3, n * n, 4);
    for (size_t i = 0; good && i < count; i++)
        good = which[i] < rows;
    for (size_t i = 0; good && i < n; i++)
        good = token[i] < tokens;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        error = path->alike(b[0].buf, tokens, which, (uint32_t)count, token, (uint32_t)n, step, (int32_t)most, b[3].buf);
        Py_END_ALLOW_THREADS
    }
    release(b, 4);
    if (!good)
        return PyErr_Occurred() ? NULL : size_error();
    if (error)
        return raised(error);
    Py_RETURN_NONE;
}

/* count_symbols(path, rows f32 [row, token], rows, loud, ((step, dead, refines, symbols i32 [row, context, symbol], flags i32 [row,
 * context, 2]), ...)): see count.h */
static PyObject *count_symbols(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer from = {0}, b[2 * MAX_DEPTHS] = {{0}};
    CountedDepth depth[MAX_DEPTHS];
    const char *name;
    PyObject *tuple;
    unsigned rows;
    float loud;
    if (!PyArg_ParseTuple(args, "sy*IfO!", &name, &from, &rows, &loud, &PyTuple_Type, &tuple))
        return NULL;
    const Path *path = path_named(name);
    Py_ssize_t n = PyTuple_Size(tuple);
    size_t tokens = rows ? (size_t)from.len / 4 / rows : 0, symbols = 0;
    int good = path && tokens && tokens < (1u << 24) && holds(&from, rows * tokens, 4) && n && n <= MAX_DEPTHS;
    for (Py_ssize_t d = 0; good && d < n; d++) {
        CountedDepth *own = depth + d;
        Py_buffer *to = b + 2 * d;
        good = PyArg_ParseTuple(PyTuple_GetItem(tuple, d), "ffpw*w*", &own->own.step, &own->own.dead, &own->refines, to, to + 1);
        size_t contexts = own->refines ? 3 : 1, states = own->refines ? 4 : 2;
        symbols = d ? symbols : (size_t)to->len / 4 / rows;
        good = good && (d || !own->refines) && symbols >= 2 * CLOSE + 2 && symbols < (1u << 16) && symbols % 2 == 0 &&
               holds(to, rows * contexts * symbols, 4) && holds(to + 1, rows * states, 4);
        own->symbols = to->buf, own->flags = to[1].buf;
    }
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t r = 0; r < rows; r++)
            path->count_row((const float *)from.buf + r * tokens, (uint32_t)tokens, loud, depth, (int)n, r, (uint32_t)symbols - 2);
        Py_END_ALLOW_THREADS
    }
    release(&from, 1);
    release(b, 2 * MAX_DEPTHS);
    if (!good)
        return PyErr_Occurred() ? NULL : size_error();
    Py_RETURN_NONE;
}

/* The buffers of count_near, and what their sizes say. */
enum { INDEX = 0, BELOW, PLACE, LANE, ROW_CLASS, RADIUS, BUCKET, COUNTS, NEAR_BUFFERS };

static int near_fits(const Py_buffer *b, uint32_t tokens, uint32_t contexts, Depth *d, References *references) {
    size_t rows = (size_t)b[ROW_CLASS].len, classes = (size_t)b[RADIUS].len, tables = classes * contexts;
    d->contexts = b[BELOW].buf ? 3 : 1;
    if (tokens <= LANES || tokens > TILE || !tables || tables > (1u << 16) || (size_t)b[COUNTS].len % (8 * tables))
        return 0;
    d->width = (uint32_t)((size_t)b[COUNTS].len / (8 * tables));
    int good = references_of(b + PLACE, b + LANE, tokens, references) && references->place && holds(b + INDEX, rows * tokens, 4) &&
               (!b[BELOW].buf || holds(b + BELOW, rows * tokens, 4)) && holds(b + BUCKET, d->contexts * sizeof d->bucket[0], 1);
    for (size_t r = 0; good && r < rows; r++)
        good = ((const uint8_t *)b[ROW_CLASS].buf)[r] < classes;
    for (size_t c = 0; good && c < classes; c++)
        good = 2u * ((const uint8_t *)b[RADIUS].buf)[c] + 1 < d->width;
    for (size_t i = 0; good && i < (size_t)b[BUCKET].len; i++)
        good = (d->bucket[i / 16][i % 16] = ((const uint8_t *)b[BUCKET].buf)[i]) < contexts;
    return good;
}

/* count_near(path, index i32 [row, token], below i32 or None, tokens, place u8, lane u8, row_class u8, radius u8, bucket u8,
 * contexts, counts i64 [class, context, symbol]): see count.h */
static PyObject *count_near(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[NEAR_BUFFERS] = {{0}};
    const char *name;
    unsigned tokens, contexts;
    Depth d = {0};
    References references = {0};
    if (!PyArg_ParseTuple(args, "sy*z*Iy*y*y*y*y*Iw*", &name, b + INDEX, b + BELOW, &tokens, b + PLACE, b + LANE, b + ROW_CLASS, b + RADIUS,
                          b + BUCKET, &contexts, b + COUNTS)) {
        release(b, NEAR_BUFFERS);
        return NULL;
    }
    const Path *path = path_named(name);
    int good = path && near_fits(b, tokens, contexts, &d, &references);
    if (good) {
        const int32_t *index = b[INDEX].buf, *below = b[BELOW].buf;
        const uint8_t *row_class = b[ROW_CLASS].buf, *radius = b[RADIUS].buf;
        Py_BEGIN_ALLOW_THREADS
        for (size_t r = 0; r < (size_t)b[ROW_CLASS].len; r++)
            path->count_near_row(index + r * tokens, below ? below + r * tokens : NULL, &references, tokens, &d, radius[row_class[r]], d.width,
                           (int64_t *)b[COUNTS].buf + (size_t)row_class[r] * contexts * d.width);
        Py_END_ALLOW_THREADS
    }
    release(b, NEAR_BUFFERS);
    if (!good)
        return PyErr_Occurred() ? NULL : size_error();
    Py_RETURN_NONE;
}

/* decode(path, transform, depths, payloads, target, threads, place u8, lane u8, mean f32); the last three may be None */
static PyObject *decode(PyObject *self, PyObject *args) {
    (void)self;
    const char *name;
    PyObject *capsule, *depths, *payloads, *tuple;
    Target target = {0};
    Chain chain = {0};
    Py_buffer payload[MAX_DEPTHS] = {{0}};
    Py_buffer b[3] = {{0}};
    unsigned threads;
    if (!PyArg_ParseTuple(args, "sOO!O!O!Iz*z*z*", &name, &capsule, &PyTuple_Type, &depths, &PyTuple_Type, &payloads, &PyTuple_Type,
                          &tuple, &threads, b, b + 1, b + 2)) {
        release(b, 3);
        return NULL;
    }
    const Path *path = path_named(name);
    const Transform *t = path ? PyCapsule_GetPointer(capsule, TRANSFORM_NAME) : NULL;
    int good = t && read_target(tuple, &target) == 0;
    Py_ssize_t n = PyTuple_Size(depths);
    size_t means = t ? (size_t)t->layers * t->halves * t->blocks * t->width : 0;
    if (good && (t->paired != path->paired || !fits(&target, t) || n < 1 || n > MAX_DEPTHS || PyTuple_Size(payloads) != n ||
                 !references_of(b, b + 1, target.group.tokens, &chain.references) ||
                 (b[2].buf && !holds(b + 2, means, 4)))) {
        size_error();
        good = 0;
    }
    for (Py_ssize_t d = 0; good && d < n; d++) {
        chain.depth[d] = PyCapsule_GetPointer(PyTuple_GetItem(depths, d), DEPTH_NAME);
        good = chain.depth[d] && PyObject_GetBuffer(PyTuple_GetItem(payloads, d), payload + d, PyBUF_SIMPLE) == 0;
        chain.payload[d] = payload[d].buf, chain.size[d] = (size_t)payload[d].len;
        if (good && (chain.depth[d]->rows != t->rows || (chain.depth[d]->contexts > 1) != (d > 0))) {
            size_error();
            good = 0;
        }
    }
    chain.depths = (int)n;
    int error = OK;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        Transform own = *t;
        if (b[2].buf)
            own.mean = padded_means(t, b + 2);
        error = own.mean ? decode_group(path, &own, &chain, &target.group, &target.out, threads) : NO_MEMORY;
        if (b[2].buf)
            aligned_free(own.mean);
        Py_END_ALLOW_THREADS
    }
    release(payload, n < MAX_DEPTHS ? (int)n : MAX_DEPTHS);
    release(target.buffer, 3);
    release(b, 3);
    if (!good)
        return NULL;
    if (error)
        return raised(error);
    Py_RETURN_NONE;
}

/* Payloads that Python holds, and what is known of them. */
typedef struct {
    Gathered *from;
    Py_buffer *held;
    size_t count;
} Payloads;

static void let_go(Payloads *it) {
    if (it->held)
        release(it->held, (int)it->count);
    free(it->held), free(it->from);
}

/* Hold a tuple of payloads; 0 with an exception set if that is not possible. Behind either, `let_go`. */
static int hold(Payloads *it, PyObject *tuple) {
    size_t n = (size_t)PyTuple_Size(tuple);
    *it = (Payloads){calloc(n + 1, sizeof *it->from), calloc(n + 1, sizeof *it->held), 0};
    if (!it->from || !it->held || n > UINT32_MAX) {
        PyErr_NoMemory();
        return 0;
    }
    for (; it->count < n; it->count++) {
        Py_buffer *own = it->held + it->count;
        if (PyObject_GetBuffer(PyTuple_GetItem(tuple, (Py_ssize_t)it->count), own, PyBUF_SIMPLE))
            return 0;
        it->from[it->count].data = own->buf, it->from[it->count].size = (size_t)own->len;
    }
    return 1;
}

/* gather(payloads, tokens u32 [payload], groups i64 [payload], rows, to u8 or None, threads) -> parts i64 [stream][8];
   see `Gathered` */
static PyObject *gather(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[3] = {{0}};
    Payloads it = {0};
    PyObject *tuple, *to, *result = NULL;
    unsigned rows, threads;
    if (!PyArg_ParseTuple(args, "O!y*y*IOI", &PyTuple_Type, &tuple, b, b + 1, &rows, &to, &threads) ||
        (to != Py_None && PyObject_GetBuffer(to, b + 2, PyBUF_WRITABLE))) {
        release(b, 3);
        return NULL;
    }
    uint64_t streams = 0, bytes = 0;
    int error = OK, good = hold(&it, tuple);
    if (good && !(good = holds(b, it.count, 4) && holds(b + 1, it.count, 8)))
        size_error();
    for (size_t i = 0; good && i < it.count; i++)
        it.from[i].tokens = ((const uint32_t *)b[0].buf)[i], it.from[i].group = ((const int64_t *)b[1].buf)[i];
    if (good && !(error = gather_check(it.from, (uint32_t)it.count, rows, &streams, &bytes))) {
        if (b[2].buf && (uint64_t)b[2].len < bytes) {
            good = 0;
            size_error();
        } else if ((result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(streams * PART_NUMBERS * sizeof(int64_t))))) {
            int64_t *parts = (int64_t *)(void *)PyBytes_AsString(result);
            Py_BEGIN_ALLOW_THREADS
            error = gather_parts(it.from, (uint32_t)it.count, rows, parts);
            error = error || !b[2].buf ? error : gather_copy(it.from, (uint32_t)it.count, b[2].buf, threads);
            Py_END_ALLOW_THREADS
        }
    }
    let_go(&it);
    release(b, 3);
    if (good && error) {
        Py_CLEAR(result);
        return raised(error);
    }
    return result;
}

/* copy(payloads, to u8, threads): one behind another, as `gather` does, whatever they are */
static PyObject *copy(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer to = {0};
    Payloads it = {0};
    PyObject *tuple;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "O!w*I", &PyTuple_Type, &tuple, &to, &threads))
        return NULL;
    int error = OK, good = hold(&it, tuple);
    if (good && gather_places(it.from, (uint32_t)it.count) > (uint64_t)to.len) {
        good = 0;
        size_error();
    }
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        error = gather_copy(it.from, (uint32_t)it.count, to.buf, threads);
        Py_END_ALLOW_THREADS
    }
    let_go(&it);
    PyBuffer_Release(&to);
    if (!good)
        return NULL;
    if (error)
        return raised(error);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"paths", paths, METH_NOARGS, "Names of the paths that this processor can run, fastest first."},
    {"depth", depth, METH_VARARGS, "Prepare the tables of one depth."},
    {"transform", transform, METH_VARARGS, "Prepare the matrices of a synthesis for one path."},
    {"encode", encode, METH_VARARGS, "Indices to a payload."},
    {"encode_rows", encode_rows, METH_VARARGS, "Coefficients to a payload."},
    {"error_sums", error_sums, METH_VARARGS, "What quantising takes from rows."},
    {"alike", alike, METH_VARARGS, "How alike tokens are."},
    {"count_symbols", count_symbols, METH_VARARGS, "Counts of indices, for a calibration."},
    {"count_near", count_near, METH_VARARGS, "The same of tokens that refer to others."},
    {"decode_indices", decode_indices, METH_VARARGS, "A payload to indices."},
    {"synthesise", synthesise, METH_VARARGS, "Coefficients to a tensor."},
    {"decode", decode, METH_VARARGS, "A chain of payloads to a tensor."},
    {"copy", copy, METH_VARARGS, "Payloads to one buffer."},
    {"gather", gather, METH_VARARGS, "Payloads to one buffer, and where their streams are in it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kvcoder", "The native coder; see kvabr.codec.native.coder.", 0,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kvcoder(void) {
    const uint32_t one = 1;
    if (*(const uint8_t *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "kvabr's native coder runs on little-endian processors only");
        return NULL;
    }
#ifdef HAVE_X86
    __builtin_cpu_init();
#endif
    return PyModule_Create(&module);
}
