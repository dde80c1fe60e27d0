"""What epochs and evaluations read their rows from: shardmill's own reader, by the section `train`."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from shardmill.dataset.chunk_cache import CacheOptions, open_cache
from shardmill.loader.row_source import ReaderOptions, RowOptions, RowSource

if TYPE_CHECKING:
    from shardmill.augment.options import AugmentOptions
    from shardmill.dataset.chunk_cache import ChunkCache
    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec
    from train.config import TrainConfig


def reader_options(config: TrainConfig, dataset: Dataset, spec: PlanSpec) -> ReaderOptions:
    """Return the options of shardmill's own reader, for an epoch of `spec`, from the section `train`.

    Raises as `open_cache` does.
    """
    cache = None
    if config.cache.dir:
        # Once for each split: a cache knows what it counted, and looks at all of its files when it is opened.
        known, key = _caches_of(os.getpid()), (dataset.pin, spec.split, config.format, config.cache)
        if key not in known:
            named = ("train.cache.dir", "train.cache.limit_bytes")
            options = CacheOptions(config.cache.dir, config.cache.limit_bytes or None, named)
            known[key] = open_cache(dataset, spec, config.format, options)
        cache = known[key]
    return ReaderOptions(config.format, config.reading.threads, config.reading.prefetch_bytes, (cache,))


def row_source(
    config: TrainConfig, dataset: Dataset, spec: PlanSpec, streams: range, augment: AugmentOptions | None = None
) -> RowSource:
    """Return what all epochs of `spec` read their rows from, for a member with these streams; its memory is that of one
    epoch. `augment`: that of training by default. Raises as `open_cache` does.
    """
    options = reader_options(config, dataset, spec)
    return RowSource(
        dataset, spec, streams, options=options, rows=RowOptions(augment or config.augmentation, columns=())
    )


@functools.cache
def _caches_of(pid: int) -> dict[tuple[object, ...], ChunkCache | None]:
    """Those of this process."""
    return {}


def evaluation_spec(dataset: Dataset, config: TrainConfig, split: str) -> PlanSpec:
    """Of passes over `split` in stored order, in the same streams as a training has."""
    return dataset.plan_spec(
        split,
        seed=0,
        global_batch_size=config.global_batch_size,
        num_streams=config.num_streams,
        window_bytes=config.reading.window_budget_bytes // config.num_streams,
        shuffle=False,
    )
