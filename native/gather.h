/* The Python function that gathers rows of bytes out of several buffers. */
#ifndef SHARDMILL_GATHER_H
#define SHARDMILL_GATHER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *py_copy_slices(PyObject *module, PyObject *arguments);

#endif
