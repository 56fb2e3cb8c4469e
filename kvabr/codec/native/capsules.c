/* What Python keeps between calls: the tables of a depth and the matrices of a transform, as capsules. Only sizes are checked
 * here, as in _kvcoder.c. */
#include <stdlib.h>
#include <string.h>

#include "module.h"

static void free_depth(PyObject *capsule) { depth_free(PyCapsule_GetPointer(capsule, DEPTH_NAME)); }
static void free_transform(PyObject *capsule) { transform_free(PyCapsule_GetPointer(capsule, TRANSFORM_NAME)); }

/* depth(row_class u8, radius u8, freqs u16, flag_freq u16, delta u8, order u32, contexts, freqs u16 and bucket u8 [1 or 3][16] of
 * tokens that refer to another, their contexts) */
PyObject *depth(PyObject *self, PyObject *args) {
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
        good = good && near <= MAX_NEAR && holds(b + 6, classes * near * width, 2) && holds(b + 7, 16 * (size_t)contexts, 1);
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
        result = PyCapsule_New(d, DEPTH_NAME, free_depth);
    if (!result)
        depth_free(d);
    release(b, 8);
    return result;
}

/* One stack: (kv, kept, layers u32, mantissa i8, gain u8). */
static int read_stack(PyObject *tuple, Transform *t, StackTransform *s, uint32_t first_row) {
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
        if (good && size)
            pack_matrix(s->matrix, b[1].buf, b[2].buf, s->size, t->paired);
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
float *padded_means(const Transform *t, const Py_buffer *mean) {
    size_t count = (size_t)t->layers * t->halves * t->blocks;
    float *made = aligned_zeros(count * t->padded_width, sizeof *made);
    for (size_t i = 0; made && i < count; i++)
        memcpy(made + i * t->padded_width, (const float *)mean->buf + i * t->width, t->width * sizeof(float));
    return made;
}

/* transform(path, (layers, kv_heads, head_dim, block_heads, halves = 2, first dimension that rotates = 0), rotary,
 * interleaved, block i8, gain u8, mean f32, stacks) */
PyObject *transform(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[3] = {{0}};
    const char *name;
    PyObject *stacks, *result = NULL;
    Transform *t = calloc(1, sizeof *t);
    if (!t)
        return PyErr_NoMemory();
    PyObject *shape;
    if (!PyArg_ParseTuple(args, "sO!IIy*y*y*O!", &name, &PyTuple_Type, &shape, &t->rotary, &t->interleaved, b, b + 1, b + 2,
                          &PyTuple_Type, &stacks) ||
        !PyArg_ParseTuple(shape, "IIIIII", &t->layers, &t->kv_heads, &t->head_dim, &t->block_heads, &t->halves, &t->turned)) {
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
        good = read_stack(PyTuple_GetItem(stacks, s), t, t->stack + s, row) == 0;
        row += good ? t->stack[s].layers * t->blocks * t->width : 0;
    }
    if (good && !(result = PyCapsule_New(t, TRANSFORM_NAME, free_transform)))
        good = 0;
    if (!good)
        transform_free(t);
    release(b, 3);
    return result;
}
