# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "petastorm==0.13.1", "pyspark==3.5.8", "pyarrow==14.0.2", "pandas<3", "setuptools<81",
#     "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<2",
# ]
# ///
"""petastorm's make_batch_reader from shardmill's Parquet shards: two threads, decoded with simplejpeg.

Its batches are row groups, here cut into those of the others; rows within a row group keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from common import Job, measure, parse_job
from petastorm import make_batch_reader
from petastorm.transform import TransformSpec


def main() -> None:
    job = parse_job()
    if job.convert:
        return
    measure(job, lambda number: _epoch(job, number))


def _epoch(job: Job, number: int) -> Iterator[np.ndarray]:
    def decode(frame):
        frame["image"] = [job.image(data) for data in frame["image"]]
        return frame

    shards = sorted((job.dataset / "shards" / "train").glob("*.parquet"))
    spec = TransformSpec(decode, edit_fields=[("image", np.uint8, job.shape_HWC, False)])
    with make_batch_reader(
        [f"file://{shard}" for shard in shards], schema_fields=["image", "label"], transform_spec=spec,
        reader_pool_type="thread", workers_count=job.num_threads, shuffle_row_groups=True, seed=number, num_epochs=1,
    ) as reader:  # fmt: skip
        waiting: list[np.ndarray] = []
        num_waiting = 0
        for group in reader:
            waiting.append(group.image)
            num_waiting += len(group.image)
            while num_waiting >= job.batch_size:
                images_NHWC = np.concatenate(waiting) if len(waiting) > 1 else waiting[0]
                yield images_NHWC[: job.batch_size]
                waiting = [images_NHWC[job.batch_size :]]
                num_waiting -= job.batch_size
        if num_waiting:
            yield np.concatenate(waiting)


if __name__ == "__main__":
    main()
