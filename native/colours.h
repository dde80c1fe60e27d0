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

typedef int32_t colour_lights __attribute__((vector_size(16)));

/* The tables multiplied out: each level's share of the three lights (and a fourth, of nothing), and the level of any sum
   of them, so that nothing is left to compare. */
typedef struct {
    colour_lights shares[COLOUR_CHANNELS][COLOUR_LEVELS];
    uint8_t *memory;
    const uint8_t *levels; /* at 0; sums of shares may be less */
} colour_converter;

/* Of valid tables; NULL if memory ran out. */
colour_converter *colour_make(colour_tables tables);
void colour_free(colour_converter *converter);

/* In place; a pixel begins every `stride` (3 or 4) bytes. */
void convert_colours(const colour_converter *converter, uint8_t *pixels, size_t num_pixels, size_t stride);

#endif
