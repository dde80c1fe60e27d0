"""A rank's batch cut into parts: gradients are accumulated over them, or the weights change after each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardmill.values import Batch


def parts_of(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Consecutive rows without copying them, in at most `num_parts` parts whose sizes differ by at most one."""
    num_rows = len(batch.labels_N)
    num_parts = min(num_parts, num_rows)
    for number in range(num_parts):
        rows = slice(number * num_rows // num_parts, (number + 1) * num_rows // num_parts)
        yield replace(
            batch,
            images_NHWC=batch.images_NHWC[rows],
            labels_N=batch.labels_N[rows],
            weights_N=batch.weights_N[rows],
            sample_ids_N=batch.sample_ids_N[rows],
            extra={name: values[rows] for name, values in batch.extra.items()},
        )
