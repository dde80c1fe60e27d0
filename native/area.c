#include "area.h"

#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "dispatch.h"

enum { ONE = 65535, PAIR_LANES = 2 * PIXEL_LANES };

size_t area_first(area_side side, size_t i) { return (uint64_t)i * side.length / side.new_length; }

size_t area_end(area_side side, size_t i) {
    return ((uint64_t)(i + 1) * side.length + side.new_length - 1) / side.new_length;
}

/* What the first `covered` parts of a stored pixel weigh, in units of 1 / `ONE`; a pixel has `new_length` parts. */
static uint64_t weight_up_to(area_side side, uint64_t covered) {
    return (covered * ONE + side.length / 2) / side.length;
}

uint16_t area_weight(area_side side, size_t i, size_t k) {
    uint64_t start = (uint64_t)i * side.length, end = start + side.length;
    uint64_t from = (uint64_t)k * side.new_length, to = from + side.new_length;
    from = from < start ? start : from;
    to = to > end ? end : to;
    return (uint16_t)(weight_up_to(side, to - start) - weight_up_to(side, from - start));
}

/* The high half of a product of 16 bits each: one instruction everywhere. */
static inline uint16_t multiply_high(uint16_t a, uint16_t b) { return (uint16_t)(((uint32_t)a * b) >> 16); }

size_t area_most(area_side side) {
    size_t most = 0;
    for (size_t i = 0; i < side.new_length; i++) {
        size_t count = area_end(side, i) - area_first(side, i);
        most = count > most ? count : most;
    }
    return most;
}

FOR_EACH_INSTRUCTION_SET
void area_start_rows(uint16_t *restrict sums, const uint8_t *restrict first, uint16_t first_weight,
                     const uint8_t *restrict second, uint16_t second_weight, size_t num_lanes, uint16_t bias) {
    for (size_t lane = 0; lane < num_lanes; lane++)
        sums[lane] = (uint16_t)(bias + multiply_high((uint16_t)(first[lane] << 8), first_weight) +
                                multiply_high((uint16_t)(second[lane] << 8), second_weight));
}

FOR_EACH_INSTRUCTION_SET
void area_add_row(uint16_t *restrict sums, const uint8_t *restrict bytes, uint16_t weight, size_t num_lanes) {
    for (size_t lane = 0; lane < num_lanes; lane++)
        sums[lane] = (uint16_t)(sums[lane] + multiply_high((uint16_t)(bytes[lane] << 8), weight));
}

int area_make_columns(area_columns *columns, area_side side) {
    size_t most = area_most(side), num_even = side.new_length + side.new_length % 2;
    columns->num_columns = side.new_length;
    columns->num_pairs = (most + 1) / 2;
    columns->bias = (uint16_t)(128 + area_bias(most)); /* half a level rounds */
    columns->first_lanes = calloc(num_even, sizeof *columns->first_lanes);
    columns->weights = calloc(num_even * columns->num_pairs * PAIR_LANES, sizeof *columns->weights);
    columns->row = calloc(num_even, PIXEL_LANES);
    if (!columns->first_lanes || !columns->weights || !columns->row) return 0;
    for (size_t i = 0; i < side.new_length; i++) {
        size_t first = area_first(side, i), end = area_end(side, i);
        uint16_t *weights = columns->weights + i * columns->num_pairs * PAIR_LANES;
        columns->first_lanes[i] = (uint32_t)(first * PIXEL_LANES);
        for (size_t k = first; k < end; k++)
            for (size_t lane = 0; lane < PIXEL_LANES; lane++)
                weights[(k - first) * PIXEL_LANES + lane] = area_weight(side, i, k);
    }
    return 1;
}

void area_free_columns(area_columns *columns) {
    free(columns->first_lanes);
    free(columns->weights);
    free(columns->row);
}

size_t area_padding_lanes(const area_columns *columns) { return columns->num_pairs * PAIR_LANES; }

/* The bytes of two stored pixels side by side. */
#ifdef __SSE2__
static inline __m128i weighted_pixels(const uint16_t *sums, const uint16_t *weights, size_t num_pairs) {
    __m128i total = _mm_mulhi_epu16(_mm_loadu_si128((const __m128i *)sums), _mm_loadu_si128((const __m128i *)weights));
    for (size_t place = PAIR_LANES; place < num_pairs * PAIR_LANES; place += PAIR_LANES) {
        __m128i values = _mm_loadu_si128((const __m128i *)(sums + place));
        __m128i shares = _mm_loadu_si128((const __m128i *)(weights + place));
        total = _mm_add_epi16(total, _mm_mulhi_epu16(values, shares));
    }
    return total;
}

static inline void shrink_two(uint8_t bytes[PAIR_LANES], const uint16_t *sums, const uint32_t *first_lanes,
                              const uint16_t *weights, size_t num_pairs, uint16_t bias) {
    __m128i first = weighted_pixels(sums + first_lanes[0], weights, num_pairs);
    __m128i second = weighted_pixels(sums + first_lanes[1], weights + num_pairs * PAIR_LANES, num_pairs);
    __m128i total = _mm_add_epi16(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second));
    __m128i levels = _mm_srli_epi16(_mm_add_epi16(total, _mm_set1_epi16((short)bias)), 8);
    _mm_storel_epi64((__m128i *)bytes, _mm_packus_epi16(levels, levels));
}
#else
static inline void shrink_two(uint8_t bytes[PAIR_LANES], const uint16_t *sums, const uint32_t *first_lanes,
                              const uint16_t *weights, size_t num_pairs, uint16_t bias) {
    for (size_t lane = 0; lane < PAIR_LANES; lane++) {
        size_t column = lane / PIXEL_LANES;
        uint32_t total = bias;
        for (size_t place = lane % PIXEL_LANES; place < num_pairs * PAIR_LANES; place += PIXEL_LANES)
            total += multiply_high(sums[first_lanes[column] + place], weights[column * num_pairs * PAIR_LANES + place]);
        bytes[lane] = (uint8_t)(total >> 8);
    }
}
#endif

/* `columns` by value: bytes are stored here, and for all the compiler knows they could change what a pointer leads to. */
static inline void shrink_columns(area_columns columns, const uint16_t *sums, size_t num_channels, size_t num_pairs) {
    const uint16_t *weights = columns.weights;
    uint8_t *end = columns.row;
    for (size_t i = 0; i < columns.num_columns; i += 2) {
        uint8_t bytes[PAIR_LANES];
        shrink_two(bytes, sums, columns.first_lanes + i, weights, num_pairs, columns.bias);
        weights += 2 * num_pairs * PAIR_LANES;
        /* Four bytes are one store; what is too much is overwritten by the next pixel. */
        memcpy(end, bytes, PIXEL_LANES);
        memcpy(end + num_channels, bytes + PIXEL_LANES, PIXEL_LANES);
        end += 2 * num_channels;
    }
}

void area_shrink_columns(const area_columns *columns, const uint16_t *sums, uint8_t *row, size_t num_channels) {
    /* Constants let the compiler unroll what nearly every image needs. */
    if (num_channels == 3 && columns->num_pairs == 2)
        shrink_columns(*columns, sums, 3, 2);
    else
        shrink_columns(*columns, sums, num_channels, columns->num_pairs);
    memcpy(row, columns->row, columns->num_columns * num_channels);
}
