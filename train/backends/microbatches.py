"""Divides a rank's batch into microbatches: gradients are accumulated over them, or weights change after each."""

from __future__ import annotations

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
