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

import cv2
import numpy as np
import simplejpeg
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
    images_NHWC = np.empty((len(paths), *job.shape_HWC), np.uint8)
    for image_HWC, path in zip(images_NHWC, paths, strict=True):
        with open(path, "rb") as file:
            data = file.read()
        if job.is_cropped:
            image_HWC[...] = job.image(data)
        else:
            simplejpeg.decode_jpeg(data, "RGB", buffer=image_HWC)
    return images_NHWC


if __name__ == "__main__":
    main()
