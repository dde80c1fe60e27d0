/* Colours of a profile of three curves and a matrix to sRGB, in fixed point with COLOUR_BITS bits behind the point. */
#ifndef SHARDMILL_COLOURS_H
#define SHARDMILL_COLOURS_H

#include <stddef.h>
#include <stdint.h>

enum { COLOUR_BITS = 14, COLOUR_ONE = 1 << COLOUR_BITS, COLOUR_CHANNELS = 3, COLOUR_LEVELS = 256 };

typedef struct {
    const int32_t *linear; /* COLOUR_CHANNELS x COLOUR_LEVELS: light for each level */
    const int32_t *matrix; /* COLOUR_CHANNELS x COLOUR_CHANNELS */
    const uint8_t *levels; /* COLOUR_ONE + 1: level for each amount of light */
} colour_tables;

/* Whether no colour leads out of 32 bits. */
int colour_tables_are_valid(colour_tables tables);

/* In place. */
void convert_colours(uint8_t *pixels, size_t num_pixels, colour_tables tables);

#endif
