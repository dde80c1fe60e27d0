# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "lancedb==0.40.0", "torch==2.12.1",
#     "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""LanceDB's StreamingDataset: a table on the local disk, rows in a random order, transformed in its two threads.

It reads a batch at once; with its default of 64 rows it is slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import lancedb
import numpy as np
import pyarrow as pa
from common import Job, convert_once, measure, parse_job
from lancedb.streaming import StreamingDataset


def main() -> None:
    job = parse_job()
    if job.convert:
        convert_once(job, lambda folder, images: _write(job, folder, images))
        return
    cv2.setNumThreads(1)
    table = lancedb.connect(str(job.own)).open_table("images")

    def decode(rows: pa.RecordBatch) -> list[tuple[np.ndarray, int]]:
        return list(zip(_images(job, rows["image"]), rows["label"].to_pylist(), strict=True))

    def epoch(number: int) -> Iterator[np.ndarray]:
        # One instance reads one epoch.
        dataset = StreamingDataset(
            table, epoch=number, transform=decode, transform_parallelism=job.num_threads, transform_queue_depth=4,
            read_batch_size=job.batch_size, io_queue_depth=2,
        )  # fmt: skip
        waiting = []
        for image, _ in dataset:
            waiting.append(image)
            if len(waiting) == job.batch_size:
                yield np.stack(waiting)
                waiting.clear()
        if waiting:
            yield np.stack(waiting)

    measure(job, epoch)


def _images(job: Job, column: pa.Array) -> np.ndarray:
    if job.encoding == "raw":
        row_bytes = column.type.byte_width
        pixels = np.frombuffer(column.buffers()[1], np.uint8, len(column) * row_bytes, column.offset * row_bytes)
        return pixels.reshape(-1, *job.shape_HWC)
    return job.batch([memoryview(each.as_buffer()).cast("B") for each in column])


def _write(job: Job, folder: Path, images: list[tuple[str, int]]) -> None:
    width = job.shape_HWC[0] * job.shape_HWC[1] * 3 if job.encoding == "raw" else -1
    schema = pa.schema({"image": pa.binary(width), "label": pa.int64()})
    step = 1_000
    parts = (images[first : first + step] for first in range(0, len(images), step))
    rows = (
        pa.record_batch([[Path(path).read_bytes() for path, _ in part], [label for _, label in part]], schema=schema)
        for part in parts
    )
    lancedb.connect(str(folder)).create_table("images", pa.RecordBatchReader.from_batches(schema, rows))


if __name__ == "__main__":
    main()
