#include "gather.h"

#include <stdint.h>
#include <string.h>

/* What one call holds of Python's, so that one place gives it back. */
typedef struct {
    PyObject *sources;
    Py_ssize_t num_sources, num_views, num_rows, row_bytes;
    Py_buffer *views;
    /* Of each row: which source, and where it begins and ends there. */
    Py_buffer slots, starts, stops, target;
} gather;

static void release(gather *gather) {
    for (Py_ssize_t i = 0; i < gather->num_views; i++) PyBuffer_Release(&gather->views[i]);
    PyMem_Free(gather->views);
    Py_buffer *arrays[] = {&gather->slots, &gather->starts, &gather->stops, &gather->target};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        if (arrays[i]->obj) PyBuffer_Release(arrays[i]);
    Py_XDECREF(gather->sources);
}

static int get_buffers(gather *gather, PyObject *sources, PyObject *const numbers[3], PyObject *target) {
    gather->sources = PySequence_Tuple(sources);
    if (!gather->sources) return 0;
    gather->num_sources = PyTuple_Size(gather->sources);
    gather->views = PyMem_Calloc((size_t)gather->num_sources + 1, sizeof *gather->views);
    if (!gather->views) return PyErr_NoMemory() != NULL;
    for (; gather->num_views < gather->num_sources; gather->num_views++) {
        PyObject *source = PyTuple_GetItem(gather->sources, gather->num_views);
        if (PyObject_GetBuffer(source, &gather->views[gather->num_views], PyBUF_SIMPLE)) return 0;
    }
    return PyObject_GetBuffer(numbers[0], &gather->slots, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0 &&
           PyObject_GetBuffer(numbers[1], &gather->starts, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0 &&
           PyObject_GetBuffer(numbers[2], &gather->stops, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0 &&
           PyObject_GetBuffer(target, &gather->target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) == 0;
}

/* Whether each row lies inside of its source, and is as long as its part of the target. */
static int is_valid(gather *gather) {
    Py_ssize_t item_bytes = (Py_ssize_t)sizeof(int64_t);
    gather->num_rows = gather->slots.len / item_bytes;
    if (gather->slots.itemsize != item_bytes || gather->starts.itemsize != item_bytes ||
        gather->stops.itemsize != item_bytes || gather->starts.len != gather->slots.len ||
        gather->stops.len != gather->slots.len || gather->num_rows < 1 || gather->target.len % gather->num_rows)
        return 0;
    gather->row_bytes = gather->target.len / gather->num_rows;
    const int64_t *slots = gather->slots.buf, *starts = gather->starts.buf, *stops = gather->stops.buf;
    for (Py_ssize_t i = 0; i < gather->num_rows; i++) {
        if (slots[i] < 0 || slots[i] >= gather->num_sources || starts[i] < 0 ||
            stops[i] > gather->views[slots[i]].len || starts[i] > stops[i] || stops[i] - starts[i] != gather->row_bytes)
            return 0;
    }
    return 1;
}

static void copy_rows(const gather *gather) {
    const int64_t *slots = gather->slots.buf, *starts = gather->starts.buf;
    uint8_t *target = gather->target.buf;
    for (Py_ssize_t i = 0; i < gather->num_rows; i++, target += gather->row_bytes)
        memcpy(target, (const uint8_t *)gather->views[slots[i]].buf + starts[i], (size_t)gather->row_bytes);
}

PyObject *py_copy_slices(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *sources, *numbers[3], *target, *result = NULL;
    gather gather = {0};
    if (!PyArg_ParseTuple(arguments, "OOOOO:copy_slices", &sources, &numbers[0], &numbers[1], &numbers[2], &target))
        return NULL;
    if (get_buffers(&gather, sources, numbers, target)) {
        if (!is_valid(&gather)) {
            PyErr_SetString(PyExc_ValueError, "slices inside of their sources, int64, as long as a row of the target");
        } else {
            Py_BEGIN_ALLOW_THREADS;
            copy_rows(&gather);
            Py_END_ALLOW_THREADS;
            result = Py_NewRef(Py_None);
        }
    }
    release(&gather);
    return result;
}
