/* Shrinking by exact boxes in 16-bit integers: rows first, as they come; then columns.

   A pixel is four bytes in and four 16-bit sums, in units of 1/256 level, in between. A stored pixel covers
   [i * length / new_length, (i + 1) * length / new_length) of a side; what it takes of each pixel there is a weight in
   units of 1/65535, and the weights of one stored pixel add up to exactly that. Integers only: every instruction set
   gives the same bits. */
#ifndef SHARDMILL_AREA_H
#define SHARDMILL_AREA_H

#include <stddef.h>
#include <stdint.h>

enum {
    PIXEL_LANES = 4,
    /* Beyond it, weights in units of 1/65535 grow coarse and rounding adds up. */
    MOST_SHRINK = 64,
};

/* One side. 0 < new_length <= length <= MOST_SHRINK * new_length. */
typedef struct {
    size_t length, new_length;
} area_side;

/* The pixels that stored pixel `i` covers: [area_first, area_end). */
size_t area_first(area_side side, size_t i);
size_t area_end(area_side side, size_t i);

/* What stored pixel `i` takes of pixel `k`. */
uint16_t area_weight(area_side side, size_t i, size_t k);

/* The most pixels that a stored pixel covers, and half a unit for each of them: products are rounded down. */
size_t area_most(area_side side);
static inline uint16_t area_bias(size_t most) { return (uint16_t)(most / 2); }

/* A row of sums: it starts with the first two rows of bytes, each times its weight, and others are added one by one. */
void area_start_rows(uint16_t *sums, const uint8_t *first, uint16_t first_weight, const uint8_t *second,
                     uint16_t second_weight, size_t num_lanes, uint16_t bias);
void area_add_row(uint16_t *sums, const uint8_t *bytes, uint16_t weight, size_t num_lanes);

/* How the stored columns are made of a row of sums. They come in twos: after an odd number there is one too many. */
typedef struct {
    size_t num_columns, num_pairs;
    uint16_t bias;
    uint32_t *first_lanes;
    /* For each column `num_pairs` times the weights of two neighbouring pixels, once for every lane. */
    uint16_t *weights;
    uint8_t *row;
} area_columns;

/* 0 if memory ran out; to be freed in any case. */
int area_make_columns(area_columns *columns, area_side side);
void area_free_columns(area_columns *columns);

/* Lanes that must follow the last of a row of sums; whatever they hold gets the weight 0. */
size_t area_padding_lanes(const area_columns *columns);

/* One row of stored pixels, `num_channels` bytes each (1: the first lane, 3: all but the last). */
void area_shrink_columns(const area_columns *columns, const uint16_t *sums, uint8_t *row, size_t num_channels);

#endif
