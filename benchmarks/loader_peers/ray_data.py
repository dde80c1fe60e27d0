# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "ray[data]==2.60.0", "aiohttp", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""Ray Data from shardmill's Parquet shards: files and a buffer of rows shuffled, decoded in its iterator's two threads.

Decoding by `map_batches` in its worker processes is slower, because decoded images then pass through its object store
(718 against 874 images/s of 256 px).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

# Its new reader of files takes 40 s and more to list 66 of them, in every epoch.
os.environ["RAY_DATA_USE_DATASOURCE_V2"] = "0"
# Its workers would give way to all other processes of the machine.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112

import cv2
import numpy as np
import ray
from common import SHUFFLE_ROWS, Job, measure, parse_job

OBJECT_STORE_BYTES = 2_000_000_000


def main() -> None:
    job = parse_job()
    if job.convert:
        return
    cv2.setNumThreads(1)
    ray.init(
        num_cpus=job.num_threads, include_dashboard=False, log_to_driver=False, object_store_memory=OBJECT_STORE_BYTES
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    measure(job, lambda number: _epoch(job, number))
    ray.shutdown()


def _epoch(job: Job, number: int) -> Iterator[np.ndarray]:
    def decode(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"image": job.batch(rows["image"]), "label": rows["label"]}

    rows = ray.data.read_parquet(
        str(job.dataset / "shards" / "train"), columns=["image", "label"], file_extensions=["parquet"], shuffle="files"
    )
    batches = rows.iter_batches(
        batch_size=job.batch_size, prefetch_batches=job.num_threads, local_shuffle_buffer_size=SHUFFLE_ROWS,
        local_shuffle_seed=number, _collate_fn=decode,
    )  # fmt: skip
    for batch in batches:
        yield batch["image"]


if __name__ == "__main__":
    main()
