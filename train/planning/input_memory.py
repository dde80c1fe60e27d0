"""Computes the memory that a rank's input takes in its host: chunks and decoded batches, also between two epochs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardmill.loader.row_source import ReaderOptions, kept_bytes
from train.strategies import mesh_of

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from train.config import TrainConfig


def input_bytes(config: TrainConfig, dataset: Dataset) -> int:
    """The most that the reader of the rank with most streams keeps. `config`: one with its streams decided."""
    options = ReaderOptions(config.format, config.reading.threads, config.reading.prefetch_bytes)
    image_bytes = math.prod(config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC))
    index, spec = dataset.index("train", config.format), config.plan_spec(dataset)
    return kept_bytes(index, spec, mesh_of(config).most_streams, options, image_bytes)
