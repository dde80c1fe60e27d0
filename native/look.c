#include "look.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"

enum {
    /* So many squares of 4 x 255 fit into 31 bits. */
    MOST_SQUARES = 2048,
    /* So many values of 255 fit into 16 bits. */
    MOST_ROWS = 257,
};

FOR_EACH_INSTRUCTION_SET
static int32_t sum_squares(const uint8_t *restrict above, const uint8_t *restrict here, const uint8_t *restrict below,
                           size_t length) {
    int32_t sum = 0;
    for (size_t i = 0; i < length; i++) {
        const uint8_t *pixel = here + i;
        int16_t laplacian = (int16_t)(above[i] + below[i] + pixel[-1] + pixel[1] - 4 * pixel[0]);
        sum += laplacian * laplacian;
    }
    return sum;
}

static uint64_t sum_squares_of_row(const uint8_t *above, const uint8_t *here, const uint8_t *below, size_t width) {
    size_t last = width - 1;
    int left = above[0] + below[0] + 2 * here[width > 1] - 4 * here[0];
    uint64_t sum = (uint64_t)(left * left);
    if (!last) return sum;
    int right = above[last] + below[last] + 2 * here[last - 1] - 4 * here[last];
    sum += (uint64_t)(right * right);
    for (size_t start = 1; start < last; start += MOST_SQUARES) {
        size_t length = last - start < MOST_SQUARES ? last - start : MOST_SQUARES;
        sum += (uint64_t)sum_squares(above + start, here + start, below + start, length);
    }
    return sum;
}

/* Four neighbours; beyond an edge is the pixel before it. */
static uint64_t sum_laplacian_squares(const uint8_t *luma, size_t height, size_t width) {
    uint64_t sum = 0;
    for (size_t y = 0; y < height; y++) {
        const uint8_t *here = luma + y * width;
        const uint8_t *above = y ? here - width : here + (height > 1) * width;
        const uint8_t *below = y + 1 < height ? here + width : here - (height > 1) * width;
        sum += sum_squares_of_row(above, here, below, width);
    }
    return sum;
}

FOR_EACH_INSTRUCTION_SET
static void add_rows(uint16_t *restrict sums, const uint8_t *restrict bytes, size_t width, size_t num_rows) {
    for (size_t row = 0; row < num_rows; row++, bytes += width)
        for (size_t i = 0; i < width; i++) sums[i] = (uint16_t)(sums[i] + bytes[i]);
}

static void add_blocks(uint32_t *blocks, const uint16_t *sums, size_t num_blocks, size_t block_width) {
    for (size_t block = 0; block < num_blocks; block++, sums += block_width) {
        uint32_t sum = 0;
        for (size_t i = 0; i < block_width; i++) sum += sums[i];
        blocks[block] += sum;
    }
}

/* As cv2.resize rounds with INTER_AREA. */
static uint8_t mean_of(uint32_t sum, size_t block_height, size_t block_width) {
    if (block_height == 2 && block_width == 2) return (uint8_t)((sum + 2) >> 2);
    return (uint8_t)lrintf((float)sum * (1.0F / (float)(block_height * block_width)));
}

/* Blocks of equal size from the upper left corner on; what is left at the other edges does not count. */
typedef struct {
    size_t rows, columns, block_height, block_width;
} block_grid;

/* 0 if memory ran out. */
static int average_blocks(uint8_t *means, const uint8_t *luma, size_t width, block_grid grid) {
    uint16_t *sums = malloc(width * sizeof *sums);
    uint32_t *blocks = malloc(grid.columns * sizeof *blocks);
    int is_done = sums && blocks;
    for (size_t row = 0; is_done && row < grid.rows; row++) {
        memset(blocks, 0, grid.columns * sizeof *blocks);
        for (size_t y = 0; y < grid.block_height; y += MOST_ROWS) {
            size_t left = grid.block_height - y, num_rows = left < MOST_ROWS ? left : MOST_ROWS;
            memset(sums, 0, width * sizeof *sums);
            add_rows(sums, luma, width, num_rows);
            add_blocks(blocks, sums, grid.columns, grid.block_width);
            luma += num_rows * width;
        }
        for (size_t i = 0; i < grid.columns; i++) *means++ = mean_of(blocks[i], grid.block_height, grid.block_width);
    }
    free(sums);
    free(blocks);
    return is_done;
}

/* Pixels of uint8 in C order and at least one of them, or 0 with an exception; to be released if it is 1. */
static int get_plane(PyObject *array, Py_buffer *plane, int flags) {
    if (PyObject_GetBuffer(array, plane, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags)) return 0;
    if (plane->ndim == 2 && plane->itemsize == 1 && plane->len > 0) return 1;
    PyBuffer_Release(plane);
    PyErr_SetString(PyExc_ValueError, "at least one pixel of uint8, of shape H x W");
    return 0;
}

PyObject *py_laplacian_square_sum(PyObject *module, PyObject *luma) {
    (void)module;
    Py_buffer plane;
    if (!get_plane(luma, &plane, 0)) return NULL;
    uint64_t sum;
    Py_BEGIN_ALLOW_THREADS;
    sum = sum_laplacian_squares(plane.buf, (size_t)plane.shape[0], (size_t)plane.shape[1]);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&plane);
    return PyLong_FromUnsignedLongLong(sum);
}

static PyObject *average_into(const Py_buffer *means, const Py_buffer *plane, Py_ssize_t height, Py_ssize_t width) {
    if (height < 1 || width < 1 || height > plane->shape[0] / means->shape[0] ||
        width > plane->shape[1] / means->shape[1]) {
        PyErr_SetString(PyExc_ValueError, "blocks of at least one pixel that lie inside of the image");
        return NULL;
    }
    block_grid grid = {(size_t)means->shape[0], (size_t)means->shape[1], (size_t)height, (size_t)width};
    int is_done;
    Py_BEGIN_ALLOW_THREADS;
    is_done = average_blocks(means->buf, plane->buf, (size_t)plane->shape[1], grid);
    Py_END_ALLOW_THREADS;
    if (!is_done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *py_average_blocks(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *luma, *target, *result = NULL;
    Py_ssize_t height, width;
    Py_buffer plane, means;
    if (!PyArg_ParseTuple(arguments, "OO(nn):average_blocks", &luma, &target, &height, &width)) return NULL;
    if (!get_plane(luma, &plane, 0)) return NULL;
    if (get_plane(target, &means, PyBUF_WRITABLE)) {
        result = average_into(&means, &plane, height, width);
        PyBuffer_Release(&means);
    }
    PyBuffer_Release(&plane);
    return result;
}
