/* The Python function that decodes the JPEGs of a batch. */
#ifndef SHARDMILL_DECODE_H
#define SHARDMILL_DECODE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *py_decode_jpegs(PyObject *module, PyObject *arguments);

#endif
