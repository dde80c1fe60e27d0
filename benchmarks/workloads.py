"""The image sets of `etl_peers.py`, created from a folder of photographs and kept for the next run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

BIG_HEIGHT, BIG_WIDTH, BIG_DISTINCT = 3000, 4000, 20
SMALL_SIZE = 32


@dataclass(frozen=True)
class Workload:
    """Which files are made, and what becomes of them."""

    name: str
    title: str
    default_sizes: tuple[int, ...]
    image_size: int
    make: Callable[[Sequence[Path]], Iterator[bytes]]
    """Endless JPEGs made of the photographs; no two are equal."""

    def files(self, photos: Sequence[Path], scratch: Path, num_images: int) -> Path:
        """A folder of one folder per class with so many JPEGs: those that an earlier call made, if it did."""
        folder = scratch / f"{self.name}-{num_images}"
        if folder.is_dir():
            return folder
        unfinished = scratch / f".unfinished-{self.name}-{num_images}-{os.getpid()}"
        names = itertools.cycle(photo.stem.split("_")[0] for photo in photos)
        for number, (data, name) in enumerate(zip(self.make(photos), names, strict=False)):
            if number == num_images:
                break
            (unfinished / name).mkdir(parents=True, exist_ok=True)
            (unfinished / name / f"{number:06d}.jpg").write_bytes(data)
        unfinished.rename(folder)
        return folder


def find_photos(images: Path) -> list[Path]:
    """The JPEGs of a folder. Ends the process if there are none."""
    photos = [path for path in sorted(images.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    if not photos:
        raise SystemExit(f"no JPEG files in {images}")
    return photos


def with_comment(data: bytes, text: str) -> bytes:
    """The same JPEG as a distinct file: a comment segment behind its first marker."""
    comment = text.encode()
    return data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:]


def enlarged(data: bytes) -> bytes:
    """Twelve megapixels with a sensor's grain: an enlargement alone would leave hardly any data to decode."""
    small_HWC = simplejpeg.decode_jpeg(data, "RGB")
    big_HWC = cv2.resize(small_HWC, (BIG_WIDTH, BIG_HEIGHT), interpolation=cv2.INTER_CUBIC).astype(np.int16)
    grainy_HWC = big_HWC + np.random.RandomState(0).randint(-6, 7, big_HWC.shape, dtype=np.int16)
    return simplejpeg.encode_jpeg(np.clip(grainy_HWC, 0, 255).astype(np.uint8), 90, colorsubsampling="420")


def _copies(photos: Sequence[Path]) -> Iterator[bytes]:
    for number, photo in enumerate(itertools.cycle(photos)):
        yield with_comment(photo.read_bytes(), f"copy {number}")


def _big(photos: Sequence[Path]) -> Iterator[bytes]:
    distinct = [enlarged(photo.read_bytes()) for photo in photos[:BIG_DISTINCT]]
    for number, data in enumerate(itertools.cycle(distinct)):
        yield with_comment(data, f"copy {number}")


def _small(photos: Sequence[Path]) -> Iterator[bytes]:
    """Squares cut out of the photographs, one of each in turn."""
    pictures = [simplejpeg.decode_jpeg(photo.read_bytes(), "RGB") for photo in photos]
    for number in itertools.count():
        for pixels_HWC in pictures:
            rows, columns = (length // SMALL_SIZE for length in pixels_HWC.shape[:2])
            top, left = (SMALL_SIZE * place for place in divmod(number % (rows * columns), columns))
            square_HWC = pixels_HWC[top : top + SMALL_SIZE, left : left + SMALL_SIZE]
            yield with_comment(simplejpeg.encode_jpeg(np.ascontiguousarray(square_HWC), 95), f"square {number}")


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("photos", "photographs -> 256 px", (5_000, 20_000), 256, _copies),
        Workload("big", f"photographs of {BIG_WIDTH}x{BIG_HEIGHT} -> 256 px", (200,), 256, _big),
        Workload("small", f"images of {SMALL_SIZE}x{SMALL_SIZE}, not resized", (60_000,), SMALL_SIZE, _small),
    )
}
