/* The Python module of the encoder's transform. Private: analysis.py checks the arguments. Only sizes are checked here, so
 * that no bug above can make this read or write outside of a buffer. For tensors, which are passed by address, analysis.py
 * has checked shape and strides. Work is done without the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "analysis.h"

#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

static const char name[] = "kvabr.Analysis";

static void inverse_free(Inverse *i) { free(i->entries), free(i->rows), free(i->columns); }

static void analysis_free(Analysis *a) {
    if (a) {
        free(a->mean), free(a->scale);
        inverse_free(&a->block), inverse_free(&a->stack);
    }
    free(a);
}

static void free_capsule(PyObject *self) { analysis_free(PyCapsule_GetPointer(self, name)); }

static int holds(const Py_buffer *b, size_t count, size_t size) {
    return count <= (size_t)PY_SSIZE_T_MAX / size && (size_t)b->len == count * size;
}

static void release(Py_buffer *buffers, int n) {
    for (int i = 0; i < n; i++)
        if (buffers[i].obj)
            PyBuffer_Release(buffers + i);
}

static PyObject *size_error(void) {
    PyErr_SetString(PyExc_ValueError, "arrays of sizes that do not belong together");
    return NULL;
}

#define HUGE (1u << 21)

/* Memory that is read repeatedly from end to end: in huge pages, where the system has them. */
static void *large(size_t bytes) {
#ifdef __linux__
    void *to;
    if (bytes < HUGE)
        return malloc(bytes);
    if (posix_memalign(&to, HUGE, bytes))
        return NULL;
    (void)madvise(to, bytes, MADV_HUGEPAGE);
    return to;
#else
    return malloc(bytes);
#endif
}

static float *kept(const Py_buffer *b) {
    float *to = malloc((size_t)b->len);
    return to ? memcpy(to, b->buf, (size_t)b->len) : NULL;
}

/* Matrices of one size, from buffers of entries, rows and columns; whether there was memory. */
static int inverses(Inverse *to, const Py_buffer *b, size_t count, uint32_t size) {
    size_t each = analysis_packed(size);
    const int16_t *from = b->buf;
    to->entries = each && count > SIZE_MAX / sizeof *from / each ? NULL : large(count * each * sizeof *from);
    for (size_t i = 0; to->entries && i < count; i++)
        analysis_pack(to->entries + i * each, from + i * size * size, size);
    to->rows = kept(b + 1), to->columns = kept(b + 2);
    return to->entries && to->rows && to->columns;
}

/* The buffers of matrices, or none. */
static int hold_inverses(const Py_buffer *b, size_t count, uint32_t size) {
    return holds(b, count * size * size, 2) && holds(b + 1, count * size, 4) && holds(b + 2, count * size, 4);
}

/* analysis((kind, first, layers), (kv_heads, head_dim, block_heads, first dimension that rotates), kept, rotary, interleaved,
 * mean, scale, block, stack); the last two are (entries, rows, columns) */
static PyObject *analysis(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[8] = {{0}};
    PyObject *result = NULL;
    Analysis *a = calloc(1, sizeof *a);
    if (!a)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "(III)(IIII)IIIy*y*(y*y*y*)(y*y*y*)", &a->kind, &a->first, &a->layers, &a->kv_heads, &a->head_dim,
                          &a->block_heads, &a->turned, &a->kept, &a->rotary, &a->interleaved, b, b + 1, b + 2, b + 3, b + 4,
                          b + 5, b + 6, b + 7)) {
        release(b, 8);
        free(a);
        return NULL;
    }
    int good = a->kind < 2 && a->layers && a->layers <= 4096 && a->first <= 4096 && a->kv_heads && a->kv_heads <= 4096 &&
               a->head_dim && a->head_dim <= 4096 && a->block_heads && a->kv_heads % a->block_heads == 0 &&
               a->block_heads * a->head_dim <= (1u << 14) && a->turned <= a->head_dim &&
               a->rotary <= a->head_dim - a->turned && a->rotary % 2 == 0;
    size_t blocks = 0;
    if (good) {
        a->width = a->block_heads * a->head_dim, a->blocks = a->kv_heads / a->block_heads;
        blocks = (size_t)a->layers * a->blocks;
        good = a->kept <= a->width && (uint64_t)blocks * a->kept <= (1u << 14);
    }
    if (good) {
        a->size = (uint32_t)blocks * a->kept;
        good = holds(b, blocks * a->width, 4) && holds(b + 1, a->layers, 4) &&
               (!b[2].len || hold_inverses(b + 2, blocks, a->width)) && hold_inverses(b + 5, 1, a->size);
    }
    if (!good) {
        size_error();
    } else {
        a->mean = kept(b), a->scale = kept(b + 1);
        int there = a->mean && a->scale && (!b[2].len || inverses(&a->block, b + 2, blocks, a->width));
        if (!there || (a->size && !inverses(&a->stack, b + 5, 1, a->size)))
            PyErr_NoMemory();
        else
            result = PyCapsule_New(a, name, free_capsule);
    }
    release(b, 8);
    if (!result)
        analysis_free(a);
    return result;
}

/* analyse(path, analysis, (address, dtype, 5 strides in elements, tokens), cos, sin, rows, largest, power) */
static PyObject *analyse(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[5] = {{0}};
    PyObject *capsule;
    const char *wanted;
    unsigned long long address;
    Group g;
    Py_ssize_t s[5];
    if (!PyArg_ParseTuple(args, "sO(Ki(nnnnn)I)y*y*w*w*w*", &wanted, &capsule, &address, &g.dtype, s, s + 1, s + 2, s + 3, s + 4,
                          &g.tokens, b, b + 1, b + 2, b + 3, b + 4))
        return NULL;
    const Analysis *a = PyCapsule_GetPointer(capsule, name);
    const AnalysisPath *const *path = analysis_paths();
    while (*path && strcmp((*path)->name, wanted) != 0)
        path++;
    int error = OK, good = a && *path && g.tokens && g.tokens < (1u << 24) && g.dtype >= FLOAT32 && g.dtype <= BFLOAT16;
    if (good) {
        size_t angles = (size_t)g.tokens * (a->rotary / 2), rows = (size_t)a->layers * a->blocks * a->width;
        good = holds(b, angles, 4) && holds(b + 1, angles, 4) && holds(b + 2, rows * g.tokens, 4) &&
               holds(b + 3, (size_t)3 * g.tokens, 4) && holds(b + 4, (size_t)a->layers * g.tokens, 4);
    }
    if (good) {
        g.data = (const char *)(uintptr_t)address, g.cos = b[0].buf, g.sin = b[1].buf;
        for (int i = 0; i < 5; i++)
            g.stride[i] = s[i];
        Analysed out = {b[2].buf, b[3].buf, b[4].buf};
        Py_BEGIN_ALLOW_THREADS
        error = (*path)->run(a, &g, &out);
        Py_END_ALLOW_THREADS
    } else if (!PyErr_Occurred()) {
        size_error();
    }
    release(b, 5);
    if (error)
        return PyErr_NoMemory();
    if (!good)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *paths(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *list = PyList_New(0);
    for (const AnalysisPath *const *path = analysis_paths(); list && *path; path++) {
        PyObject *one = PyUnicode_FromString((*path)->name);
        if (!one || PyList_Append(list, one)) {
            Py_DECREF(list);
            list = NULL;
        }
        Py_XDECREF(one);
    }
    return list;
}

static PyMethodDef methods[] = {
    {"paths", paths, METH_NOARGS, "Names of the paths that this processor supports."},
    {"analysis", analysis, METH_VARARGS, "Prepare the matrices of one stack."},
    {"analyse", analyse, METH_VARARGS, "From a tensor to the coefficients of one stack."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kvanalysis", "See kvabr.codec.analysis.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kvanalysis(void) { return PyModule_Create(&module); }
