"""Rules of a step that are the same in every framework: microbatches, averages, and weights that decay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from shardmill.values import Batch


def microbatches_of(batch: Batch, num_microbatches: int) -> Iterator[Batch]:
    """Divide into at most `num_microbatches` of consecutive rows, not copied; their sizes differ by at most one."""
    num_rows = len(batch.labels_N)
    num_microbatches = min(num_microbatches, num_rows)
    for number in range(num_microbatches):
        rows = slice(number * num_rows // num_microbatches, (number + 1) * num_rows // num_microbatches)
        yield replace(
            batch,
            images_NHWC=batch.images_NHWC[rows],
            labels_N=batch.labels_N[rows],
            weights_N=batch.weights_N[rows],
            sample_ids_N=batch.sample_ids_N[rows],
            extra={name: values[rows] for name, values in batch.extra.items()},
        )


def ema_decay_after(num_updates: int, limit: float) -> float:
    """The share of the old average (Polyak and Juditsky, 10.1137/0330046) that the next update keeps, after so many.

    At first less than `limit`, as `tf.train.ExponentialMovingAverage` has it: a training of a few hundred steps would
    else end with an average of its fresh weights.
    """
    return min(limit, (1 + num_updates) / (10 + num_updates))


_BIAS = re.compile(r"(^|_)bias(_|$)")
"""Biases may have any number of axes: attention has one for each head, and `vit` one for each position."""
_POSITION_OR_TOKEN = re.compile(r"pos(ition(al)?)?_?(emb|enc)|(cls|class|dist|mask|register)_?token")
_SCALES_OF_NORMS = ("gamma", "beta")


def is_decayed(name: str, num_axes: int, owner: str = "") -> bool:
    """False for biases, scales and offsets of norms, and embeddings of positions and tokens.

    `name`: as the framework has it, `block/dense/kernel` or `block.dense.weight`. `owner`: the class of its module, if
    the framework tells.
    """
    *_, last = re.split(r"[./]", name)
    of_norm = last in _SCALES_OF_NORMS or "norm" in owner.lower()
    return not (num_axes <= 1 or of_norm or _BIAS.search(last) or _POSITION_OR_TOKEN.search(name.lower()))
