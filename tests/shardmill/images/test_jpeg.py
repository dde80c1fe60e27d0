"""JPEG: orientation, colour models, every kind of damage, and bombs that are refused by their header."""

from __future__ import annotations

import struct

import cv2
import numpy as np
import pytest
import simplejpeg

from pipeline.demo.data import damage_scan
from shardmill.images.jpeg import MAX_SCANS
from shardmill.images.pixels import Refused, check_dimensions
from shardmill.values import RejectReason
from tests.processes import memory_below
from tests.shardmill.images.make import (
    OPTIONS,
    STORED_FOR_ORIENTATION,
    by_opencv,
    decode,
    gray_jpeg,
    gray_photo,
    jpeg,
    mean_error,
    one_of_each_format,
    photo,
    refusal,
    with_orientation,
    with_segment,
)


def patched_frame(data: bytes, offset: int, value: bytes) -> bytes:
    """The file with bytes of its frame header changed; offset 0 is the marker's code."""
    start = data.index(b"\xff\xc0") + 1 + offset
    return data[:start] + value + data[start + len(value) :]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_comes_out_upright(orientation: int) -> None:
    stored = with_orientation(jpeg(STORED_FOR_ORIENTATION[orientation](photo())), orientation)
    decoded = decode(stored)
    assert mean_error(decoded.pixels_HWC, photo()) < 2
    assert decoded.notes == (() if orientation == 1 else ("exif_rotated",))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_out_of_range_changes_nothing(orientation: int) -> None:
    decoded = decode(with_orientation(jpeg(photo()), orientation))
    assert mean_error(decoded.pixels_HWC, photo()) < 2
    assert decoded.notes == ("exif_ignored",)


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"XX*\0",
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff",
        # an orientation of 6 as ASCII, and one whose 40 values would lie far outside
        b"II*\0" + struct.pack("<IHHHI", 8, 1, 0x0112, 2, 1) + b"6\0\0\0",
        b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 3, 40, 1 << 30),
    ],
)
def test_corrupt_exif_changes_nothing(exif: bytes) -> None:
    decoded = decode(with_segment(jpeg(photo()), 0xE1, b"Exif\0\0" + exif))
    assert mean_error(decoded.pixels_HWC, photo()) < 2
    assert decoded.notes == (("exif_ignored",) if exif else ())


def test_big_endian_exif_counts_and_exif_without_orientation_is_silent() -> None:
    big_endian = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)
    turned = with_segment(jpeg(np.rot90(photo())), 0xE1, b"Exif\0\0" + big_endian)
    assert mean_error(decode(turned).pixels_HWC, photo()) < 2
    other_tag = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0100, 3, 1, 6, 0, 0)
    assert decode(with_segment(jpeg(photo()), 0xE1, b"Exif\0\0" + other_tag)).notes == ()


def test_gray_and_progressive_jpeg_decode() -> None:
    gray = decode(gray_jpeg(gray_photo()))
    assert mean_error(gray.pixels_HWC, gray_photo()) < 2
    progressive = by_opencv(".jpg", photo(), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_QUALITY, 98])
    assert b"\xff\xc2" in progressive
    assert mean_error(decode(progressive).pixels_HWC, photo()) < 12  # OpenCV halves the colour resolution


def test_cmyk_with_adobes_marker_is_read_as_inverted() -> None:
    """The reference is the formula that Pillow and browsers use: R = (255 - C) * (255 - K) / 255."""
    light_HWC = np.dstack([photo(), 255 - gray_photo() // 2])
    data = simplejpeg.encode_jpeg(light_HWC, 98, colorspace="CMYK", colorsubsampling="444")
    assert b"Adobe" in data
    decoded = decode(data)
    expected = light_HWC[:, :, :3].astype(float) * light_HWC[:, :, 3:] / 255
    assert mean_error(decoded.pixels_HWC, expected) < 2
    assert decoded.notes == ("cmyk_converted",)


@pytest.mark.parametrize(("ink", "black"), [(0, 0), (255, 0), (200, 40), (90, 255)])
def test_cmyk_without_adobes_marker_is_read_as_ink(ink: int, black: int) -> None:
    # With the marker simplejpeg stores Y = 255 - ink, Cb = Cr = 128 and K; without it these are four inks.
    stored = np.full((16, 16, 4), 255 - ink, np.uint8)
    stored[:, :, 3] = black
    with_marker = simplejpeg.encode_jpeg(stored, 98, colorspace="CMYK", colorsubsampling="444")
    start = with_marker.index(b"\xff\xee")
    decoded = decode(with_marker[:start] + with_marker[start + 16 :])
    expected = np.array([255 - ink, 255 - 128, 255 - 128]) * (255 - black) / 255
    assert mean_error(decoded.pixels_HWC, np.broadcast_to(expected, (16, 16, 3))) < 2
    assert decoded.notes == ("cmyk_converted",)


def test_every_cut_is_truncated() -> None:
    data = jpeg(photo(), 90)
    for length in (2, 10, 200, len(data) // 2, len(data) * 99 // 100, len(data) - 2, len(data) - 1):
        assert refusal(data[:length])[0] is RejectReason.TRUNCATED, length


def test_damage_that_tolerant_decoders_accept_is_a_corrupt_scan() -> None:
    intact = gray_jpeg(gray_photo())
    damaged = damage_scan(intact)
    assert sum(a != b for a, b in zip(intact, damaged, strict=True)) == 1
    tolerant = cv2.imdecode(np.frombuffer(damaged, np.uint8), cv2.IMREAD_GRAYSCALE)
    assert np.abs(tolerant.astype(int) - gray_photo()).mean() > 5  # accepted by OpenCV, and wrong
    reason, detail = refusal(damaged)
    assert reason is RejectReason.CORRUPT_SCAN
    assert "libjpeg: Corrupt JPEG data" in detail


@pytest.mark.parametrize("tail", [b"\0", b"PK\3\4 a zip follows", b"\xff\xd9", jpeg(photo()), bytes(10_000)])
def test_trailing_bytes_are_accepted_and_noted(tail: bytes) -> None:
    decoded = decode(jpeg(photo()) + tail)
    assert decoded.notes == ("trailing_bytes",)
    assert np.array_equal(decoded.pixels_HWC, decode(jpeg(photo())).pixels_HWC)


def test_bytes_before_the_start_marker_are_no_image() -> None:
    assert refusal(b"\r\n" + jpeg(photo()))[0] is RejectReason.NOT_AN_IMAGE


@pytest.mark.parametrize(
    ("height", "width", "reason"),
    [
        (65000, 65000, RejectReason.TOO_MANY_PIXELS),
        (1, 30001, RejectReason.TOO_MANY_PIXELS),
        (8001, 8000, RejectReason.TOO_MANY_PIXELS),
        (20, 2020, RejectReason.ASPECT_RATIO),
        (2020, 20, RejectReason.ASPECT_RATIO),
        (20, 0, RejectReason.BAD_HEADER),
        (0, 20, RejectReason.UNSUPPORTED_FORMAT),
    ],
)
def test_sizes_are_refused_from_the_header(height: int, width: int, reason: RejectReason) -> None:
    with memory_below(20_000_000):
        assert refusal(patched_frame(jpeg(photo()), 4, struct.pack(">HH", height, width)))[0] is reason


def test_sizes_at_the_limits_pass() -> None:
    limits = {"max_source_pixels": 24 * 32, "max_source_side_pixels": 32, "max_aspect_ratio": 2}
    assert decode(jpeg(photo()), OPTIONS.model_copy(update=limits)).notes == ()
    for name in ("max_source_pixels", "max_source_side_pixels", "max_aspect_ratio"):
        tighter = OPTIONS.model_copy(update={**limits, name: limits[name] - 1})
        expected = RejectReason.ASPECT_RATIO if name == "max_aspect_ratio" else RejectReason.TOO_MANY_PIXELS
        assert refusal(jpeg(photo()), tighter)[0] is expected
        assert name in refusal(jpeg(photo()), tighter)[1]


def test_the_aspect_ratio_at_its_limit_passes() -> None:
    check_dimensions(20, 2000, OPTIONS)
    check_dimensions(2000, 20, OPTIONS)
    with pytest.raises(Refused, match="max_aspect_ratio is 100"):
        check_dimensions(20, 2001, OPTIONS)
    check_dimensions(20, 31, OPTIONS.model_copy(update={"max_aspect_ratio": 1.55}))
    with pytest.raises(Refused, match="max_aspect_ratio is 1.5$"):
        check_dimensions(20, 31, OPTIONS.model_copy(update={"max_aspect_ratio": 1.5}))


@pytest.mark.parametrize(
    ("offset", "value", "name"),
    [
        (0, b"\xc9", "arithmetic-coded"),
        (0, b"\xc3", "lossless"),
        (0, b"\xc5", "hierarchical"),
        (0, b"\xf7", "JPEG-LS"),
        (3, b"\x0c", "12 bits"),
    ],
)
def test_rare_kinds_of_jpeg_are_named(offset: int, value: bytes, name: str) -> None:
    reason, detail = refusal(patched_frame(jpeg(photo()), offset, value))
    assert reason is RejectReason.UNSUPPORTED_FORMAT
    assert name in detail


def test_strange_component_counts_and_sampling_are_unsupported_modes() -> None:
    assert refusal(patched_frame(jpeg(photo()), 8, b"\x02"))[0] is RejectReason.UNSUPPORTED_MODE
    assert refusal(patched_frame(jpeg(photo()), 10, b"\x31"))[0] is RejectReason.UNSUPPORTED_MODE


@pytest.mark.parametrize("payload", [b"\xff\xd8\0\0\0", b"\xff\xd8\xff\xe0\0\1", b"\xff\xd8\xff\xd9\0\0\0"])
def test_headers_without_sense_are_bad(payload: bytes) -> None:
    assert refusal(payload)[0] is RejectReason.BAD_HEADER


def test_a_missing_table_is_a_bad_header() -> None:
    data = jpeg(photo())
    start = data.index(b"\xff\xdb")
    length = int.from_bytes(data[start + 2 : start + 4])
    assert refusal(data[:start] + data[start + 2 + length :])[0] is RejectReason.BAD_HEADER


def test_a_scan_bomb_is_refused() -> None:
    progressive = one_of_each_format()["progressive"]
    last_scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    most = progressive[:-2] + last_scan * (MAX_SCANS - progressive.count(b"\xff\xda"))
    # A scan that refines what is final already: libjpeg gets to see it, and warns.
    assert refusal(most + b"\xff\xd9")[0] is RejectReason.CORRUPT_SCAN
    for tail in (b"", b"tail"):
        assert refusal(most + last_scan + b"\xff\xd9" + tail)[0] is RejectReason.UNSUPPORTED_FORMAT


def test_an_end_marker_inside_a_table_between_scans_is_not_the_end() -> None:
    progressive = one_of_each_format()["progressive"]
    second_scan = progressive.index(b"\xff\xda", progressive.index(b"\xff\xda") + 2)
    table_start = progressive.rindex(b"\xff\xc4", 0, second_scan)
    comment = b"\xff\xfe\0\6\xff\xd9\xff\xd9"
    data = progressive[:table_start] + comment + progressive[table_start:]
    decoded = decode(data)
    assert decoded.notes == ()
    assert np.array_equal(decoded.pixels_HWC, decode(progressive).pixels_HWC)


def test_mpo_names_its_number_of_images() -> None:
    directory = b"II*\0" + struct.pack("<IHHHIII", 8, 1, 0xB001, 4, 1, 2, 0)
    data = with_segment(jpeg(photo()), 0xE2, b"MPF\0" + directory) + jpeg(photo()[::-1])
    assert decode(data).notes == ("first_frame_of_2",)
