#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#include "area.h"
#include "colours.h"
#include "decode.h"
#include "example.h"
#include "gather.h"
#include "jpeg.h"
#include "look.h"
#include "sums.h"

/* Numbers the arithmetic: another one may give other pixels. */
#define KERNEL_VERSION "2"
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

static int side_is_valid(size_t start, size_t length, size_t new_length, size_t full_length, unsigned scale) {
    size_t reduced = (full_length + scale - 1) / scale;
    return new_length >= 1 && new_length <= length && length <= MOST_SHRINK * new_length && length <= reduced &&
           start <= reduced - length;
}

static int request_is_valid(const shrink_request *request) {
    unsigned scale = request->scale;
    return (scale == 1 || scale == 2 || scale == 4 || scale == 8) &&
           (request->num_channels == 1 || request->num_channels == 3) && request->height <= JPEG_MAX_DIMENSION &&
           request->width <= JPEG_MAX_DIMENSION &&
           side_is_valid(request->top, request->kept_height, request->new_height, request->height, scale) &&
           side_is_valid(request->left, request->kept_width, request->new_width, request->width, scale);
}

/* The contents of a C-contiguous array of exactly so many items of that size; the buffer is to be released if it is 1. */
static int get_array(PyObject *array, Py_buffer *buffer, Py_ssize_t item_bytes, Py_ssize_t count) {
    if (PyObject_GetBuffer(array, buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return 0;
    if (buffer->itemsize == item_bytes && buffer->len == item_bytes * count) return 1;
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_ValueError, "tables of int32 3 x 256, int32 3 x 3 and uint8 16385");
    return 0;
}

static colour_converter *converter_of_tables(colour_tables tables) {
    if (!colour_tables_are_valid(tables)) {
        PyErr_SetString(PyExc_ValueError, "light from 0 to 1, and rows of the matrix that add up to less than 4");
        return NULL;
    }
    colour_converter *converter = colour_make(tables);
    if (!converter) PyErr_NoMemory();
    return converter;
}

/* Of the arrays `linear`, `matrix` and `levels`; NULL with an exception. */
static colour_converter *converter_of(PyObject *const arrays[3]) {
    Py_buffer linear, matrix, levels;
    colour_converter *converter = NULL;
    if (!get_array(arrays[0], &linear, sizeof(int32_t), COLOUR_CHANNELS * COLOUR_LEVELS)) return NULL;
    if (get_array(arrays[1], &matrix, sizeof(int32_t), COLOUR_CHANNELS * COLOUR_CHANNELS)) {
        if (get_array(arrays[2], &levels, 1, COLOUR_ONE + 1)) {
            converter = converter_of_tables((colour_tables){linear.buf, matrix.buf, levels.buf});
            PyBuffer_Release(&levels);
        }
        PyBuffer_Release(&matrix);
    }
    PyBuffer_Release(&linear);
    return converter;
}

static PyObject *shrink_into(Py_buffer *pixels, shrink_request *request) {
    request->pixels = pixels->buf;
    request->new_height = (size_t)pixels->shape[0];
    request->new_width = (size_t)pixels->shape[1];
    request->num_channels = (int)pixels->shape[2];
    if (!request_is_valid(request)) {
        PyErr_SetString(PyExc_ValueError, "a region inside of the image, shrunk at most 64 times, 1 or 3 channels");
        return NULL;
    }
    shrink_outcome outcome;
    Py_BEGIN_ALLOW_THREADS;
    outcome = shrink_jpeg(request);
    Py_END_ALLOW_THREADS;
    if (outcome == NO_MEMORY) return PyErr_NoMemory();
    return PyBool_FromLong(outcome == SHRUNK);
}

static PyObject *py_shrink_jpeg(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data, pixels;
    PyObject *target, *tables[3] = {Py_None, Py_None, Py_None};
    Py_ssize_t height, width, top, left, kept_height, kept_width;
    int scale;
    if (!PyArg_ParseTuple(arguments, "y*O(nn)i(nnnn)|OOO:shrink_jpeg", &data, &target, &height, &width, &scale, &top,
                          &left, &kept_height, &kept_width, &tables[0], &tables[1], &tables[2]))
        return NULL;
    PyObject *result = NULL;
    colour_converter *colours = tables[0] == Py_None ? NULL : converter_of(tables);
    if ((colours || tables[0] == Py_None) &&
        PyObject_GetBuffer(target, &pixels, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) == 0) {
        int is_image = pixels.ndim == 3 && pixels.itemsize == 1;
        if (!is_image || height < 1 || width < 1 || top < 0 || left < 0 || kept_height < 1 || kept_width < 1) {
            PyErr_SetString(PyExc_ValueError, "pixels of uint8 and shape H x W x C, sizes of at least 1");
        } else {
            shrink_request request = {
                .data = data.buf,
                .num_bytes = (size_t)data.len,
                .height = (size_t)height,
                .width = (size_t)width,
                .scale = (unsigned)scale,
                .top = (size_t)top,
                .left = (size_t)left,
                .kept_height = (size_t)kept_height,
                .kept_width = (size_t)kept_width,
                .colours = colours,
            };
            result = shrink_into(&pixels, &request);
        }
        PyBuffer_Release(&pixels);
    }
    colour_free(colours);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *tuple_of(const uint64_t *numbers, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (!number || PyTuple_SetItem(tuple, i, number)) Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *py_channel_sums(PyObject *module, PyObject *image) {
    (void)module;
    Py_buffer pixels;
    if (PyObject_GetBuffer(image, &pixels, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return NULL;
    PyObject *result = NULL;
    if (pixels.ndim != 3 || pixels.itemsize != 1 || (pixels.shape[2] != 1 && pixels.shape[2] != MOST_CHANNELS)) {
        PyErr_SetString(PyExc_ValueError, "pixels of uint8 and shape H x W x 1 or H x W x 3");
    } else {
        channel_sums sums;
        Py_BEGIN_ALLOW_THREADS;
        sums = sum_channels(pixels.buf, (size_t)pixels.len, (size_t)pixels.shape[2]);
        Py_END_ALLOW_THREADS;
        PyObject *values = tuple_of(sums.values, pixels.shape[2]);
        PyObject *squares = tuple_of(sums.squares, pixels.shape[2]);
        if (values && squares) result = PyTuple_Pack(2, values, squares);
        Py_XDECREF(values);
        Py_XDECREF(squares);
    }
    PyBuffer_Release(&pixels);
    return result;
}

static PyObject *py_convert_colours(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *target, *arrays[3];
    if (!PyArg_ParseTuple(arguments, "OOOO:convert_colours", &target, &arrays[0], &arrays[1], &arrays[2])) return NULL;
    Py_buffer pixels;
    if (PyObject_GetBuffer(target, &pixels, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT)) return NULL;
    colour_converter *converter = NULL;
    if (pixels.ndim != 3 || pixels.itemsize != 1 || pixels.shape[2] != COLOUR_CHANNELS)
        PyErr_SetString(PyExc_ValueError, "pixels of uint8 and shape H x W x 3");
    else if ((converter = converter_of(arrays))) {
        Py_BEGIN_ALLOW_THREADS;
        convert_colours(converter, pixels.buf, (size_t)pixels.len / COLOUR_CHANNELS, COLOUR_CHANNELS);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&pixels);
    if (!converter) return NULL;
    colour_free(converter);
    Py_RETURN_NONE;
}

enum { END_OF_IMAGE = 0xD9, START_OF_SCAN = 0xDA };

static Py_ssize_t find_scan_or_end(const uint8_t *bytes, size_t num_bytes, size_t start) {
    while (start + 1 < num_bytes) {
        const uint8_t *found = memchr(bytes + start, 0xFF, num_bytes - 1 - start);
        if (!found) break;
        if (found[1] == END_OF_IMAGE || found[1] == START_OF_SCAN) return found - bytes;
        start = (size_t)(found - bytes) + 1;
    }
    return -1;
}

static PyObject *py_find_scan_or_end(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data;
    Py_ssize_t start;
    if (!PyArg_ParseTuple(arguments, "y*n:find_scan_or_end", &data, &start)) return NULL;
    PyObject *result = NULL;
    if (start < 0) PyErr_SetString(PyExc_ValueError, "a place of at least 0");
    else result = PyLong_FromSsize_t(find_scan_or_end(data.buf, (size_t)data.len, (size_t)start));
    PyBuffer_Release(&data);
    return result;
}

enum { FIRST_WITH_LENGTH = 0xC0, FIRST_RESTART = 0xD0, HUFFMAN_TABLES = 0xC4, QUANTIZATION = 0xDB, RESTART_INTERVAL = 0xDD };

/* Restart markers and those of an image's start and end stand alone. */
static int has_length(unsigned marker) {
    return marker >= FIRST_WITH_LENGTH && marker < 0xFF && (marker < FIRST_RESTART || marker > END_OF_IMAGE);
}

static int is_table(unsigned marker) {
    return marker == HUFFMAN_TABLES || marker == QUANTIZATION || marker == RESTART_INTERVAL;
}

static int append_segment(PyObject *segments, unsigned marker, size_t start, size_t end) {
    PyObject *segment = Py_BuildValue("(Inn)", marker, (Py_ssize_t)start, (Py_ssize_t)end);
    if (!segment) return 0;
    int is_done = PyList_Append(segments, segment) == 0;
    Py_DECREF(segment);
    return is_done;
}

/* 1 if `segments` has all up to the first scan, 0 if a segment is none or is not plain, -1 with an exception. */
static int find_segments(const uint8_t *bytes, size_t num_bytes, Py_ssize_t most, PyObject *segments) {
    size_t position = 2;
    for (Py_ssize_t i = 0; i < most; i++) {
        size_t start = position + 4;
        if (start > num_bytes) return 0;
        unsigned marker = bytes[position + 1];
        size_t end = position + 2 + ((size_t)bytes[position + 2] << 8 | bytes[position + 3]);
        if (bytes[position] != 0xFF || !has_length(marker) || end < start || end > num_bytes) return 0;
        if (!is_table(marker) && !append_segment(segments, marker, start, end)) return -1;
        if (marker == START_OF_SCAN) return 1;
        position = end;
    }
    return 0;
}

static PyObject *py_find_segments(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(arguments, "y*n:find_segments", &data, &most)) return NULL;
    PyObject *result = PyList_New(0);
    int found = result ? find_segments(data.buf, (size_t)data.len, most, result) : -1;
    PyBuffer_Release(&data);
    if (found == 1) return result;
    Py_XDECREF(result);
    if (found < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"shrink_jpeg", py_shrink_jpeg, METH_VARARGS,
     "shrink_jpeg(data, pixels_HWC, (height, width), scale, (top, left, kept_height, kept_width),\n"
     "            [linear, matrix, levels]) -> bool\n\n"
     "Decodes the JPEG `data` of `height` x `width` pixels at 1 / `scale`, converts its colours as `convert_colours` does\n"
     "if there are tables for it, and shrinks the kept region of the result into `pixels_HWC` (uint8, 1 or 3 channels).\n"
     "False, with any pixels, if libjpeg has an objection to the file or it is neither gray nor YCbCr. Raises\n"
     "MemoryError, and ValueError for a region outside of the image and for other tables."},
    {"decode_jpegs", py_decode_jpegs, METH_VARARGS,
     "decode_jpegs(images, (height, width, channels), places, target, is_done)\n\n"
     "Decodes a window of each JPEG of one size into C-contiguous uint8 pixels. `places` (int64, N x 5) has its top, left,\n"
     "height and width, and where it begins in `target`; `is_done` (uint8, N) becomes 0 for files that libjpeg objects to\n"
     "above the window's end, and for those of another size or other colours, and 1 for the others. The bytes of the files\n"
     "were checked before: nothing below the window is looked at. Raises MemoryError, and ValueError for other places."},
    {"copy_slices", py_copy_slices, METH_VARARGS,
     "copy_slices(sources, slots, starts, stops, target)\n\n"
     "Copies `sources[slots[n]][starts[n]:stops[n]]` to row n of the C-contiguous `target`, which is as long as all rows\n"
     "together. Numbers are int64. Raises ValueError for slices outside of their source or of another length."},
    {"channel_sums", py_channel_sums, METH_O,
     "channel_sums(pixels_HWC) -> (sums, square_sums)\n\n"
     "For each channel of C-contiguous uint8 pixels (1 or 3 channels) the exact sum of its values, and of their squares.\n"
     "Raises ValueError for pixels of another type or shape."},
    {"laplacian_square_sum", py_laplacian_square_sum, METH_O,
     "laplacian_square_sum(luma_HW) -> int\n\n"
     "The sum of the squares of cv2.Laplacian (4 neighbours) of C-contiguous uint8 pixels. Raises ValueError for others."},
    {"average_blocks", py_average_blocks, METH_VARARGS,
     "average_blocks(luma_HW, means_HW, (height, width))\n\n"
     "Writes the means of blocks of `height` x `width` pixels, from the upper left corner on, rounded as by cv2.resize with\n"
     "INTER_AREA. C-contiguous uint8 arrays. Raises MemoryError, and ValueError for other arrays or blocks that do not fit."},
    {"convert_colours", py_convert_colours, METH_VARARGS,
     "convert_colours(pixels_HWC, linear, matrix, levels)\n\n"
     "Converts C-contiguous uint8 pixels of 3 channels in place: `linear` (int32, 3 x 256) gives the light of each level,\n"
     "`matrix` (int32, 3 x 3) that of the other colours, both in units of 2^-14, and `levels` (uint8, 2^14 + 1) its\n"
     "levels. Raises ValueError for arrays of other types or shapes, and for tables that lead out of 32 bits."},
    {"find_values", py_find_values, METH_VARARGS,
     "find_values(data, names) -> bytearray or None\n\n"
     "Where the first value of each named feature lies in the records of a TFRecord chunk, whose bytes were checked\n"
     "before: int64, records x names x 2, its start and end in `data`; of an int64 those of its varint; -1 if there is\n"
     "none. None if that is not whole records of tf.Example."},
    {"find_scan_or_end", py_find_scan_or_end, METH_VARARGS,
     "find_scan_or_end(data, start) -> int\n\n"
     "The place of the first marker from `start` on that begins a scan of a JPEG or ends it; -1 if there is none."},
    {"find_segments", py_find_segments, METH_VARARGS,
     "find_segments(data, most) -> [(marker, start, end), ...] or None\n\n"
     "The payload of each segment of a JPEG up to its first scan's header, but for those of tables. None if one of the\n"
     "first `most` is cut, follows fill bytes or is no segment with a length, or if none of them is a scan's header."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "shardmill_native", "JPEG to a shrunk region in one pass.", 0, methods, NULL, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit_shardmill_native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddStringConstant(module, "KERNEL_ID",
                                             "native-" KERNEL_VERSION "+libjpeg-turbo-" TEXT(LIBJPEG_TURBO_VERSION)) < 0)
        Py_CLEAR(module);
    return module;
}
