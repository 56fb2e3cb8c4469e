/* The Python module that writes the payloads of token-separable codecs into a cache: one pass that checks, converts and
 * places each number. Private: placing.py checks shapes, sizes and strides. Work is done without the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "placing.h"

/* Fill in a cache from (address, kind, (layers, halves, heads, tokens, dim), strides). */
static int parse_cache(PyObject *from, Cache *c) {
    unsigned long long data;
    Py_ssize_t layers, halves, heads, tokens, dim, step[5];
    if (!PyArg_ParseTuple(from, "KI(nnnnn)(nnnnn)", &data, &c->kind, &layers, &halves, &heads, &tokens, &dim, step, step + 1,
                          step + 2, step + 3, step + 4))
        return 0;
    for (int i = 0; i < 5; i++)
        c->step[i] = step[i];
    if (layers < 1 || halves < 1 || halves > 2 || heads < 1 || tokens < 1 || dim < 1 || dim > MAX_DIM || c->kind > BF16) {
        PyErr_SetString(PyExc_ValueError, "no such cache");
        return 0;
    }
    c->data = (uint8_t *)(uintptr_t)data;
    c->layers = (size_t)layers, c->halves = (size_t)halves, c->heads = (size_t)heads;
    c->tokens = (size_t)tokens, c->dim = (size_t)dim;
    return 1;
}

/* cast(fast, cache, source address, source bytes, source kind, address of the scales or 0, their bytes) -> whether all
 * numbers are finite. Only E4M3 has scales, float32 [layer, K/V, head, dim], 2^8 times those of its numbers. */
static PyObject *cast(PyObject *self, PyObject *args) {
    (void)self;
    Cache c;
    PyObject *cache;
    unsigned long long source, size, scales, scales_size;
    unsigned int kind;
    int fast, good;
    if (!PyArg_ParseTuple(args, "pO!KKIKK", &fast, &PyTuple_Type, &cache, &source, &size, &kind, &scales, &scales_size) ||
        !parse_cache(cache, &c))
        return NULL;
    const size_t row = c.layers * c.halves * c.heads * c.dim;
    if (kind < F16 || kind > E4M3 || size != (kind == E4M3 ? 1 : 2) * row * c.tokens ||
        scales_size != (kind == E4M3 ? 4 * row : 0)) {
        PyErr_SetString(PyExc_ValueError, "the numbers are not as many as the cache holds");
        return NULL;
    }
    const uint8_t *from = (const uint8_t *)(uintptr_t)source;
    const float *scale = (const float *)(uintptr_t)scales;
    Py_BEGIN_ALLOW_THREADS
#ifdef HAVE_X86
    if (fast && fast_here())
        good = cast_avx2(&c, from, kind, scale);
    else
#endif
        good = cast_portable(&c, from, kind, scale);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(good);
}

/* dequantise(fast, cache, source address, source bytes, (form, tokens of a unit, dims of a key, blocks), address and bytes of
 * the offsets and scales of the keys, float32 [2, layer, head, dim], which FP4 does not have) -> whether all scales are
 * finite */
static PyObject *dequantise(PyObject *self, PyObject *args) {
    (void)self;
    Cache c;
    Units u;
    PyObject *cache;
    unsigned long long source, size, head, head_size;
    Py_ssize_t tokens, keys, blocks;
    int fast, good;
    if (!PyArg_ParseTuple(args, "pO!KK(Innn)KK", &fast, &PyTuple_Type, &cache, &source, &size, &u.form, &tokens, &keys,
                          &blocks, &head, &head_size) ||
        !parse_cache(cache, &c))
        return NULL;
    u.tokens = (size_t)tokens, u.keys = (size_t)keys, u.blocks = (size_t)blocks;
    int valid = u.form <= FP4 && tokens > 0 && keys >= 0 && blocks >= 0 && c.tokens % u.tokens == 0 &&
                (c.halves == 2 ? u.keys == c.dim : u.keys <= c.dim);
    if (valid && u.form == FP4)
        valid = !blocks && !head_size;
    else if (valid)
        valid = (values_of(&c, &u) ? blocks && c.heads % u.blocks == 0 : !blocks) &&
                head_size == 8 * c.layers * c.heads * u.keys;
    if (!valid || size != c.tokens / u.tokens * unit_bytes(&c, &u)) {
        PyErr_SetString(PyExc_ValueError, "units that do not belong to the cache");
        return NULL;
    }
    const uint8_t *from = (const uint8_t *)(uintptr_t)source;
    const float *low = (const float *)(uintptr_t)head, *scale = head_size ? low + head_size / 8 : low;
    Py_BEGIN_ALLOW_THREADS
#ifdef HAVE_X86
    if (fast && fast_here())
        good = dequantised_avx2(&c, from, &u, low, scale);
    else
#endif
        good = dequantised_portable(&c, from, &u, low, scale);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(good);
}

static PyMethodDef methods[] = {
    {"cast", cast, METH_VARARGS, "Place floats of 16 or 8 bits."},
    {"dequantise", dequantise, METH_VARARGS, "Dequantise and place units of codes."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kvplace", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kvplace(void) { return PyModule_Create(&module); }
