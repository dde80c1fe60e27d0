/* The Python function that finds values in the records of a TFRecord chunk. */
#ifndef SHARDMILL_EXAMPLE_H
#define SHARDMILL_EXAMPLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *py_find_values(PyObject *module, PyObject *arguments);

#endif
