# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "ffcv==1.0.2", "numba==0.60.0", "torch==2.12.1", "torchvision==0.27.1", "numpy<2", "pandas<3", "setuptools<81",
# ]
# ///
"""FFCV: one file in its own format, rows in a random order, decoded and cropped by its compiled code in two threads.

It is built from source and needs OpenCV's and libjpeg-turbo's headers (Debian: libopencv-dev, libturbojpeg0-dev).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from common import MAX_ASPECT, MIN_CROP_AREA, Job, convert_once, measure, parse_job
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import IMAGE_MODES, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor
from ffcv.writer import DatasetWriter

FILE = "images.beton"


def main() -> None:
    job = parse_job()
    if job.convert:
        convert_once(job, lambda folder, images: _write(job, folder, images))
        return
    loader = Loader(
        str(job.own / FILE), job.batch_size, num_workers=job.num_threads, os_cache=True, order=OrderOption.RANDOM,
        drop_last=False, custom_fields={"image": RGBImageField},
        pipelines={"image": [*_image_steps(job), ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )  # fmt: skip

    def epoch(number: int) -> Iterator[torch.Tensor]:
        for images, _ in loader:
            yield images

    measure(job, epoch)


def _image_steps(job: Job) -> list:
    if not job.is_cropped:
        return [SimpleRGBImageDecoder()]
    crop = RandomResizedCropRGBImageDecoder(
        (job.size, job.size), scale=(MIN_CROP_AREA, 1.0), ratio=(1 / MAX_ASPECT, MAX_ASPECT)
    )
    return [crop, RandomHorizontalFlip()]


class _Stored(RGBImageField):
    """Its field for images, which would decode and encode a JPEG again."""

    def __init__(self, job: Job) -> None:
        super().__init__(write_mode="jpg" if job.encoding == "jpeg" else "raw")
        self.side = job.stored_size

    def encode(self, destination, image: np.ndarray, malloc) -> None:
        destination["mode"] = IMAGE_MODES[self.write_mode]
        destination["height"] = destination["width"] = self.side
        destination["data_ptr"], storage = malloc(image.nbytes)
        storage[:] = image


class _Files:
    """Rows by number, as its writer asks for them."""

    def __init__(self, images: list[tuple[str, int]]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        path, label = self.images[number]
        return np.fromfile(path, np.uint8), label


def _write(job: Job, folder: Path, images: list[tuple[str, int]]) -> None:
    fields = {"image": _Stored(job), "label": IntField()}
    DatasetWriter(str(folder / FILE), fields, num_workers=job.num_threads).from_indexed_dataset(_Files(images))


if __name__ == "__main__":
    main()
