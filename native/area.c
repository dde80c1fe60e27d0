#include "area.h"

#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* The loader takes the variant for this processor; without it (musl, other architectures) there is the baseline. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_INSTRUCTION_SET __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_INSTRUCTION_SET
#endif

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

FOR_EACH_INSTRUCTION_SET
void area_start_row(uint16_t *restrict sums, const uint8_t *restrict bytes, size_t num_lanes, uint16_t weight,
                    size_t num_rows) {
    uint16_t bias = (uint16_t)(num_rows / 2);
    for (size_t lane = 0; lane < num_lanes; lane++)
        sums[lane] = (uint16_t)(bias + multiply_high((uint16_t)(bytes[lane] << 8), weight));
}

FOR_EACH_INSTRUCTION_SET
void area_add_row(uint16_t *restrict sums, const uint8_t *restrict bytes, size_t num_lanes, uint16_t weight) {
    for (size_t lane = 0; lane < num_lanes; lane++)
        sums[lane] = (uint16_t)(sums[lane] + multiply_high((uint16_t)(bytes[lane] << 8), weight));
}

int area_make_columns(area_columns *columns, area_side side) {
    size_t most = 0;
    for (size_t i = 0; i < side.new_length; i++) {
        size_t count = area_end(side, i) - area_first(side, i);
        most = count > most ? count : most;
    }
    columns->num_columns = side.new_length;
    columns->num_pairs = (most + 1) / 2;
    columns->first_lanes = malloc(side.new_length * sizeof *columns->first_lanes);
    columns->biases = malloc(side.new_length * sizeof *columns->biases);
    columns->weights = calloc(side.new_length * columns->num_pairs * PAIR_LANES, sizeof *columns->weights);
    if (!columns->first_lanes || !columns->biases || !columns->weights) return 0;
    for (size_t i = 0; i < side.new_length; i++) {
        size_t first = area_first(side, i), end = area_end(side, i);
        uint16_t *weights = columns->weights + i * columns->num_pairs * PAIR_LANES;
        columns->first_lanes[i] = (uint32_t)(first * PIXEL_LANES);
        /* Half a level to round, and half a unit for each product that is rounded down. */
        columns->biases[i] = (uint16_t)(128 + (end - first) / 2);
        for (size_t k = first; k < end; k++)
            for (size_t lane = 0; lane < PIXEL_LANES; lane++)
                weights[(k - first) * PIXEL_LANES + lane] = area_weight(side, i, k);
    }
    return 1;
}

void area_free_columns(area_columns *columns) {
    free(columns->first_lanes);
    free(columns->biases);
    free(columns->weights);
}

size_t area_padding_lanes(const area_columns *columns) { return columns->num_pairs * PAIR_LANES; }

/* The four bytes of one stored pixel, the first lane lowest. */
static inline uint32_t shrink_pixel(const uint16_t *sums, const uint16_t *weights, size_t num_pairs, uint16_t bias) {
#ifdef __SSE2__
    __m128i both = _mm_setzero_si128();
    for (size_t pair = 0; pair < num_pairs; pair++) {
        __m128i values = _mm_loadu_si128((const __m128i *)(sums + pair * PAIR_LANES));
        __m128i shares = _mm_loadu_si128((const __m128i *)(weights + pair * PAIR_LANES));
        both = _mm_add_epi16(both, _mm_mulhi_epu16(values, shares));
    }
    __m128i total = _mm_add_epi16(_mm_add_epi16(both, _mm_srli_si128(both, 8)), _mm_set1_epi16((short)bias));
    __m128i levels = _mm_srli_epi16(total, 8);
    return (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(levels, levels));
#else
    uint32_t pixel = 0;
    for (size_t lane = 0; lane < PIXEL_LANES; lane++) {
        uint32_t total = bias;
        for (size_t place = lane; place < num_pairs * PAIR_LANES; place += PIXEL_LANES)
            total += multiply_high(sums[place], weights[place]);
        pixel |= (total >> 8) << (8 * lane);
    }
    return pixel;
#endif
}

static inline void shrink_columns(const area_columns *columns, const uint16_t *sums, uint8_t *row, int num_channels,
                                  size_t num_pairs) {
    const uint16_t *weights = columns->weights;
    for (size_t i = 0; i < columns->num_columns; i++) {
        uint32_t pixel = shrink_pixel(sums + columns->first_lanes[i], weights, num_pairs, columns->biases[i]);
        weights += num_pairs * PAIR_LANES;
        for (int channel = 0; channel < num_channels; channel++) *row++ = (uint8_t)(pixel >> (8 * channel));
    }
}

void area_shrink_columns(const area_columns *columns, const uint16_t *sums, uint8_t *row, int num_channels) {
    /* Constants let the compiler unroll what nearly every image needs. */
    if (num_channels == 3 && columns->num_pairs == 2)
        shrink_columns(columns, sums, row, 3, 2);
    else
        shrink_columns(columns, sums, row, num_channels, columns->num_pairs);
}
