# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "nvidia-dali-cuda120==2.4.0", "numpy<3",
# ]
# ///
"""DALI on the CPU: files, its own decoder, its fused random crop and decode, two threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from common import MAX_ASPECT, MIN_CROP_AREA, TRIES, Job, list_images, measure, parse_job
from nvidia.dali import Pipeline, fn


def main() -> None:
    job = parse_job()
    if job.convert:
        return
    pipeline = Pipeline(job.batch_size, job.num_threads, None, prefetch_queue_depth=4)
    with pipeline:
        pipeline.set_outputs(*_images(job))
    pipeline.build()
    num_images = len(list_images(job.images))

    def epoch(number: int) -> Iterator[np.ndarray]:
        # The last batch is filled up from the next epoch: those images are counted once, here.
        for first in range(0, num_images, job.batch_size):
            images, _ = pipeline.run()
            yield np.asarray(images.as_tensor())[: num_images - first]

    measure(job, epoch)


def _images(job: Job):
    data, labels = fn.readers.file(file_root=str(job.images), random_shuffle=True, name="files")
    if not job.is_cropped:
        return fn.decoders.image(data, device="cpu"), labels
    images = fn.decoders.image_random_crop(
        data, device="cpu", random_area=(MIN_CROP_AREA, 1.0), random_aspect_ratio=(1 / MAX_ASPECT, MAX_ASPECT),
        num_attempts=TRIES,
    )  # fmt: skip
    images = fn.resize(images, size=(job.size, job.size), antialias=False)
    return fn.flip(images, horizontal=fn.random.coin_flip()), labels


if __name__ == "__main__":
    main()
