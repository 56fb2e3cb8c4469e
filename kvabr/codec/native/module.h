/* What the files of the Python module share. */
#ifndef KVABR_MODULE_H
#define KVABR_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kvcoder.h"

/* Names of the capsules. */
#define DEPTH_NAME "kvabr.Depth"
#define TRANSFORM_NAME "kvabr.Transform"

/* A path that this processor can run; NULL with an exception otherwise. */
const Path *path_named(const char *name);

/* The functions that make capsules, and the means of a transform. */
PyObject *depth(PyObject *self, PyObject *args);
PyObject *transform(PyObject *self, PyObject *args);
float *padded_means(const Transform *t, const Py_buffer *mean);

/* Whether a buffer has room for count items of a size. */
static inline int holds(const Py_buffer *b, size_t count, size_t size) {
    if (size && count > (size_t)PY_SSIZE_T_MAX / size)
        return 0;
    return (size_t)b->len == count * size;
}

static inline void release(Py_buffer *buffers, int n) {
    for (int i = 0; i < n; i++)
        if (buffers[i].obj)
            PyBuffer_Release(buffers + i);
}

static inline PyObject *size_error(void) {
    PyErr_SetString(PyExc_TypeError, "a buffer has not the size that it should have");
    return NULL;
}

#endif
