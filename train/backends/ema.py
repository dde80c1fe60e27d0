"""Computes the decay of `train.ema_decay` at each step, for every backend.

An average that is evaluated in place of the last weights: Polyak, Juditsky, 10.1137/0330046.
"""

from __future__ import annotations


def ema_decay_after(num_updates: int, limit: float) -> float:
    """The share of the old average that is kept by the next update of the weights, after so many of them.

    At first less than `limit`, as `tf.train.ExponentialMovingAverage` has it: a training of a few hundred steps would
    else end with an average of its fresh weights.
    """
    return min(limit, (1 + num_updates) / (10 + num_updates))
