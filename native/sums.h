/* Exact sums of the values of each channel, and of their squares. */
#ifndef SHARDMILL_SUMS_H
#define SHARDMILL_SUMS_H

#include <stddef.h>
#include <stdint.h>

enum { MOST_CHANNELS = 3 };

typedef struct {
    uint64_t values[MOST_CHANNELS], squares[MOST_CHANNELS];
} channel_sums;

/* `bytes` holds whole pixels of 1 or 3 channels, one after the other. */
channel_sums sum_channels(const uint8_t *bytes, size_t num_bytes, size_t num_channels);

#endif
