"""Helpers that the peers' scripts share: their arguments, the listing of a class-per-folder tree, and the image work.

Each peer that takes a function of the user's gets the fastest one that wheels allow: the same decoder, crop, area
filter and encoder as shardmill's own.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """The same for every peer: JPEGs in one folder per class -> square JPEGs with labels, in shards below `out`."""

    images: Path
    out: Path
    num_workers: int
    image_size: int
    quality: int


def parse_job() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--quality", type=int, default=95)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # a peer's own worker processes import this module too
    return Job(**vars(arguments))


def list_images(images: Path) -> list[tuple[str, int]]:
    """Path and class number of each image, in the order of their names."""
    folders = sorted(path for path in images.iterdir() if path.is_dir())
    return [(str(path), label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]


def transform(data: bytes, image_size: int, quality: int) -> bytes:
    """The centre square, resized by an area filter (linear to enlarge), as JPEG 4:4:4."""
    import cv2
    import simplejpeg

    pixels_HWC = simplejpeg.decode_jpeg(data, "RGB")
    height, width = pixels_HWC.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square_HWC = pixels_HWC[top : top + side, left : left + side]
    if side != image_size:
        kernel = cv2.INTER_AREA if side > image_size else cv2.INTER_LINEAR
        square_HWC = cv2.resize(square_HWC, (image_size, image_size), interpolation=kernel)
    return simplejpeg.encode_jpeg(square_HWC if square_HWC.flags.c_contiguous else square_HWC.copy(), quality)


def transform_file(path: str, image_size: int, quality: int) -> bytes:
    with open(path, "rb") as file:
        return transform(file.read(), image_size, quality)
