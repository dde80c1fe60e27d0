"""What the loaders of `loaders.py` share: their job, its images, the random crop, and how a loader is measured.

It needs NumPy alone; simplejpeg and OpenCV where a peer has no decoder of its own. Shape legend: N batch, H height,
W width, C channels.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIN_CROP_AREA, MAX_ASPECT, TRIES = 0.08, 4 / 3, 10
"""Of the random resized crop: torchvision's, and of shardmill's preset `imagenet`."""
SHUFFLE_ROWS = 2_000
"""Encoded rows in the shuffle buffer of a peer that has one."""


@dataclass(frozen=True)
class Job:
    """The same for every loader: shuffled uint8 batches of the same stored images, epoch after epoch."""

    stored_size: int
    size: int
    """Smaller than stored: a random resized crop of this size, and a flip."""
    encoding: str
    """`jpeg` or `raw`."""
    images: Path
    """One folder per class, each with files that hold what the dataset stores."""
    dataset: Path
    own: Path
    """Where a peer keeps the images in its own format."""
    num_threads: int
    batch_size: int
    epochs: int
    seconds: float
    convert: bool

    @property
    def is_cropped(self) -> bool:
        return self.size != self.stored_size

    @property
    def shape_HWC(self) -> tuple[int, int, int]:
        return (self.size, self.size, 3)

    def image(self, data: bytes | memoryview) -> np.ndarray:
        """Decode a stored image with the wheels that are the fastest for it."""
        if self.encoding == "raw":
            return np.frombuffer(data, np.uint8).reshape(self.shape_HWC)
        import simplejpeg

        pixels_HWC = simplejpeg.decode_jpeg(data, "RGB")
        return random_crop(pixels_HWC, self.size) if self.is_cropped else pixels_HWC

    def batch(self, stored: Sequence[bytes | memoryview]) -> np.ndarray:
        """The same for many at once, for peers that hand over the stored images of a batch."""
        if self.encoding == "raw":
            return np.frombuffer(b"".join(stored), np.uint8).reshape(-1, *self.shape_HWC)
        import simplejpeg

        images_NHWC = np.empty((len(stored), *self.shape_HWC), np.uint8)
        for image_HWC, data in zip(images_NHWC, stored, strict=True):
            if self.is_cropped:
                image_HWC[...] = self.image(data)
            else:
                simplejpeg.decode_jpeg(data, "RGB", buffer=image_HWC)
        return images_NHWC


def parse_job() -> Job:
    parser = argparse.ArgumentParser()
    for name in ("--stored-size", "--size", "--num-threads", "--batch-size", "--epochs"):
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--encoding", required=True, choices=("jpeg", "raw"))
    for name in ("--images", "--dataset", "--own"):
        parser.add_argument(name, required=True, type=Path)
    parser.add_argument("--seconds", required=True, type=float)
    parser.add_argument("--convert", action="store_true", help="only write the images in the peer's own format")
    # Worker processes that a peer starts import this module, too.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    return Job(**vars(parser.parse_args()))


def random_crop(pixels_HWC: np.ndarray, size: int) -> np.ndarray:
    """A random rectangle, resized to a square by the fastest filter, and mirrored in half of the cases."""
    import cv2

    side = pixels_HWC.shape[0]
    height = width = side
    for _ in range(TRIES):
        area = side * side * random.uniform(MIN_CROP_AREA, 1)
        aspect = math.exp(random.uniform(-math.log(MAX_ASPECT), math.log(MAX_ASPECT)))
        height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if height <= side and width <= side:
            break
    else:
        height = width = side
    top, left = random.randint(0, side - height), random.randint(0, side - width)
    window_HWC = pixels_HWC[top : top + height, left : left + width]
    resized_HWC = cv2.resize(window_HWC, (size, size), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(resized_HWC, 1) if random.random() < 0.5 else resized_HWC


def list_images(images: Path) -> list[tuple[str, int]]:
    """Path and class number of each image, in the order of their names."""
    folders = sorted(path for path in images.iterdir() if path.is_dir())
    return [(str(path), label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]


def convert_once(job: Job, write: Callable[[Path, list[tuple[str, int]]], None]) -> None:
    """Let `write` create the folder `job.own` of a shuffled list of images, unless an earlier call did."""
    if job.own.exists():
        return
    unfinished = job.own.with_name(f".unfinished-{job.own.name}-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    images = list_images(job.images)
    random.Random(0).shuffle(images)
    write(unfinished, images)
    unfinished.rename(job.own)


def measure(job: Job, epoch: Callable[[int], Iterable[np.ndarray]]) -> None:
    """Read epoch 0 to warm up, then whole epochs until there are enough of them and of seconds; print the rate.

    `epoch(number)` gives the images of each batch, NHWC or NCHW, without padding.
    """
    num_warm = 0
    for number, images in enumerate(epoch(0)):
        if number == 0:
            _check(job, images)
        num_warm += len(images)
    num_images = num_epochs = 0
    started = time.perf_counter()
    while num_epochs < job.epochs or time.perf_counter() - started < job.seconds:
        num_epochs += 1
        num_images += sum(len(images) for images in epoch(num_epochs))
    seconds = time.perf_counter() - started
    # Some end their workers badly; what counts is known by now.
    print(json.dumps({"images": num_images, "seconds": seconds, "epochs": num_epochs, "warm": num_warm}), flush=True)


def _check(job: Job, images: np.ndarray) -> None:
    pixels = np.asarray(images)
    height, width, channels = job.shape_HWC
    assert pixels.dtype == np.uint8, pixels.dtype
    assert pixels.shape[1:] in (job.shape_HWC, (channels, height, width)), pixels.shape
    assert pixels.std() > 1, "the images have no content"
