/* The Python module that writes the payloads of token-separable codecs into a cache: one pass that checks, converts and
 * places each number. Private: placing.py checks shapes, sizes and strides. Work is done without the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "placing.h"

/* Fill in a cache from (address, kind, (layers, heads, tokens, dim), strides). */
static int parse_cache(PyObject *from, Cache *c) {
    unsigned long long data;
    Py_ssize_t layers, heads, tokens, dim, step[5];
    if (!PyArg_ParseTuple(from, "KI(nnnn)(nnnnn)", &data, &c->kind, &layers, &heads, &tokens, &dim, step, step + 1, step + 2,
                          step + 3, step + 4))
        return 0;
    for (int i = 0; i < 5; i++)
        c->step[i] = step[i];
    if (layers < 1 || heads < 1 || tokens < 1 || dim < 1 || dim > MOST_DIM || c->kind > BF16) {
        PyErr_SetString(PyExc_ValueError, "no such cache");
        return 0;
    }
    c->data = (uint8_t *)(uintptr_t)data;
    c->layers = (size_t)layers, c->heads = (size_t)heads, c->tokens = (size_t)tokens, c->dim = (size_t)dim;
    return 1;
}

/* cast(fast, cache, source address, source bytes, source kind) -> whether all numbers are finite */
static PyObject *cast(PyObject *self, PyObject *args) {
    (void)self;
    Cache c;
    PyObject *cache;
    unsigned long long source, size;
    unsigned int kind;
    int fast, good;
    if (!PyArg_ParseTuple(args, "pO!KKI", &fast, &PyTuple_Type, &cache, &source, &size, &kind) || !parse_cache(cache, &c))
        return NULL;
    if (size != 4 * c.layers * c.heads * c.tokens * c.dim || (kind != F16 && kind != BF16)) {
        PyErr_SetString(PyExc_ValueError, "the numbers are not as many as the cache holds");
        return NULL;
    }
    const uint8_t *from = (const uint8_t *)(uintptr_t)source;
    Py_BEGIN_ALLOW_THREADS
#ifdef HAVE_X86
    if (fast && fast_here())
        good = cast_avx2(&c, from, kind);
    else
#endif
        good = cast_portable(&c, from, kind);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(good);
}

/* affine(fast, cache, source address, source bytes, (bits, tokens of a unit, blocks), offsets and scales of the keys as
 * float32, [2, layer, head, dim]) -> whether all scales of the values are finite */
static PyObject *affine(PyObject *self, PyObject *args) {
    (void)self;
    Cache c;
    Units u;
    PyObject *cache;
    unsigned long long source, size, head, head_size;
    Py_ssize_t tokens, blocks;
    int fast, good;
    if (!PyArg_ParseTuple(args, "pO!KK(Inn)KK", &fast, &PyTuple_Type, &cache, &source, &size, &u.bits, &tokens, &blocks,
                          &head, &head_size) ||
        !parse_cache(cache, &c))
        return NULL;
    const size_t channels = c.layers * c.heads * c.dim;
    if ((u.bits != 4 && u.bits != 8) || tokens < 1 || blocks < 1 || c.heads % (size_t)blocks || c.tokens % (size_t)tokens ||
        head_size != 8 * channels ||
        size != c.tokens / (size_t)tokens * 4 * c.layers * (size_t)blocks + c.tokens * channels * u.bits / 4) {
        PyErr_SetString(PyExc_ValueError, "units that do not belong to the cache");
        return NULL;
    }
    u.tokens = (size_t)tokens, u.blocks = (size_t)blocks;
    const uint8_t *from = (const uint8_t *)(uintptr_t)source;
    const float *low = (const float *)(uintptr_t)head;
    Py_BEGIN_ALLOW_THREADS
#ifdef HAVE_X86
    if (fast && fast_here())
        good = affine_avx2(&c, from, &u, low, low + channels);
    else
#endif
        good = affine_portable(&c, from, &u, low, low + channels);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(good);
}

static PyMethodDef methods[] = {
    {"cast", cast, METH_VARARGS, "Place 16-bit floats."},
    {"affine", affine, METH_VARARGS, "Dequantise and place integers."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kvplace", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kvplace(void) { return PyModule_Create(&module); }
