"""Measures shardmill's loaders in a process of their own, for `loaders.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from loader_peers.common import Job, measure, parse_job

HAND_OVER = os.environ.get("LOADER_HAND_OVER", "numpy")
"""numpy, torch, tensorflow or jax."""
FORMAT = os.environ.get("LOADER_FORMAT", "parquet")

if os.environ.get("LOADER_KERNEL") == "wheels":
    # As if it were not installed: importing it is an ImportError.
    sys.modules["shardmill_native"] = None  # type: ignore[assignment]

from shardmill import open_dataset  # noqa: E402
from shardmill.augment.options import AugmentOptions  # noqa: E402


def main() -> None:
    job = parse_job()
    if not job.convert:
        measure(job, _epochs(job))


def _epochs(job: Job) -> Any:
    dataset = open_dataset(f"{job.dataset}@1")
    augment = AugmentOptions(preset="imagenet" if job.is_cropped else "none", size=job.size)
    reading: dict[str, Any] = {
        "global_batch_size": job.batch_size, "seed": 7, "format": FORMAT, "num_threads": job.num_threads,
        "augment": augment, "rank": 0, "world_size": 1,
    }  # fmt: skip
    if HAND_OVER == "jax":
        del reading["rank"], reading["world_size"]
    make = {
        "numpy": dataset.batches, "torch": dataset.torch_loader, "tensorflow": dataset.tf_dataset,
        "jax": dataset.jax_loader,
    }[HAND_OVER]  # fmt: skip
    loader = make("train", **reading)
    num_rows = dataset.manifest.splits["train"].num_rows

    def epoch(number: int) -> Iterator[Any]:
        left = num_rows
        for batch in loader:
            images = batch[0] if HAND_OVER == "tensorflow" else batch.images
            # Padding is at the end of an epoch alone.
            yield images if left >= len(images) else images[:left]
            left -= len(images)

    return epoch


if __name__ == "__main__":
    main()
