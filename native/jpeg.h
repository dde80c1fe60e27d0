/* A JPEG file to the pixels of one region, shrunk or as they are. */
#ifndef SHARDMILL_JPEG_H
#define SHARDMILL_JPEG_H

#include <stddef.h>
#include <stdint.h>

#include "colours.h"

typedef struct {
    const uint8_t *data;
    size_t num_bytes;
    /* What the caller read in the header and checked against its limits. */
    size_t height, width;
    /* 1, 2, 4 or 8: libjpeg makes one pixel of a block of so many a side. */
    unsigned scale;
    /* The region, in pixels of that scale. */
    size_t top, left, kept_height, kept_width;
    /* What it becomes: rows of `num_channels` (1 or 3) bytes a pixel, one after the other. */
    uint8_t *pixels;
    size_t new_height, new_width;
    int num_channels;
    /* By which each pixel is converted before it is averaged with others; NULL: as they are. A window never is. */
    const colour_converter *colours;
} shrink_request;

typedef enum { SHRUNK, DECLINED, NO_MEMORY } shrink_outcome;

/* Reads and checks the whole file. DECLINED for every error and warning of libjpeg, and for other files than gray or
   YCbCr of the given size with as many components as channels: `pixels` then holds anything. */
shrink_outcome shrink_jpeg(const shrink_request *request);

/* The region as it is, of a file whose bytes were checked before: what lies below it is not looked at. `scale` is 1; the
   new size is not used. */
shrink_outcome copy_window(const shrink_request *request);

#endif
