"""Images by size: every one in its bucket, and parts of a version add up to it."""

from __future__ import annotations

import random
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardmill.dataset.statistics import ASPECT_NAMES, SIDE_NAMES, ImageSizes, SizeCounts, add_sizes, count_sizes
from shardmill.dataset.verify import verify_dataset
from shardmill.images.process import process_image
from shardmill.kernel import resolve_kernel
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, SourceImage
from tests.etl.incremental import build, opened
from tests.shardmill.images.make import with_orientation

_SEED = random.SystemRandom().randrange(2**32)


def bucket(width: int, height: int) -> tuple[str, str]:
    """The names of its buckets, from what they say."""

    def holds_side(name: str) -> bool:
        low, _, high = name.partition("-")
        least, most = int(low.rstrip("+")), 10**9 if low.endswith("+") else int(high or low)
        return least <= max(width, height) <= most

    def ratio(edge: str) -> float:
        return int(edge.split(":")[0]) / int(edge.split(":")[1])

    def holds_aspect(name: str) -> bool:
        if name[0] in "<>":
            edge = ratio(name[2:])
            return width / height < edge if name[0] == "<" else width / height > edge
        low, high = map(ratio, name.split(" to "))
        is_above = width / height >= low if low < 1 else width / height > low
        return is_above and (width / height <= high if high > 1 else width / height < high)

    [side], [aspect] = filter(holds_side, SIDE_NAMES), filter(holds_aspect, ASPECT_NAMES)
    return side, aspect


def test_every_image_is_in_the_buckets_whose_names_describe_it():
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    edges = [1, 2, 3, 4, 5, 7, 8, 16, 255, 256, 32767, 32768, 65535]
    shapes = [
        (rng.choice([*edges, rng.randint(1, 70_000)]), rng.choice([*edges, rng.randint(1, 999)])) for _ in range(300)
    ]
    for width, height in shapes:
        counts = count_sizes([height], [width], 5)
        side, aspect = bucket(width, height)
        assert counts.by_longer_side[SIDE_NAMES.index(side)] == counts.by_aspect_ratio[ASPECT_NAMES.index(aspect)] == 1
        assert counts.num_images == sum(counts.by_aspect_ratio) == 1
        # A picture and the same one turned by 90 degrees are in mirrored buckets.
        assert count_sizes([width], [height], 5).by_aspect_ratio == counts.by_aspect_ratio[::-1]
    whole = ImageSizes(source=count_sizes([h for h, _ in shapes], [w for _, w in shapes], 300))
    cut = rng.randrange(300)
    parts = [
        ImageSizes(source=count_sizes([h for h, _ in part], [w for _, w in part], len(part)))
        for part in (shapes[:cut], shapes[cut:])
        if part
    ]
    assert add_sizes(parts) == whole


def test_images_of_unknown_size_are_left_out():
    assert count_sizes([0, 4], [0, 4], 9).num_images == 1
    assert add_sizes([]) == ImageSizes(source=SizeCounts(), stored=count_sizes([], [], 0))


@pytest.mark.parametrize("kernel", ["wheels", "auto"])
def test_the_size_before_is_that_of_the_whole_upright_source(kernel: str):
    ok, encoded = cv2.imencode(".jpg", np.zeros((300, 500, 3), np.uint8))
    assert ok
    options = NormalizeOptions(image_size=16, kernel=resolve_kernel(kernel))
    for orientation in range(1, 9):
        jpeg = with_orientation(encoded.tobytes(), orientation)
        sample = process_image(SourceImage("a.jpg", len(jpeg)), jpeg, options)
        assert isinstance(sample, ImageSample)
        # From 5 on, rows and columns are exchanged.
        shape = (300, 500) if orientation < 5 else (500, 300)
        assert (sample.source_height, sample.source_width, sample.source_bytes) == (*shape, len(jpeg))


def paint(file: Path, width: int, height: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(width * height).integers(0, 255, (height, width, 3), np.uint8)
    assert cv2.imwrite(str(file), pixels)


def grow(folder: Path, rng: random.Random, prefix: str, num_images: int) -> None:
    for number in range(num_images):
        paint(
            folder / "images" / f"class_{number % 2}" / f"{prefix}{number}.png", rng.randint(8, 90), rng.randint(8, 90)
        )


def change(folder: Path, rng: random.Random) -> None:
    files = sorted((folder / "images").rglob("*.png"))
    for file in files[:4]:
        file.unlink()
    paint(files[5], 77, 11)
    grow(folder, rng, "new", 3)


@pytest.mark.parametrize("mode", ["crop", "longer"])
def test_a_child_version_counts_what_a_full_build_does(mode: str, tmp_path: Path):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    grow(tmp_path, rng, "", 30)
    options = {"resize_mode": mode}
    first = build(tmp_path, **options).manifest.sizes
    assert first is not None and first.source.num_images == first.stored.num_images == 30
    assert first.source.num_bytes == sum(file.stat().st_size for file in (tmp_path / "images").rglob("*.png"))
    change(tmp_path, rng)
    child = build(tmp_path, **options).manifest
    assert (child.operation, child.sizes) == ("incremental", build(tmp_path, "whole", **options).manifest.sizes)
    verify_dataset(opened(tmp_path)).raise_if_failed()
