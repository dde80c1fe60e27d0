/* The Python functions that measure what the brightness of an image looks like, with the bits that OpenCV gives. */
#ifndef SHARDMILL_LOOK_H
#define SHARDMILL_LOOK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *py_laplacian_square_sum(PyObject *module, PyObject *luma);
PyObject *py_average_blocks(PyObject *module, PyObject *arguments);

#endif
