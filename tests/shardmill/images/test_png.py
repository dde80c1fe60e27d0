"""PNG: exact pixels, white under alpha, and no flipped bit that goes unnoticed."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from shardmill.values import RejectReason
from tests.shardmill.images.make import (
    PNG_SIGNATURE,
    decode,
    gray_photo,
    mean_error,
    over_white,
    photo,
    png,
    png_by_hand,
    png_chunk,
    png_header,
    ramp_alpha,
    refusal,
)

RGBA_HWC = np.dstack([photo(), ramp_alpha()])
FLATTENED_HWC = over_white(photo(), ramp_alpha())
ORIENTATION_6 = b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)


def insert_chunk(data: bytes, chunk_type: bytes, payload: bytes) -> bytes:
    """The PNG with one more chunk right behind its header."""
    return data[:33] + png_chunk(chunk_type, payload) + data[33:]


@pytest.mark.parametrize("pixels", [photo(), gray_photo()])
def test_png_pixels_are_exact(pixels: np.ndarray) -> None:
    assert mean_error(decode(png(pixels)).pixels_HWC, pixels) == 0


def test_alpha_is_composited_over_white() -> None:
    decoded = decode(png(RGBA_HWC))
    assert mean_error(decoded.pixels_HWC, FLATTENED_HWC) == 0
    assert decoded.notes == ("alpha_flattened",)
    hidden_red = np.zeros((8, 8, 4), np.uint8)
    hidden_red[:, :, 0] = 255
    assert decode(png(hidden_red)).pixels_HWC.min() == 255
    opaque = decode(png(np.dstack([photo(), np.full((24, 32), 255, np.uint8)])))
    assert (mean_error(opaque.pixels_HWC, photo()), opaque.notes) == (0, ())


@pytest.mark.parametrize("num_channels", [1, 3, 4])
def test_16_bit_png_is_scaled_by_shifting(num_channels: int) -> None:
    deep = np.random.RandomState(3).randint(0, 65536, (9, 11, num_channels)).astype(np.uint16)
    decoded = decode(png(deep if num_channels > 1 else deep[:, :, 0]))
    expected = over_white(deep[:, :, :3] >> 8, deep[:, :, 3] >> 8) if num_channels == 4 else deep >> 8
    assert mean_error(decoded.pixels_HWC, expected) == 0
    assert decoded.notes[0] == "scaled_16_bit"


@pytest.mark.parametrize(("depth", "transparent"), [(1, 1), (2, 2), (4, 9), (8, 77), (16, 0x1234)])
def test_gray_png_with_one_transparent_value(depth: int, transparent: int) -> None:
    values = [transparent, 0, transparent, (1 << depth) - 1]
    packed = sum(value << depth * (3 - i) for i, value in enumerate(values)) << (4 if depth == 1 else 0)
    row = b"\0" + packed.to_bytes((4 * depth + 7) // 8)
    transparency = png_chunk(b"tRNS", transparent.to_bytes(2))
    decoded = decode(png_by_hand(row, (4, 1), depth, 0, transparency))
    assert decoded.pixels_HWC[0, :, 0].tolist() == [255, 0, 255, 255]
    assert "alpha_flattened" in decoded.notes


def test_palette_png_with_transparency() -> None:
    chunks = png_chunk(b"PLTE", bytes([255, 0, 0, 0, 0, 255])) + png_chunk(b"tRNS", b"\x00\xff")
    decoded = decode(png_by_hand(b"\0\0\1", (2, 1), 8, 3, chunks))
    assert decoded.pixels_HWC[0].tolist() == [[255, 255, 255], [0, 0, 255]]


def test_the_first_frame_of_an_animated_png() -> None:
    animated = insert_chunk(png(photo()), b"acTL", struct.pack(">II", 3, 0))
    decoded = decode(animated)
    assert (mean_error(decoded.pixels_HWC, photo()), decoded.notes) == (0, ("first_frame_of_3",))


def test_png_metadata_changes_no_pixels_and_costs_no_memory() -> None:
    text_bomb = b"Comment\0\0" + zlib.compress(bytes(64_000_000), 9)
    data = insert_chunk(insert_chunk(png(photo()), b"zTXt", text_bomb), b"gAMA", (10_000).to_bytes(4))
    tracemalloc.start()
    decoded = decode(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (mean_error(decoded.pixels_HWC, photo()), decoded.notes) == (0, ())
    assert peak_bytes < 2_000_000


def test_png_orientation() -> None:
    decoded = decode(insert_chunk(png(np.rot90(photo())), b"eXIf", ORIENTATION_6))
    assert (mean_error(decoded.pixels_HWC, photo()), decoded.notes) == (0, ("exif_rotated",))


def test_png_trailing_bytes() -> None:
    assert decode(png(photo()) + b"x").notes == ("trailing_bytes",)


def test_every_flipped_bit_of_a_png_is_noticed() -> None:
    data = png(photo(6, 6))
    for position in range(8, len(data)):
        damaged = data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]
        assert refusal(damaged)[0] in {RejectReason.CHECKSUM, RejectReason.TRUNCATED, RejectReason.BAD_HEADER}
    in_pixels = bytearray(data)
    in_pixels[data.index(b"IDAT") + 8] ^= 1
    assert refusal(bytes(in_pixels)) == (RejectReason.CHECKSUM, "chunk IDAT at byte 33")


def test_every_cut_png_is_truncated() -> None:
    data = png(photo(6, 6))
    for length in range(8, len(data)):
        assert refusal(data[:length])[0] is RejectReason.TRUNCATED


def test_png_with_right_checksums_and_too_few_pixels() -> None:
    assert refusal(png_by_hand(b"\0\1\2", (2, 9), 8, 0))[0] is RejectReason.CORRUPT_SCAN


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png_header(60_000, 60_000, 8, 2), RejectReason.TOO_MANY_PIXELS),
        (png_by_hand(bytes(12_001 * 100), (12_000, 12_000), 8, 0), RejectReason.TOO_MANY_PIXELS),
        (png_header(1, 5000, 8, 0), RejectReason.ASPECT_RATIO),
        (png_header(0, 5, 8, 0), RejectReason.BAD_HEADER),
        (png_header(5, 5, 3, 0), RejectReason.BAD_HEADER),
        (PNG_SIGNATURE + png_chunk(b"IEND", bytes(13)), RejectReason.BAD_HEADER),
        (png_header(5, 5, 8, 0) + png_chunk(b"IEND", b""), RejectReason.BAD_HEADER),
        (png_by_hand(b"\0\0", (1, 1), 8, 3), RejectReason.BAD_HEADER),
    ],
)
def test_png_headers_that_are_refused(data: bytes, reason: RejectReason) -> None:
    assert refusal(data)[0] is reason
