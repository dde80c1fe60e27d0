"""Opens the cache that a loader asks for, and refuses one that cannot help, before anything is read."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardmill.dataset.chunk_cache import ChunkCache, open_quota
from shardmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Where chunks of remote datasets are kept, and how many bytes of them."""

    folder: str
    limit_bytes: int | None = None
    """Of all datasets and processes together; by default half of what the disk has free when a loader is made."""
    named: tuple[str, str] = ("cache_dir", "cache_limit_bytes")
    """The two settings, for messages."""


def open_cache(dataset: Dataset, spec: PlanSpec, format: str, options: CacheOptions) -> ChunkCache | None:
    """The cache for a reader of this plan; None, with a warning, for a dataset in a local folder.

    Raises UsageError for a limit that one window does not fit into, StorageError for a disk that cannot hold it.
    """
    [cache] = _open((dataset,), spec, format, options)
    return cache


def open_caches(
    datasets: Sequence[Dataset], spec: PlanSpec, format: str, folder: str | Path | None, limit_bytes: int | None
) -> tuple[ChunkCache | None, ...]:
    """The cache of each of a loader's datasets, as `open_cache` opens one. No folder: no caches."""
    if folder is None:
        if limit_bytes is not None:
            raise UsageError(
                f"cache_limit_bytes = {limit_bytes} without cache_dir", "expected the folder of the cache", "give both"
            )
        return (None,) * len(datasets)
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise UsageError(f"cache_dir = {folder!r}", "expected a folder on a local disk", "omit it for no cache")
    return _open(datasets, spec, format, CacheOptions(str(folder), limit_bytes))


def _open(
    datasets: Sequence[Dataset], spec: PlanSpec, format: str, options: CacheOptions
) -> tuple[ChunkCache | None, ...]:
    """The remote ones share the folder and its limit, because windows of a mix hold chunks of all."""
    folder, limit = options.named
    check_folder(options.folder, folder)
    remote = list({dataset.pin: dataset for dataset in datasets if dataset.store.local_root is None}.values())
    for dataset in datasets:
        if dataset.store.local_root is not None:
            warnings.warn(
                f"{folder} = {options.folder!r} is not used: {dataset.pin.uri} is a folder of this machine already",
                RuntimeWarning,
                stacklevel=3,
            )
    if not remote:
        return (None,) * len(datasets)
    if options.limit_bytes is not None:
        check_limit(remote, spec, format, options.limit_bytes, limit)
    split_bytes = sum(int(dataset.index(spec.split, format).stored_bytes.sum()) for dataset in remote)
    quota = open_quota(options.folder, options.limit_bytes, split_bytes, named=folder)
    if options.limit_bytes is None:
        check_limit(remote, spec, format, quota.limit_bytes, f"{limit} (half of what the disk has free)")
    return tuple(
        ChunkCache(quota, dataset.store.uri) if dataset.store.local_root is None else None for dataset in datasets
    )


def check_folder(folder: str, named: str) -> None:
    """Raises UsageError for a URI."""
    if "://" in folder:
        raise UsageError(
            f"{named} = {folder!r}", "expected a folder on a local disk", "name one, or omit it for no cache"
        )


def check_limit(
    datasets: Sequence[Dataset], spec: PlanSpec, format: str, limit_bytes: int, named: str = "limit"
) -> None:
    """Raise UsageError for a limit below one shuffle window: each chunk would be evicted before it is used again."""
    sizes = np.concatenate([dataset.index(spec.split, format).stored_bytes for dataset in datasets])
    largest = int(sizes.max())
    needed = min(spec.window_chunks * spec.num_streams * largest, int(sizes.sum()))
    if limit_bytes < needed:
        raise UsageError(
            f"{named} = {limit_bytes}",
            f"expected at least {needed} bytes, one shuffle window of {spec.split!r}: {spec.num_streams} streams x "
            f"{spec.window_chunks} chunk(s) of up to {largest} bytes, or all of the split"
            + (f" of {len(datasets)} datasets" if len(datasets) > 1 else ""),
            f"set it to {needed} or more, or read without a cache",
        )
