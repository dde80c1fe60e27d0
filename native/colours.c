#include "colours.h"

#include <stdlib.h>
#include <string.h>

int colour_tables_are_valid(colour_tables tables) {
    for (size_t i = 0; i < COLOUR_CHANNELS * COLOUR_LEVELS; i++)
        if (tables.linear[i] < 0 || tables.linear[i] > COLOUR_ONE) return 0;
    for (size_t i = 0; i < COLOUR_CHANNELS; i++) {
        int64_t total = 0;
        for (size_t k = 0; k < COLOUR_CHANNELS; k++) {
            int64_t weight = tables.matrix[i * COLOUR_CHANNELS + k];
            total += weight < 0 ? -weight : weight;
        }
        /* times COLOUR_ONE, and half of it to round: below 2^31 */
        if (total >= 1 << 16) return 0;
    }
    return 1;
}

/* Lengthens the levels at both ends by as much as the matrix can lead beyond them. 0 if memory ran out. */
static int make_levels(colour_converter *converter, colour_tables tables) {
    int32_t least = 0, most = COLOUR_ONE;
    for (const int32_t *row = tables.matrix; row < tables.matrix + COLOUR_CHANNELS * COLOUR_CHANNELS;
         row += COLOUR_CHANNELS) {
        int32_t low = 0, high = 0;
        for (size_t k = 0; k < COLOUR_CHANNELS; k++) *(row[k] < 0 ? &low : &high) += row[k];
        least = low < least ? low : least;
        most = high > most ? high : most;
    }
    size_t num_before = (size_t)-least, num_levels = COLOUR_ONE + 1, num_behind = (size_t)(most - COLOUR_ONE);
    converter->memory = malloc(num_before + num_levels + num_behind);
    if (!converter->memory) return 0;
    converter->levels = converter->memory + num_before;
    memset(converter->memory, tables.levels[0], num_before);
    memcpy(converter->memory + num_before, tables.levels, num_levels);
    memset(converter->memory + num_before + num_levels, tables.levels[COLOUR_ONE], num_behind);
    return 1;
}

colour_converter *colour_make(colour_tables tables) {
    colour_converter *converter = aligned_alloc(_Alignof(colour_lights), sizeof *converter);
    if (!converter) return NULL;
    for (size_t k = 0; k < COLOUR_CHANNELS; k++)
        for (size_t level = 0; level < COLOUR_LEVELS; level++) {
            int32_t light = tables.linear[k * COLOUR_LEVELS + level], half = k ? 0 : COLOUR_ONE / 2;
            converter->shares[k][level] = (colour_lights){
                tables.matrix[k] * light + half,
                tables.matrix[COLOUR_CHANNELS + k] * light + half,
                tables.matrix[2 * COLOUR_CHANNELS + k] * light + half,
                0,
            };
        }
    if (make_levels(converter, tables)) return converter;
    free(converter);
    return NULL;
}

void colour_free(colour_converter *converter) {
    if (converter) free(converter->memory);
    free(converter);
}

static inline void convert(const colour_converter *converter, uint8_t *pixels, size_t num_pixels, size_t stride) {
    /* Bytes are stored here, and for all the compiler knows they could change where the levels are. */
    const uint8_t *levels = converter->levels;
    const colour_lights *reds = converter->shares[0], *greens = converter->shares[1], *blues = converter->shares[2];
    for (uint8_t *end = pixels + num_pixels * stride; pixels < end; pixels += stride) {
        colour_lights lights = (reds[pixels[0]] + greens[pixels[1]] + blues[pixels[2]]) >> COLOUR_BITS;
        pixels[0] = levels[lights[0]];
        pixels[1] = levels[lights[1]];
        pixels[2] = levels[lights[2]];
    }
}

void convert_colours(const colour_converter *converter, uint8_t *pixels, size_t num_pixels, size_t stride) {
    if (stride == COLOUR_CHANNELS)
        convert(converter, pixels, num_pixels, COLOUR_CHANNELS);
    else
        convert(converter, pixels, num_pixels, stride);
}
