/* The Python module that writes the payloads of token-separable codecs into a cache: one pass that checks, converts and
 * places each number. Private: placing.py checks shapes, sizes and strides. Work is done without the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__)
#define HAVE_X86
#include <immintrin.h>
#endif

#define MOST_DIM 4096 /* KVSpec has the same limit */
#define BLOCK 8       /* tokens whose rows are written together: neighbours in most caches */

enum { F32, F16, BF16 };

typedef struct {
    uint8_t *data;
    uint32_t kind;
    size_t layers, heads, tokens, dim;
    Py_ssize_t step[5]; /* strides of [layer, K/V, head, token, dim], in elements */
} Cache;

typedef struct {
    uint32_t bits;
    size_t tokens, blocks; /* tokens of each unit; blocks of heads that share a scale of the values */
} Units;

static inline float number(uint32_t x) {
    float f;
    memcpy(&f, &x, sizeof f);
    return f;
}

static inline uint32_t bits(float f) {
    uint32_t x;
    memcpy(&x, &f, sizeof x);
    return x;
}

static inline uint8_t *row_of(const Cache *c, size_t l, size_t k, size_t h, size_t t) {
    Py_ssize_t at = (Py_ssize_t)l * c->step[0] + (Py_ssize_t)k * c->step[1] + (Py_ssize_t)h * c->step[2] +
                    (Py_ssize_t)t * c->step[3];
    return c->data + at * (c->kind == F32 ? 4 : 2);
}

#define PATH(name) name##_portable
#include "place.h"
#undef PATH

#ifdef HAVE_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define PATH(name) name##_avx2
#define PLACE_F16C
#include "place.h"
#undef PATH
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

static int fast_here(void) {
#ifdef HAVE_X86
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

/* Fill in a cache from (address, kind, (layers, heads, tokens, dim), strides). */
static int parse_cache(PyObject *from, Cache *c) {
    unsigned long long data;
    Py_ssize_t layers, heads, tokens, dim;
    if (!PyArg_ParseTuple(from, "KI(nnnn)(nnnnn)", &data, &c->kind, &layers, &heads, &tokens, &dim, c->step, c->step + 1,
                          c->step + 2, c->step + 3, c->step + 4))
        return 0;
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
