/* The Python module. Private: coder.py checks the arguments, and model.py the profile. Only sizes are checked here, so that
 * no bug above can make this read or write outside of a buffer. For tensors, which are passed by address, coder.py has
 * checked shape and strides. Work is done without the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "kvcoder.h"

static const char depth_name[] = "kvabr.Depth", transform_name[] = "kvabr.Transform";

static const char *message(int error) {
    switch (error) {
    case TOO_SHORT: return "it ends too early, or its parts do not add up; truncated, or of another profile";
    case LEFT_OVER: return "it does not end where it should; corrupt, or of another profile";
    case BAD_ESCAPE: return "escapes that were not sent, or that no encoder writes; corrupt, or of another profile";
    case BAD_INDEX: return "an index is beyond 16 bits, or cannot be reached from the one below; keep such tokens exact";
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
    if (path == &path_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
    return path == &path_portable;
}

static const Path *const all_paths[] = {
#ifdef HAVE_X86
    &path_avx512, &path_avx2,
#endif
    &path_portable, NULL};

static const Path *path_named(const char *name) {
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

static void free_depth(PyObject *capsule) { depth_free(PyCapsule_GetPointer(capsule, depth_name)); }
static void free_transform(PyObject *capsule) { transform_free(PyCapsule_GetPointer(capsule, transform_name)); }

/* Whether a buffer has room for count items of a size. */
static int holds(const Py_buffer *b, size_t count, size_t size) {
    if (size && count > (size_t)PY_SSIZE_T_MAX / size)
        return 0;
    return (size_t)b->len == count * size;
}

static void release(Py_buffer *buffers, int n) {
    for (int i = 0; i < n; i++)
        if (buffers[i].obj)
            PyBuffer_Release(buffers + i);
}

static PyObject *size_error(void) {
    PyErr_SetString(PyExc_TypeError, "a buffer has not the size that it should have");
    return NULL;
}

/* depth(row_class u8, radius u8, freqs u16, flag_freq u16, delta u8, order u32, contexts, freqs u16 and bucket u8 [1 or 3][16] of
 * tokens that refer to another, their contexts) */
static PyObject *depth(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[8] = {{0}};
    unsigned contexts, near = 0;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*I|y*y*I", b, b + 1, b + 2, b + 3, b + 4, b + 5, &contexts, b + 6, b + 7, &near)) {
        release(b, 8);
        return NULL;
    }
    size_t rows = (size_t)b[0].len, classes = (size_t)b[1].len;
    size_t width = classes && (contexts == 1 || contexts == 3) ? (size_t)b[2].len / 2 / classes / contexts : 0;
    int good = rows > 0 && rows < (1u << 31) && classes > 0 && classes <= 256 && width > 1 && width <= 254;
    good = good && holds(b + 2, classes * contexts * width, 2) && holds(b + 3, rows * (contexts == 1 ? 1 : 2), 2);
    good = good && holds(b + 4, classes, 1) && holds(b + 5, rows, 4);
    for (size_t i = 0; good && i < rows; i++)
        good = ((const uint32_t *)b[5].buf)[i] < rows && ((const uint8_t *)b[0].buf)[i] < classes;
    for (size_t c = 0; good && c < classes; c++)
        good = 2u * ((const uint8_t *)b[1].buf)[c] + 2 <= width;
    if (near) {
        good = good && near <= MOST_NEAR && holds(b + 6, classes * near * width, 2) && holds(b + 7, 16 * (size_t)contexts, 1);
        for (size_t i = 0; good && i < 16 * (size_t)contexts; i++)
            good = ((const uint8_t *)b[7].buf)[i] < near;
    }
    if (!good) {
        release(b, 8);
        return size_error();
    }
    Depth *d = depth_new((uint32_t)rows, (uint32_t)classes, contexts, (uint32_t)width, b[0].buf, b[1].buf, b[2].buf,
                         b[3].buf, b[4].buf, b[5].buf);
    if (!d || (near && depth_near(d, near, b[6].buf, b[7].buf)))
        PyErr_NoMemory();
    else
        result = PyCapsule_New(d, depth_name, free_depth);
    if (!result)
        depth_free(d);
    release(b, 8);
    return result;
}

/* One stack: (kv, kept, layers u32, mantissa i8, gain u8). */
static int read_stack(PyObject *tuple, Transform *t, StackTransform *s, uint32_t first_row, const Path *path) {
    Py_buffer b[3] = {{0}};
    if (!PyArg_ParseTuple(tuple, "IIy*y*y*", &s->kv, &s->kept, b, b + 1, b + 2))
        return -1;
    size_t count = (size_t)b[0].len / 4, size = count * t->blocks * s->kept;
    int good = s->kv < t->halves && s->kept <= t->width && s->kept % 2 == 0 && count && count <= t->layers && holds(b, count, 4);
    good = good && size <= (1u << 14) && holds(b + 1, size * size, 1) && holds(b + 2, size, 1);
    for (size_t i = 0; good && i < count; i++)
        good = ((const uint32_t *)b[0].buf)[i] < t->layers;
    good = good && (uint64_t)first_row + count * t->blocks * t->width <= t->rows;
    if (!good) {
        size_error();
    } else {
        s->layers = (uint32_t)count, s->size = (uint32_t)size, s->first_row = first_row;
        t->most_size = s->size > t->most_size ? s->size : t->most_size;
        s->layer = aligned_zeros(count, sizeof *s->layer);
        if (size)
            s->matrix = aligned_zeros(packed_entries(s->size), sizeof *s->matrix);
        good = s->layer && (!size || s->matrix);
        if (good)
            memcpy(s->layer, b[0].buf, count * sizeof *s->layer);
        if (good && size) {
            pack_matrix(s->matrix, b[1].buf, b[2].buf, s->size, t->paired);
            good = !path->products8 || pack_small(s, b[1].buf, b[2].buf) == OK;
        }
        if (!good)
            PyErr_NoMemory();
    }
    release(b, 3);
    return good ? 0 : -1;
}

static int read_blocks(Transform *t, const Py_buffer *mantissa, const Py_buffer *gain) {
    size_t count = (size_t)t->layers * t->halves * t->blocks, area = (size_t)t->width * t->width;
    if (!mantissa->len)
        return 0;
    if (!holds(mantissa, count * area, 1) || !holds(gain, count * t->width, 1))
        return size_error(), -1;
    t->block_entries = packed_entries(t->width);
    t->block = aligned_zeros(count * t->block_entries, sizeof *t->block);
    if (!t->block)
        return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < count; i++)
        pack_matrix(t->block + i * t->block_entries, (const int8_t *)mantissa->buf + i * area,
                    (const uint8_t *)gain->buf + i * t->width, t->width, t->paired);
    return 0;
}

/* The transform's means, or others [layer][kv][head][dim], each block of heads filled up to whole panels. */
static float *padded_means(const Transform *t, const Py_buffer *mean) {
    size_t count = (size_t)t->layers * t->halves * t->blocks;
    float *made = aligned_zeros(count * t->padded_width, sizeof *made);
    for (size_t i = 0; made && i < count; i++)
        memcpy(made + i * t->padded_width, (const float *)mean->buf + i * t->width, t->width * sizeof(float));
    return made;
}

/* transform(path, (layers, kv_heads, head_dim, block_heads, halves = 2, first dimension that rotates = 0), rotary,
 * interleaved, block i8, gain u8, mean f32, stacks) */
static PyObject *transform(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[3] = {{0}};
    const char *name;
    PyObject *stacks, *result = NULL;
    Transform *t = calloc(1, sizeof *t);
    if (!t)
        return PyErr_NoMemory();
    PyObject *shape;
    t->halves = 2;
    if (!PyArg_ParseTuple(args, "sO!IIy*y*y*O!", &name, &PyTuple_Type, &shape, &t->rotary, &t->interleaved, b, b + 1, b + 2,
                          &PyTuple_Type, &stacks) ||
        !PyArg_ParseTuple(shape, "IIII|II", &t->layers, &t->kv_heads, &t->head_dim, &t->block_heads, &t->halves, &t->turned)) {
        release(b, 3);
        free(t);
        return NULL;
    }
    const Path *path = path_named(name);
    uint64_t layer = (uint64_t)t->halves * t->kv_heads * t->head_dim;
    int good = path && (t->halves == 1 || t->halves == 2) && t->turned <= t->head_dim && t->rotary <= t->head_dim - t->turned &&
               t->layers && t->layers <= 4096 && t->kv_heads && t->kv_heads <= 4096 && t->head_dim &&
               t->head_dim <= 4096 && t->block_heads && t->kv_heads % t->block_heads == 0 &&
               t->rotary % 2 == 0 && t->layers * layer <= (1u << 22) && t->block_heads * t->head_dim <= (1u << 14);
    if (good) {
        t->paired = path->paired;
        t->rows = (uint32_t)(t->layers * layer), t->blocks = t->kv_heads / t->block_heads;
        t->width = t->block_heads * t->head_dim, t->padded_width = (t->width + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
        t->stacks = (uint32_t)PyTuple_Size(stacks);
        good = holds(b + 2, t->rows, sizeof(float)) && t->stacks <= t->halves * t->layers;
    }
    if (!good && !PyErr_Occurred())
        size_error();
    good = good && read_blocks(t, b, b + 1) == 0;
    if (good) {
        t->mean = padded_means(t, b + 2);
        t->stack = aligned_zeros(t->stacks, sizeof *t->stack);
        good = t->mean && t->stack;
        if (!good)
            PyErr_NoMemory();
    }
    uint32_t row = 0;
    for (uint32_t s = 0; good && s < t->stacks; s++) {
        good = read_stack(PyTuple_GetItem(stacks, s), t, t->stack + s, row, path) == 0;
        row += good ? t->stack[s].layers * t->blocks * t->width : 0;
    }
    if (good && !(result = PyCapsule_New(t, transform_name, free_transform)))
        good = 0;
    if (!good)
        transform_free(t);
    release(b, 3);
    return result;
}

static PyObject *encoded(const Path *path, const Depth *d, const Indices *from, uint32_t tokens) {
    uint8_t *out = NULL;
    size_t size = 0;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = path->encode_group(d, from, tokens, &out, &size);
    Py_END_ALLOW_THREADS
    PyObject *result = error ? raised(error) : PyBytes_FromStringAndSize((const char *)out, (Py_ssize_t)size);
    aligned_free(out);
    return result;
}

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

/* encode(path, depth, index i16 [row, token], below i16 or None, tokens, place u8, lane u8) -> bytes */
static PyObject *encode(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[4] = {{0}};
    PyObject *capsule, *result = NULL;
    const char *name;
    unsigned tokens;
    Indices from = {0};
    if (!PyArg_ParseTuple(args, "sOy*z*I|z*z*", &name, &capsule, b, b + 1, &tokens, b + 2, b + 3)) {
        release(b, 4);
        return NULL;
    }
    const Path *path = path_named(name);
    const Depth *d = path ? PyCapsule_GetPointer(capsule, depth_name) : NULL;
    if (d && (!tokens || !references_of(b + 2, b + 3, tokens, &from.references) || !holds(b, (size_t)d->rows * tokens, 2) || (d->contexts == 1) != !b[1].buf ||
              (b[1].buf && b[1].len != b[0].len))) {
        size_error();
    } else if (d) {
        from.index = b[0].buf, from.below = b[1].buf;
        result = encoded(path, d, &from, tokens);
    }
    release(b, 4);
    return result;
}

/* encode_rows(path, depth, rows f32 [row, token], (step, dead), (step, dead) below, keep i16 [token], tokens, place u8,
 * lane u8) -> bytes */
static PyObject *encode_rows(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[4] = {{0}};
    PyObject *capsule, *result = NULL;
    const char *name;
    unsigned tokens;
    Indices from = {0};
    if (!PyArg_ParseTuple(args, "sOy*(ff)(ff)y*I|z*z*", &name, &capsule, b, &from.own.step, &from.own.dead, &from.lower.step,
                          &from.lower.dead, b + 1, &tokens, b + 2, b + 3)) {
        release(b, 4);
        return NULL;
    }
    const Path *path = path_named(name);
    const Depth *d = path ? PyCapsule_GetPointer(capsule, depth_name) : NULL;
    if (d && (!tokens || !holds(b, (size_t)d->rows * tokens, 4) || !holds(b + 1, tokens, 2) ||
              !references_of(b + 2, b + 3, tokens, &from.references))) {
        size_error();
    } else if (d) {
        from.rows = b[0].buf, from.keep = b[1].buf;
        result = encoded(path, d, &from, tokens);
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
    const Depth *d = path ? PyCapsule_GetPointer(capsule, depth_name) : NULL;
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
    const Transform *t = path ? PyCapsule_GetPointer(capsule, transform_name) : NULL;
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

/* decode(path, transform, depths, payloads, target, threads = 1, place u8, lane u8, mean f32) */
static PyObject *decode(PyObject *self, PyObject *args) {
    (void)self;
    const char *name;
    PyObject *capsule, *depths, *payloads, *tuple;
    Target target = {0};
    Chain chain = {0};
    Py_buffer payload[MOST_DEPTHS] = {{0}};
    Py_buffer b[3] = {{0}};
    unsigned threads = 1;
    if (!PyArg_ParseTuple(args, "sOO!O!O!|Iz*z*z*", &name, &capsule, &PyTuple_Type, &depths, &PyTuple_Type, &payloads, &PyTuple_Type,
                          &tuple, &threads, b, b + 1, b + 2)) {
        release(b, 3);
        return NULL;
    }
    const Path *path = path_named(name);
    const Transform *t = path ? PyCapsule_GetPointer(capsule, transform_name) : NULL;
    int good = t && read_target(tuple, &target) == 0;
    Py_ssize_t n = PyTuple_Size(depths);
    size_t means = t ? (size_t)t->layers * t->halves * t->blocks * t->width : 0;
    if (good && (t->paired != path->paired || !fits(&target, t) || n < 1 || n > MOST_DEPTHS || PyTuple_Size(payloads) != n ||
                 !references_of(b, b + 1, target.group.tokens, &chain.references) ||
                 (b[2].buf && !holds(b + 2, means, 4)))) {
        size_error();
        good = 0;
    }
    for (Py_ssize_t d = 0; good && d < n; d++) {
        chain.depth[d] = PyCapsule_GetPointer(PyTuple_GetItem(depths, d), depth_name);
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
    release(payload, n < MOST_DEPTHS ? (int)n : MOST_DEPTHS);
    release(target.buffer, 3);
    release(b, 3);
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
    {"decode_indices", decode_indices, METH_VARARGS, "A payload to indices."},
    {"synthesise", synthesise, METH_VARARGS, "Coefficients to a tensor."},
    {"decode", decode, METH_VARARGS, "A chain of payloads to a tensor."},
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
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "MOST_THREADS", MOST_THREADS)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
