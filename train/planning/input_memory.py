"""Computes the memory that a rank's input takes in its host: chunks and decoded batches, also between two epochs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardmill.loader.row_source import ReaderOptions, kept_bytes
from train.contracts.epochs import evaluation_spec
from train.strategies import mesh_of

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec
    from train.config import TrainConfig


def input_bytes(config: TrainConfig, dataset: Dataset) -> int:
    """The most that the readers of the rank with most streams keep: that of the train split, and beside it that of the
    split that is evaluated. `config`: one with its streams decided.
    """
    evaluated = {name for name in ("validation", dataset.manifest.evaluation_split) if name in dataset.manifest.splits}
    sizes = config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC)
    specs = {name: evaluation_spec(dataset, config, name) for name in evaluated if name is not None}
    beside = [_kept_bytes(config, dataset, spec, sizes) for spec in specs.values()]
    return _kept_bytes(config, dataset, config.plan_spec(dataset), sizes) + max(beside, default=0)


def _kept_bytes(config: TrainConfig, dataset: Dataset, spec: PlanSpec, image_shape_HWC: tuple[int, int, int]) -> int:
    options = ReaderOptions(config.format, config.reading.threads, config.reading.prefetch_bytes)
    index, num_streams = dataset.index(spec.split, config.format), mesh_of(config).most_streams
    return kept_bytes(index, spec, num_streams, options, math.prod(image_shape_HWC))
