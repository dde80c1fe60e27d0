"""Measures the limits of `loaders.py`: the same images, in memory before it starts, decoded or copied to batches.

Shape legend: N batch, H height, W width, C channels.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import simplejpeg
from loader_peers.common import Job, list_images, measure, parse_job

from shardmill import open_dataset
from shardmill.augment.draws import Draws
from shardmill.augment.options import AugmentOptions
from shardmill.augment.windows import draw_windows, whole_windows
from shardmill.loader.step_decoder import decode_batch

KERNEL = os.environ.get("LOADER_KERNEL", "native")
_BATCHES_AHEAD = 4

Fill = Callable[[np.ndarray, np.ndarray, int], None]
"""(batch NHWC, numbers of its images, epoch): makes the images of a batch."""


def main() -> None:
    job = parse_job()
    if job.convert:
        return
    stored = [Path(path).read_bytes() for path, _ in list_images(job.images)]
    num_images = len(stored)
    if job.encoding == "raw":
        fill = _copy(stored, job)
    else:
        fill = _decode_native(stored, job) if KERNEL == "native" else _decode_wheels(stored, job)
    measure(job, lambda epoch: _epoch(job, fill, num_images, epoch))


def _epoch(job: Job, fill: Fill, num_images: int, epoch: int) -> Iterator[np.ndarray]:
    """Batches of shuffled images in memory that is used again, made by `num_threads` threads."""
    order = np.random.default_rng(epoch).permutation(num_images)
    ring = _RINGS.setdefault(
        job, [np.zeros((job.batch_size, *job.shape_HWC), np.uint8) for _ in range(_BATCHES_AHEAD + 2)]
    )

    def make(number: int) -> np.ndarray:
        places_N = order[number * job.batch_size : (number + 1) * job.batch_size]
        images_NHWC = ring[number % len(ring)][: len(places_N)]
        fill(images_NHWC, places_N, epoch)
        return images_NHWC

    numbers = range(-(-num_images // job.batch_size))
    if job.num_threads == 1:
        yield from map(make, numbers)
        return
    waiting: deque[Future[np.ndarray]] = deque()
    with ThreadPoolExecutor(job.num_threads) as pool:
        for number in numbers:
            waiting.append(pool.submit(make, number))
            if len(waiting) > _BATCHES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_RINGS: dict[Job, list[np.ndarray]] = {}


def _copy(stored: list[bytes], job: Job) -> Fill:
    pixels_NHWC = np.frombuffer(b"".join(stored), np.uint8).reshape(-1, *job.shape_HWC)
    stored.clear()

    def fill(images_NHWC: np.ndarray, places_N: np.ndarray, epoch: int) -> None:
        # The default mode would copy twice.
        np.take(pixels_NHWC, places_N, axis=0, out=images_NHWC, mode="clip")

    return fill


def _decode_wheels(stored: list[bytes], job: Job) -> Fill:
    def fill(images_NHWC: np.ndarray, places_N: np.ndarray, epoch: int) -> None:
        for image_HWC, place in zip(images_NHWC, places_N.tolist(), strict=True):
            if job.is_cropped:
                image_HWC[...] = job.image(stored[place])
            else:
                simplejpeg.decode_jpeg(stored[place], "RGB", buffer=image_HWC)

    return fill


def _decode_native(stored: list[bytes], job: Job) -> Fill:
    normalize = open_dataset(f"{job.dataset}@1").manifest.normalize
    options, stored_HW = AugmentOptions(preset="imagenet", size=job.size), (job.stored_size, job.stored_size)

    def fill(images_NHWC: np.ndarray, places_N: np.ndarray, epoch: int) -> None:
        windows = whole_windows(len(places_N), stored_HW)
        if job.is_cropped:
            windows = draw_windows(Draws(7, epoch, places_N, np.zeros_like(places_N)), options, stored_HW)
        decode_batch([memoryview(stored[place]) for place in places_N.tolist()], normalize, windows, images_NHWC)

    return fill


if __name__ == "__main__":
    main()
