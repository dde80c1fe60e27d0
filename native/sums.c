#include "sums.h"

#include "dispatch.h"

enum {
    /* A lane always meets the same channel: the number of lanes is a multiple of 1 and of 3, and of a register's. */
    LANES = 48,
    /* So many squares of 255 fit into 32 bits. */
    MOST_BLOCKS = 65536,
};

typedef struct {
    uint32_t values[LANES], squares[LANES];
} lane_sums;

FOR_EACH_INSTRUCTION_SET
static void sum_lanes(lane_sums *restrict sums, const uint8_t *restrict bytes, size_t num_blocks) {
    uint32_t values[LANES] = {0}, squares[LANES] = {0};
    for (size_t block = 0; block < num_blocks; block++, bytes += LANES)
        for (size_t lane = 0; lane < LANES; lane++) {
            uint32_t value = bytes[lane];
            values[lane] += value;
            squares[lane] += value * value;
        }
    for (size_t lane = 0; lane < LANES; lane++) {
        sums->values[lane] = values[lane];
        sums->squares[lane] = squares[lane];
    }
}

channel_sums sum_channels(const uint8_t *bytes, size_t num_bytes, size_t num_channels) {
    channel_sums total = {{0}, {0}};
    size_t num_left = num_bytes / LANES;
    while (num_left) {
        size_t num_blocks = num_left < MOST_BLOCKS ? num_left : MOST_BLOCKS;
        lane_sums sums;
        sum_lanes(&sums, bytes, num_blocks);
        for (size_t lane = 0; lane < LANES; lane++) {
            total.values[lane % num_channels] += sums.values[lane];
            total.squares[lane % num_channels] += sums.squares[lane];
        }
        bytes += num_blocks * LANES;
        num_left -= num_blocks;
    }
    for (size_t i = 0; i < num_bytes % LANES; i++) {
        uint64_t value = bytes[i];
        total.values[i % num_channels] += value;
        total.squares[i % num_channels] += value * value;
    }
    return total;
}
