#include "decode.h"

#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

#include "jpeg.h"

enum { PLACE_NUMBERS = 5 };

/* What one call holds of Python's, so that one place gives it back. */
typedef struct {
    PyObject *images;
    Py_ssize_t num_images, num_views;
    Py_buffer *views;
    Py_buffer places, target, is_done;
    long long height, width, num_channels;
} batch;

static void release(batch *batch) {
    for (Py_ssize_t i = 0; i < batch->num_views; i++) PyBuffer_Release(&batch->views[i]);
    PyMem_Free(batch->views);
    if (batch->places.obj) PyBuffer_Release(&batch->places);
    if (batch->target.obj) PyBuffer_Release(&batch->target);
    if (batch->is_done.obj) PyBuffer_Release(&batch->is_done);
    Py_XDECREF(batch->images);
}

static int get_buffers(batch *batch, PyObject *images, PyObject *places, PyObject *target, PyObject *is_done) {
    batch->images = PySequence_Tuple(images);
    if (!batch->images) return 0;
    batch->num_images = PyTuple_Size(batch->images);
    batch->views = PyMem_Calloc((size_t)batch->num_images + 1, sizeof *batch->views);
    if (!batch->views) return PyErr_NoMemory() != NULL;
    for (; batch->num_views < batch->num_images; batch->num_views++) {
        PyObject *image = PyTuple_GetItem(batch->images, batch->num_views);
        if (PyObject_GetBuffer(image, &batch->views[batch->num_views], PyBUF_SIMPLE)) return 0;
    }
    return PyObject_GetBuffer(places, &batch->places, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0 &&
           PyObject_GetBuffer(target, &batch->target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) == 0 &&
           PyObject_GetBuffer(is_done, &batch->is_done, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) == 0;
}

/* Whether each window lies inside of the images, and what it becomes inside of the target. */
static int is_valid(const batch *batch) {
    Py_ssize_t item_bytes = (Py_ssize_t)sizeof(int64_t);
    if (batch->places.itemsize != item_bytes || batch->places.len != batch->num_images * PLACE_NUMBERS * item_bytes ||
        batch->is_done.len != batch->num_images || batch->height < 1 || batch->height > JPEG_MAX_DIMENSION ||
        batch->width < 1 || batch->width > JPEG_MAX_DIMENSION || (batch->num_channels != 1 && batch->num_channels != 3))
        return 0;
    const int64_t *place = batch->places.buf;
    for (Py_ssize_t i = 0; i < batch->num_images; i++, place += PLACE_NUMBERS) {
        int64_t top = place[0], left = place[1], height = place[2], width = place[3], offset = place[4];
        if (top < 0 || left < 0 || height < 1 || width < 1 || top > batch->height || left > batch->width ||
            height > batch->height - top || width > batch->width - left || offset < 0 || offset > batch->target.len ||
            height * width * batch->num_channels > batch->target.len - offset)
            return 0;
    }
    return 1;
}

static int decode_all(const batch *batch) {
    const int64_t *place = batch->places.buf;
    uint8_t *is_done = batch->is_done.buf;
    for (Py_ssize_t i = 0; i < batch->num_images; i++, place += PLACE_NUMBERS) {
        shrink_request request = {
            .data = batch->views[i].buf,
            .num_bytes = (size_t)batch->views[i].len,
            .height = (size_t)batch->height,
            .width = (size_t)batch->width,
            .scale = 1,
            .top = (size_t)place[0],
            .left = (size_t)place[1],
            .kept_height = (size_t)place[2],
            .kept_width = (size_t)place[3],
            .pixels = (uint8_t *)batch->target.buf + place[4],
            .num_channels = (int)batch->num_channels,
        };
        shrink_outcome outcome = copy_window(&request);
        if (outcome == NO_MEMORY) return 0;
        is_done[i] = outcome == SHRUNK;
    }
    return 1;
}

PyObject *py_decode_jpegs(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *images, *places, *target, *is_done, *result = NULL;
    batch batch = {0};
    if (!PyArg_ParseTuple(arguments, "O(LLL)OOO:decode_jpegs", &images, &batch.height, &batch.width,
                          &batch.num_channels, &places, &target, &is_done))
        return NULL;
    if (get_buffers(&batch, images, places, target, is_done)) {
        if (!is_valid(&batch)) {
            PyErr_SetString(PyExc_ValueError, "windows inside of the images, int64 N x 5, that the target has room for");
        } else {
            int has_memory;
            Py_BEGIN_ALLOW_THREADS;
            has_memory = decode_all(&batch);
            Py_END_ALLOW_THREADS;
            result = has_memory ? Py_NewRef(Py_None) : PyErr_NoMemory();
        }
    }
    release(&batch);
    return result;
}
