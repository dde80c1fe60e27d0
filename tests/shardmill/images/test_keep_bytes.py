"""`keep_bytes`: what already is as it would be stored is not encoded again, and carries no metadata along."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from shardmill.formats.encodings import decode_stored
from shardmill.images.process import process_image
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, SourceImage
from tests.shardmill.images.make import (
    by_opencv,
    gray_jpeg,
    gray_photo,
    jpeg,
    one_of_each_format,
    photo,
    png,
    png_chunk,
    ramp_alpha,
    rgb_profile,
    webp,
    with_orientation,
    with_profile,
    with_segment,
)

SIDE = 24
PICTURE = photo(SIDE, SIDE)
SECRET = b"taken at home"
PLAIN = {
    "jpeg": jpeg(PICTURE, 70),
    "progressive jpeg": by_opencv(".jpg", PICTURE, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]),
    "png": png(PICTURE),
    "webp": webp(PICTURE, 60),
    "lossless webp": webp(PICTURE),
}


def options_of(encoding: str, **changes: object) -> NormalizeOptions:
    values = {"image_size": SIDE, "encoding": encoding, "keep_bytes": True, **changes}
    return NormalizeOptions.model_validate(values)


def stored(data: bytes, options: NormalizeOptions) -> ImageSample:
    sample = process_image(SourceImage(key="x", size_bytes=len(data)), data, options)
    assert isinstance(sample, ImageSample), sample
    return sample


def is_encoded_again(data: bytes, encoding: str, **changes: object) -> bool:
    again = stored(data, options_of(encoding, keep_bytes=False, **changes)).image
    return stored(data, options_of(encoding, **changes)).image == again


@pytest.mark.parametrize("name", PLAIN)
def test_a_file_without_metadata_is_stored_byte_for_byte(name: str) -> None:
    encoding = name.split()[-1]
    sample = stored(PLAIN[name], options_of(encoding))
    assert sample.image == PLAIN[name]
    decoded_HWC = decode_stored(sample.image, encoding, (SIDE, SIDE, 3)).astype(int)
    assert sample.channel_sums == tuple(decoded_HWC.sum(axis=(0, 1)))  # these are the pixels that were counted
    assert sample.notes == ()


def test_gray_is_kept_where_gray_is_asked_for() -> None:
    gray = gray_jpeg(gray_photo(SIDE, SIDE))
    assert stored(gray, options_of("jpeg", color="gray")).image == gray
    assert is_encoded_again(gray, "jpeg")
    assert is_encoded_again(PLAIN["jpeg"], "jpeg", color="gray")


def test_metadata_is_dropped_and_the_scan_is_not_touched() -> None:
    plain = PLAIN["jpeg"]
    tagged = with_orientation(with_segment(plain, 0xFE, SECRET), 1)
    tagged = with_segment(with_segment(tagged, 0xE1, b"http://ns.adobe.com/xap/1.0/\0" + SECRET), 0xED, SECRET)
    tagged = with_segment(tagged, 0xE0, b"JFXX\0\x10" + SECRET) + SECRET
    sample = stored(tagged, options_of("jpeg"))
    assert sample.image == plain
    assert sample.notes == ("trailing_bytes",)

    head = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1"
    with_thumbnail = plain.replace(head + b"\0\0", head.replace(b"\x10", b"\x13") + b"\1\1abc")
    assert with_thumbnail != plain
    assert stored(with_thumbnail, options_of("jpeg")).image == plain

    comment = png_chunk(b"tEXt", b"Comment\0" + SECRET)
    assert stored(PLAIN["png"][:33] + comment + PLAIN["png"][33:], options_of("png")).image == PLAIN["png"]


def test_a_comment_between_two_scans_is_no_reason_to_keep_it() -> None:
    data = PLAIN["progressive jpeg"]
    last_scan = data.rindex(b"\xff\xda")
    hidden = data[:last_scan] + b"\xff\xfe\0\x0f" + SECRET + data[last_scan:]
    assert SECRET not in stored(hidden, options_of("jpeg")).image
    assert is_encoded_again(hidden, "jpeg")


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (with_orientation(PLAIN["jpeg"], 6), "jpeg"),
        (with_profile(PLAIN["jpeg"], rgb_profile()), "jpeg"),
        (jpeg(photo(SIDE, SIDE + 1)), "jpeg"),
        (jpeg(photo(2 * SIDE, 2 * SIDE)), "jpeg"),
        (one_of_each_format()["cmyk"], "jpeg"),
        (PLAIN["png"], "jpeg"),
        (PLAIN["jpeg"], "png"),
        (png(np.dstack([PICTURE, ramp_alpha(SIDE, SIDE)])), "png"),
        (png(PICTURE.astype(np.uint16) * 257), "png"),
        (webp(np.dstack([PICTURE, ramp_alpha(SIDE, SIDE)]), 80), "webp"),
        (PLAIN["png"], "raw"),
    ],
)
def test_what_would_be_stored_otherwise_is_encoded_again(data: bytes, encoding: str) -> None:
    assert is_encoded_again(data, encoding)


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_kept_was_decoded_first(name: str) -> None:
    data = PLAIN[name]
    damaged = data[:-12] + data[-2:]
    outcome = process_image(SourceImage(key="x", size_bytes=len(damaged)), damaged, options_of(name.split()[-1]))
    assert not isinstance(outcome, ImageSample)
