#include "colours.h"

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

static inline uint8_t level_of(const uint8_t *levels, int32_t light) {
    light = (light + COLOUR_ONE / 2) >> COLOUR_BITS;
    return levels[light < 0 ? 0 : light > COLOUR_ONE ? COLOUR_ONE : light];
}

void convert_colours(uint8_t *pixels, size_t num_pixels, colour_tables tables) {
    const int32_t *reds = tables.linear, *greens = reds + COLOUR_LEVELS, *blues = greens + COLOUR_LEVELS;
    /* By value: bytes are stored here, and for all the compiler knows they could change what a pointer leads to. */
    const int32_t m[] = {tables.matrix[0], tables.matrix[1], tables.matrix[2], tables.matrix[3], tables.matrix[4],
                         tables.matrix[5], tables.matrix[6], tables.matrix[7], tables.matrix[8]};
    for (uint8_t *end = pixels + num_pixels * COLOUR_CHANNELS; pixels < end; pixels += COLOUR_CHANNELS) {
        int32_t red = reds[pixels[0]], green = greens[pixels[1]], blue = blues[pixels[2]];
        pixels[0] = level_of(tables.levels, m[0] * red + m[1] * green + m[2] * blue);
        pixels[1] = level_of(tables.levels, m[3] * red + m[4] * green + m[5] * blue);
        pixels[2] = level_of(tables.levels, m[6] * red + m[7] * green + m[8] * blue);
    }
}
