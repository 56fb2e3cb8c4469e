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

static void analysis_free(Analysis *a) {
    if (a)
        free(a->mean), free(a->scale), free(a->block), free(a->stack);
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

/* Matrices of one size, packed; NULL if out of memory. */
static float *packed(const float *from, size_t count, uint32_t size) {
    size_t each = analysis_packed(size);
    float *to = each && count > SIZE_MAX / sizeof *to / each ? NULL : large(count * each * sizeof *to);
    for (size_t i = 0; to && i < count; i++)
        analysis_pack(to + i * each, from + i * size * size, size);
    return to;
}

static float *kept(const Py_buffer *b) {
    float *to = malloc((size_t)b->len);
    return to ? memcpy(to, b->buf, (size_t)b->len) : NULL;
}

/* analysis((kind, first, layers), (kv_heads, head_dim, block_heads, first dimension that rotates = 0), kept, rotary,
 * interleaved, mean, scale, block, stack) */
static PyObject *analysis(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[4] = {{0}};
    PyObject *result = NULL;
    Analysis *a = calloc(1, sizeof *a);
    if (!a)
        return PyErr_NoMemory();
    PyObject *heads;
    if (!PyArg_ParseTuple(args, "(III)O!IIIy*y*y*y*", &a->kind, &a->first, &a->layers, &PyTuple_Type, &heads, &a->kept, &a->rotary,
                          &a->interleaved, b, b + 1, b + 2, b + 3) ||
        !PyArg_ParseTuple(heads, "III|I", &a->kv_heads, &a->head_dim, &a->block_heads, &a->turned)) {
        release(b, 4);
        free(a);
        return NULL;
    }
    int good = a->kind < 2 && a->layers && a->layers <= 4096 && a->first <= 4096 && a->kv_heads && a->kv_heads <= 4096 &&
               a->head_dim && a->head_dim <= 4096 && a->block_heads && a->kv_heads % a->block_heads == 0 &&
               a->block_heads * a->head_dim <= (1u << 14) && a->turned <= a->head_dim &&
               a->rotary <= a->head_dim - a->turned && a->rotary % 2 == 0;
    if (good) {
        a->width = a->block_heads * a->head_dim, a->blocks = a->kv_heads / a->block_heads;
        good = a->kept <= a->width && (uint64_t)a->layers * a->blocks * a->kept <= (1u << 14);
    }
    if (good) {
        size_t blocks = (size_t)a->layers * a->blocks, area = (size_t)a->width * a->width;
        a->size = (uint32_t)blocks * a->kept;
        good = holds(b, blocks * a->width, 4) && holds(b + 1, a->layers, 4) &&
               (!b[2].len || holds(b + 2, blocks * area, 4)) && holds(b + 3, (size_t)a->size * a->size, 4);
    }
    if (!good) {
        size_error();
    } else if (!analysis_runs()) {
        PyErr_SetString(PyExc_LookupError, "this processor has no AVX-512");
    } else {
        a->mean = kept(b), a->scale = kept(b + 1);
        a->block = b[2].len ? packed(b[2].buf, (size_t)a->layers * a->blocks, a->width) : NULL;
        a->stack = a->size ? packed(b[3].buf, 1, a->size) : NULL;
        if (!a->mean || !a->scale || (b[2].len && !a->block) || (a->size && !a->stack))
            PyErr_NoMemory();
        else
            result = PyCapsule_New(a, name, free_capsule);
    }
    release(b, 4);
    if (!result)
        analysis_free(a);
    return result;
}

/* analyse(analysis, (address, dtype, 5 strides in elements, tokens), cos, sin, rows, largest, power) */
static PyObject *analyse(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[5] = {{0}};
    PyObject *capsule;
    unsigned long long address;
    Group g;
    Py_ssize_t s[5];
    if (!PyArg_ParseTuple(args, "O(Ki(nnnnn)I)y*y*w*w*w*", &capsule, &address, &g.dtype, s, s + 1, s + 2, s + 3, s + 4,
                          &g.tokens, b, b + 1, b + 2, b + 3, b + 4))
        return NULL;
    const Analysis *a = PyCapsule_GetPointer(capsule, name);
    int error = OK, good = a && g.tokens && g.tokens < (1u << 24) && g.dtype >= FLOAT32 && g.dtype <= BFLOAT16;
    if (good) {
        size_t angles = (size_t)g.tokens * (a->rotary / 2), rows = (size_t)a->layers * a->blocks * a->width;
        good = holds(b, angles, 4) && holds(b + 1, angles, 4) && holds(b + 2, rows * g.tokens, 4) &&
               holds(b + 3, (size_t)3 * g.tokens, 4) && holds(b + 4, a->kind ? 0 : (size_t)a->layers * g.tokens, 4);
    }
    if (good) {
        g.data = (const char *)(uintptr_t)address, g.cos = b[0].buf, g.sin = b[1].buf;
        for (int i = 0; i < 5; i++)
            g.stride[i] = s[i];
        Analysed out = {b[2].buf, b[3].buf, b[4].buf};
        Py_BEGIN_ALLOW_THREADS
        error = analysis_run(a, &g, &out);
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

static PyObject *runs(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyBool_FromLong(analysis_runs());
}

static PyMethodDef methods[] = {
    {"runs", runs, METH_NOARGS, "Whether this processor can."},
    {"analysis", analysis, METH_VARARGS, "Prepare the matrices of one stack."},
    {"analyse", analyse, METH_VARARGS, "From a tensor to the coefficients of one stack."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kvanalysis", "See kvabr.codec.analysis.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kvanalysis(void) { return PyModule_Create(&module); }
