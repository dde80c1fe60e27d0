"""The demo's folder holds what it says, and each odd file meets exactly the fate that it was made for."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from etl.config import SourceConfig
from pipeline.demo.data import DemoImages, OddFile, digit_key, encode_digit, load_digits, odd_files, write_demo_images
from shardmill.formats.encodings import decode_stored
from shardmill.images.process import process_image
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.etl.building import images_of, list_images

OPTIONS = NormalizeOptions(image_size=32, color="gray", encoding="raw")
FOUND_WHILE_LISTING = {RejectReason.NOT_AN_IMAGE_NAME, RejectReason.DANGLING_SYMLINK}
DECODED = [odd_file for odd_file in odd_files() if odd_file.expected_reason not in FOUND_WHILE_LISTING]


def run(key: str, data: bytes) -> ImageSample | Rejection:
    return process_image(SourceImage(key=key, size_bytes=len(data)), data, OPTIONS)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoImages:
    return write_demo_images(tmp_path_factory.mktemp("demo"))


def test_the_folder_holds_every_digit_and_every_odd_file(demo: DemoImages) -> None:
    names = {
        os.path.relpath(os.path.join(folder, name), demo.folder)
        for folder, _, names in os.walk(demo.folder)
        for name in names
    }
    assert len(names) == demo.num_files
    assert demo.num_digits == 1797
    assert {odd_file.key for odd_file in demo.odd_files} <= names
    assert len(demo.odd_files) >= 16
    assert {path.name for path in demo.folder.iterdir() if path.is_dir()} == {str(digit) for digit in range(10)}
    assert {Path(name).suffix for name in names} >= {".png", ".jpg", ".gif"}
    assert not (demo.folder / "8/dangling.jpg").exists()


def test_writing_again_touches_no_file(demo: DemoImages) -> None:
    def stamps() -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in demo.folder.rglob("*")}

    before = stamps()
    assert write_demo_images(demo.folder) == demo
    assert stamps() == before


def test_the_other_odd_files_are_refused_while_listing(demo: DemoImages) -> None:
    listing = list_images(SourceConfig(uri=str(demo.folder)), OPTIONS.max_source_bytes)
    expected = {f.key: f.expected_reason for f in odd_files() if f.expected_reason in FOUND_WHILE_LISTING}
    assert {rejection.key: rejection.reason for rejection in listing.rejections} == expected
    assert listing.num_images + len(listing.rejections) == demo.num_files
    assert all(image.label == image.key[0] for image in images_of(listing))


@pytest.mark.parametrize("odd_file", DECODED, ids=lambda odd_file: odd_file.key)
def test_each_odd_file_meets_its_fate(odd_file: OddFile) -> None:
    assert odd_file.data is not None
    result = run(odd_file.key, odd_file.data)
    if odd_file.expected_reason is not None:
        assert isinstance(result, Rejection), result
        assert result.reason is odd_file.expected_reason
        return
    assert isinstance(result, ImageSample), result
    assert result.notes == (() if odd_file.expected_note is None else (odd_file.expected_note,))


@pytest.mark.parametrize("odd_file", [f for f in DECODED if f.expected_reason is None], ids=lambda f: f.key)
def test_accepted_odd_files_show_the_digit_of_their_folder(odd_file: OddFile) -> None:
    assert odd_file.data is not None
    result = run(odd_file.key, odd_file.data)
    assert isinstance(result, ImageSample)
    shown_HW = decode_stored(result.image, "raw", OPTIONS.image_shape_HWC)[:, :, 0].astype(int)
    digits = load_digits()
    label = int(odd_file.key[0])
    assert digits.labels[label] == label
    errors = [float(np.abs(shown_HW - image_HW).mean()) for image_HW in digits.images]
    assert errors[label] < 2
    assert digits.labels[int(np.argmin(errors))] == label


def test_the_digits_decode_to_themselves() -> None:
    digits = load_digits()
    for index in (0, 1, 500, 1001, 1796):
        result = run(digit_key(digits, index), encode_digit(digits, index))
        assert isinstance(result, ImageSample)
        assert result.notes == ()
        shown_HW = decode_stored(result.image, "raw", OPTIONS.image_shape_HWC)[:, :, 0].astype(int)
        assert np.abs(shown_HW - digits.images[index]).mean() < 2


def test_odd_files_are_the_same_bytes_every_time() -> None:
    first = odd_files()
    odd_files.cache_clear()
    assert odd_files() == first


def test_every_reason_a_user_may_meet_first_is_on_show() -> None:
    shown = {odd_file.expected_reason for odd_file in odd_files()}
    assert shown >= {
        None,
        RejectReason.EMPTY_FILE,
        RejectReason.NOT_AN_IMAGE,
        RejectReason.TRUNCATED,
        RejectReason.CORRUPT_SCAN,
        RejectReason.CHECKSUM,
        RejectReason.TOO_MANY_PIXELS,
        RejectReason.DANGLING_SYMLINK,
        RejectReason.NOT_AN_IMAGE_NAME,
    }
