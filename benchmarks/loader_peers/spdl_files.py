# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "spdl==0.8.0", "spdl-core==0.8.0", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""SPDL: a pipeline of two threads that read and decode files with simplejpeg, a batch in each call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from common import Job, list_images, measure, parse_job
from spdl.pipeline import PipelineBuilder


def main() -> None:
    job = parse_job()
    if job.convert:
        return
    cv2.setNumThreads(1)
    paths = [path for path, _ in list_images(job.images)]

    def epoch(number: int) -> Iterator[np.ndarray]:
        random.Random(number).shuffle(paths)
        batches = [paths[first : first + job.batch_size] for first in range(0, len(paths), job.batch_size)]
        builder = PipelineBuilder().add_source(batches)
        builder = builder.pipe(lambda batch: _load(job, batch), concurrency=job.num_threads, output_order="input")
        pipeline = builder.add_sink(4).build(num_threads=job.num_threads)
        with pipeline.auto_stop():
            yield from pipeline

    measure(job, epoch)


def _load(job: Job, paths: list[str]) -> np.ndarray:
    return job.batch([Path(path).read_bytes() for path in paths])


if __name__ == "__main__":
    main()
