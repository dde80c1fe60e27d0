"""IDX files: pixels arrive as they are, labels by number, and neither a cut file nor a false header loses silently."""

from __future__ import annotations

import gzip
import re
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from etl.sources import SOURCES
from etl.sources.kinds.raw_pixels import as_png
from etl.sources.recognise import recognise
from shardmill.errors import UsageError
from shardmill.images.png import decode_png
from shardmill.options import NormalizeOptions
from shardmill.values import Rejection
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import idx, idx_bytes, write_pair
from tests.services.s3 import s3_client


@pytest.mark.parametrize("shape", [(1, 1), (28, 28), (8, 6, 3), (300, 400), (90, 1), (1, 90)])
def test_a_png_holds_exactly_the_pixels(shape: tuple[int, ...]):
    pixels = np.random.default_rng(1).integers(0, 255, shape, np.uint8)
    decoded = decode_png(as_png(pixels), NormalizeOptions()).pixels_HWC
    assert np.array_equal(decoded, pixels.reshape(*shape[:2], -1))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", [0, 3])
def test_pairs_are_splits_with_labels(packed: bool, channels: int, tmp_path: Path):
    pixels = write_pair(tmp_path / "in", "train", 60, packed, channels)
    write_pair(tmp_path / "in", "t10k", 20, packed, channels, seed=1)
    source = idx(tmp_path / "in")
    listing = list_images(source)
    images = images_of(listing)
    assert Counter(image.split for image in images) == {"train": 60, "test": 20} and not listing.rejections
    reader = SOURCES["idx"](source).open(10_000)
    for image in images[::7]:
        assert image.label == str(image.place % 3)
        if image.split == "train":
            assert reader.read(image) == as_png(pixels[image.place])
    manifest = build_source(source, tmp_path / "dataset")
    assert manifest.counts.by_split == {"test": 20, "train": 60} and manifest.class_names == ("0", "1", "2")


def test_packed_and_plain_files_hold_the_same_pictures(tmp_path: Path):
    write_pair(tmp_path / "plain", "train", 50)
    write_pair(tmp_path / "packed", "train", 50, packed=True)

    def rows(folder: Path) -> list[bytes | Rejection]:
        reader = SOURCES["idx"](idx(folder)).open(10_000)
        return [reader.read(image) for image in reversed(images_of(list_images(idx(folder))))]

    assert rows(tmp_path / "plain") == rows(tmp_path / "packed")


def test_one_file_of_images_finds_its_labels(tmp_path: Path):
    write_pair(tmp_path, "emnist-train", 30)
    write_pair(tmp_path, "emnist-test", 30)
    listing = list_images(idx(tmp_path / "emnist-train-images-idx3-ubyte"))
    assert listing.num_images == 30 and {image.label for image in images_of(listing)} == {"0", "1", "2"}


def test_images_without_labels_are_a_dataset_unless_others_have_them(tmp_path: Path):
    write_pair(tmp_path, "train", 30)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    assert {image.label for image in images_of(list_images(idx(tmp_path)))} == {None}
    write_pair(tmp_path, "t10k", 30)
    with pytest.raises(UsageError, match="train-images-idx3-ubyte has no file of labels, but others have"):
        list_images(idx(tmp_path))


@pytest.mark.parametrize("packed", [False, True])
def test_a_cut_file_lists_what_is_whole_and_rejects_the_rest(packed: bool, tmp_path: Path):
    write_pair(tmp_path, "t10k", 30, packed)
    write_pair(tmp_path, "train", 30, packed)
    file = tmp_path / f"train-images-idx3-ubyte{'.gz' * packed}"
    data = file.read_bytes()
    for length in (3, 9, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        listing = list_images(idx(tmp_path))
        num_listed = sum("train" in image.container for image in images_of(listing))
        # What a packed file holds is known only with its checksum.
        assert num_listed == (0 if packed else max(0, length - 16) // 48)
        assert [str(each.reason) for each in listing.rejections] == ["damaged_container"]


@pytest.mark.parametrize(
    ("code", "dtype"), [(8, ">u1"), (9, ">i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")]
)
@pytest.mark.parametrize("name", ["idx1-ubyte", "idx1-int", "idx2-int", "idx1-ubyte.gz"])
def test_labels_of_every_type_are_read(code: int, dtype: str, name: str, tmp_path: Path):
    """QMNIST has `idx2-int`; writers of their own keep MNIST's name."""
    write_pair(tmp_path, "train", 30)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    shape = (30, 1) if "idx2" in name else (30,)
    header = struct.pack(f">HBB{len(shape)}I", 0, code, len(shape), *shape)
    data = header + (np.arange(30) % 3).astype(dtype).tobytes()
    (tmp_path / f"train-labels-{name}").write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for uri in (tmp_path, tmp_path / "train-images-idx3-ubyte"):
        listing = list_images(idx(uri))
        assert {image.label for image in images_of(listing)} == {"0", "1", "2"} and not listing.rejections


@pytest.mark.parametrize(("data", "problem"), [
    (struct.pack(">HBBI", 0, 13, 1, 30) + np.full(30, 0.5, ">f4").tobytes(), "float32 and not whole numbers"),
    (struct.pack(">HBBI", 0, 14, 1, 30) + np.full(30, 0.1, ">f8").tobytes(), "float64 and not whole numbers"),
    (struct.pack(">HBBII", 0, 12, 2, 30, 8) + bytes(960), r"shape \(30, 8\), expected one number for each image"),
    (struct.pack(">HBBI", 0, 12, 1, 30) + bytes(119), r"shape \(30,\) and 119 bytes"),
    (struct.pack(">HBBI", 0, 7, 1, 30) + bytes(30), "no IDX file: it begins with 00000701"),
])  # fmt: skip
def test_labels_that_are_none_name_their_type(data: bytes, problem: str, tmp_path: Path):
    write_pair(tmp_path, "t10k", 30)
    write_pair(tmp_path, "train", 30)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(data)
    [rejection] = list_images(idx(tmp_path)).rejections
    assert re.search(problem, rejection.detail)


def test_pixels_of_another_type_are_named(tmp_path: Path):
    write_pair(tmp_path, "t10k", 30)
    write_pair(tmp_path, "train", 30)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(struct.pack(">HBBIII", 0, 13, 3, 30, 8, 6) + bytes(5760))
    [rejection] = list_images(idx(tmp_path)).rejections
    assert rejection.detail == "its pixels are float32, expected uint8 (IDX type 0x08)"


def test_headers_are_not_believed(tmp_path: Path):
    write_pair(tmp_path, "t10k", 30)
    images = write_pair(tmp_path, "train", 30)
    many = struct.pack(">HBBIII", 0, 8, 3, 2**32 - 1, 1, 1)
    bomb = gzip.compress(struct.pack(">HBBIII", 0, 8, 3, 1, 8, 6) + bytes(50_000_000), 1)
    no_size = struct.pack(">HBBIII", 0, 8, 3, 5, 0, 6)
    floats = struct.pack(">HBBIII", 0, 0x0D, 3, 30, 8, 6) + images.tobytes()
    for data in (many, no_size, floats, b"", idx_bytes(images[:20])):
        (tmp_path / "train-images-idx3-ubyte").write_bytes(data)
        listing = list_images(idx(tmp_path))
        assert listing.num_images == 30 and len(listing.rejections) == 1
    (tmp_path / "train-images-idx3-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(bomb)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(1, np.uint8)))
    listing = list_images(idx(tmp_path))
    assert "more than the 1 images of its header follow" in next(iter(listing.rejections)).detail


def test_files_in_a_bucket_give_the_dataset_of_local_ones(tmp_path: Path, s3_bucket: str, s3_server: str):
    write_pair(tmp_path / "in", "train", 40, packed=True)
    for file in (tmp_path / "in").iterdir():
        s3_client(s3_server).upload_file(str(file), s3_bucket.removeprefix("s3://"), f"mnist/{file.name}")
    local = build_source(idx(tmp_path / "in"), tmp_path / "local")
    assert build_source(idx(f"{s3_bucket}/mnist"), tmp_path / "remote").content_digest == local.content_digest
    assert recognise(f"{s3_bucket}/mnist") == "idx"
