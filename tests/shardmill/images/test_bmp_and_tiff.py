"""BMP and TIFF: exact pixels in every layout that we read, and every other layout refused by name."""

from __future__ import annotations

import struct
import zlib

import cv2
import numpy as np
import pytest

from shardmill.values import RejectReason
from tests.shardmill.images.make import (
    bmp,
    by_opencv,
    decode,
    gray_photo,
    mean_error,
    over_white,
    photo,
    ramp_alpha,
    refusal,
    run_length_bmp,
    tiff,
    tiff_of,
)

RGBA_HWC = np.dstack([photo(), ramp_alpha()])
FLATTENED_HWC = over_white(photo(), ramp_alpha())


def bmp_by_hand(size: tuple[int, int], depth: int, compression: int, masks: tuple[int, ...], rows: bytes) -> bytes:
    """A file with a header of version 4."""
    head = struct.pack("<IiiHHIIiiII", 108, *size, 1, depth, compression, len(rows), 0, 0, 0, 0)
    head += struct.pack(f"<{len(masks)}I", *masks)
    head = head.ljust(108, b"\0")
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(rows), 0, 0, 14 + len(head)) + head + rows


def test_bmp_pixels_are_exact_and_checked() -> None:
    data = bmp(photo())
    assert mean_error(decode(data).pixels_HWC, photo()) == 0
    assert refusal(data[:-1])[0] is RejectReason.TRUNCATED
    assert refusal(data[:30])[0] is RejectReason.TRUNCATED
    assert mean_error(decode(data + bytes(99)).pixels_HWC, photo()) == 0
    assert refusal(data[:18] + struct.pack("<ii", 30_000, -30_000) + data[26:])[0] is RejectReason.TOO_MANY_PIXELS
    assert refusal(data[:18] + struct.pack("<ii", -5, 5) + data[26:])[0] is RejectReason.TOO_MANY_PIXELS
    assert refusal(data[:30] + struct.pack("<I", 4) + data[34:])[0] is RejectReason.UNSUPPORTED_FORMAT
    assert refusal(data[:30] + struct.pack("<I", 9) + data[34:])[0] is RejectReason.UNSUPPORTED_MODE


@pytest.mark.parametrize("is_top_down", [False, True])
def test_bmp_with_alpha(is_top_down: bool) -> None:
    masks = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    rows_HWC = RGBA_HWC[:, :, [2, 1, 0, 3]][:: 1 if is_top_down else -1]
    data = bmp_by_hand((32, -24 if is_top_down else 24), 32, 3, masks, rows_HWC.tobytes())
    decoded = decode(data)
    assert (mean_error(decoded.pixels_HWC, FLATTENED_HWC), decoded.notes) == (0, ("alpha_flattened",))
    swapped = bmp_by_hand((32, 24), 32, 3, (0xFF, 0xFF00, 0xFF0000, 0), rows_HWC.tobytes())
    assert refusal(swapped)[0] is RejectReason.UNSUPPORTED_MODE


def test_bmp_of_sixteen_bits() -> None:
    """Five or six bits of a channel: all of them set is white."""
    colors = np.array([[0, 0x1F, 0x3E0, 0x7C00, 0x7FFF]], np.uint16)
    expected = [[[0, 0, 0], [0, 0, 255], [0, 255, 0], [255, 0, 0], [255, 255, 255]]]
    rows = colors.astype("<u2").tobytes() + b"\0\0"
    assert decode(bmp_by_hand((5, 1), 16, 0, (), rows)).pixels_HWC.tolist() == expected
    rows = np.array([[0, 0x1F, 0x7E0, 0xF800, 0xFFFF]], "<u2").tobytes() + b"\0\0"
    assert decode(bmp_by_hand((5, 1), 16, 3, (0xF800, 0x7E0, 0x1F), rows)).pixels_HWC.tolist() == expected


def test_run_length_bmp() -> None:
    data = run_length_bmp()
    one, two = [10, 20, 30], [40, 50, 60]
    assert decode(data).pixels_HWC.tolist() == [[one, two, one, two], [one] * 4]
    assert refusal(data[:-8])[0] is RejectReason.CORRUPT_SCAN


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("pixels", [photo(), gray_photo()])
def test_tiff_pixels_are_exact(pixels: np.ndarray, byte_order: str) -> None:
    assert mean_error(decode(tiff_of(pixels, byte_order=byte_order)).pixels_HWC, pixels) == 0
    deep = decode(tiff_of(pixels.astype(np.uint16) * 257, byte_order=byte_order))
    assert (mean_error(deep.pixels_HWC, pixels), deep.notes) == (0, ("scaled_16_bit",))


@pytest.mark.parametrize("compression", [1, 5, 8, 32946, 32773])
@pytest.mark.parametrize("pixels", [photo(61, 83), gray_photo(61, 83)])
def test_compressed_tiff_pixels_are_exact(pixels: np.ndarray, compression: int) -> None:
    data = by_opencv(".tiff", pixels, [cv2.IMWRITE_TIFF_COMPRESSION, compression])
    assert mean_error(decode(data).pixels_HWC, pixels) == 0


def test_tiff_alpha_planes_palette_and_inks() -> None:
    for kind, notes in ((0, ("extra_bands_dropped",)), (2, ("alpha_flattened",))):
        decoded = decode(tiff_of(RGBA_HWC, {338: [kind]}))
        assert mean_error(decoded.pixels_HWC, FLATTENED_HWC if kind else photo()) == 0
        assert decoded.notes == notes
    premultiplied = np.dstack([photo() // 2, np.full((24, 32), 128, np.uint8)])
    assert mean_error(decode(tiff_of(premultiplied, {338: [1]})).pixels_HWC, premultiplied[:, :, :3] + 127.0) == 0

    layout = {256: [32], 257: [24], 278: [24]}
    planes = [photo()[:, :, channel].tobytes() for channel in range(3)]
    planar = tiff({**layout, 258: [8] * 3, 262: [2], 277: [3], 284: [2]}, planes)
    assert mean_error(decode(planar).pixels_HWC, photo()) == 0
    negative = tiff({**layout, 258: [8], 262: [0]}, [(255 - gray_photo()).tobytes()])
    assert mean_error(decode(negative).pixels_HWC, gray_photo()) == 0
    color_map = [257 * (255 - i) for i in range(256)] + [257 * i for i in range(256)] + [0] * 256
    palette = decode(tiff({**layout, 258: [8], 262: [3], 320: color_map}, [gray_photo().tobytes()]))
    expected = np.dstack([255 - gray_photo(), gray_photo(), np.zeros_like(gray_photo())])
    assert mean_error(palette.pixels_HWC, expected) == 0
    inks = decode(tiff({**layout, 258: [8] * 4, 262: [5], 277: [4]}, [RGBA_HWC.tobytes()]))
    light = 255.0 - RGBA_HWC
    assert mean_error(inks.pixels_HWC, np.floor(light[:, :, :3] * light[:, :, 3:] / 255 + 0.5)) == 0
    assert inks.notes == ("cmyk_converted",)
    bits = tiff({**layout, 258: [1], 262: [1]}, [np.packbits(gray_photo() > 127, axis=1).tobytes()])
    assert mean_error(decode(bits).pixels_HWC, (gray_photo() > 127) * 255) == 0


def test_tiff_orientation_and_pages() -> None:
    decoded = decode(tiff_of(np.ascontiguousarray(np.rot90(photo())), {274: [6]}))
    assert (mean_error(decoded.pixels_HWC, photo()), decoded.notes) == (0, ("exif_rotated",))
    _, encoded = cv2.imencodemulti(".tiff", [photo()[:, :, ::-1], photo()])
    assert decode(encoded.tobytes()).notes == ("first_frame_of_2",)


@pytest.mark.parametrize(
    ("tags", "named"),
    [
        ({339: [3]}, "sample format 3"),
        ({262: [8]}, "photometric interpretation 8"),
        ({259: [7]}, "compression 7"),
        ({322: [16]}, "tiles"),
        ({258: [4] * 3}, "[4] bits"),
        ({317: [3]}, "predictor 3"),
        ({266: [2]}, "fill order"),
    ],
)
def test_tiff_modes_that_are_unsupported(tags: dict[int, list[int]], named: str) -> None:
    reason, detail = refusal(tiff_of(photo(), tags))
    assert reason is RejectReason.UNSUPPORTED_MODE
    assert named in detail


def test_damaged_tiff() -> None:
    layout = {256: [32], 257: [24], 258: [8], 262: [1]}
    strip = zlib.compress(gray_photo().tobytes())
    assert decode(tiff({**layout, 259: [8]}, [strip])).notes == ()
    flipped = strip[:-1] + bytes([strip[-1] ^ 1])
    for compression, damaged in (
        (8, flipped),
        (8, strip[: len(strip) // 2]),
        (8, strip[:-4]),
        (1, bytes(700)),
        (32773, b"\x81\0"),
    ):
        assert refusal(tiff({**layout, 259: [compression]}, [damaged]))[0] is RejectReason.CORRUPT_SCAN
    filled_up = zlib.compress(gray_photo().tobytes() + bytes(999))
    assert decode(tiff({**layout, 259: [8]}, [filled_up])).notes == ()
    data = tiff_of(photo())
    assert refusal(data[:-1])[0] is RejectReason.TRUNCATED
    assert refusal(data[:8] + data[9:20])[0] is RejectReason.BAD_HEADER
    assert refusal(tiff_of(photo(), {257: [60_000], 256: [60_000]}))[0] is RejectReason.TOO_MANY_PIXELS
    assert refusal(tiff_of(photo(), {278: [5]}))[0] is RejectReason.BAD_HEADER


def test_tiff_directories_that_form_a_loop_end() -> None:
    data = tiff({256: [32], 257: [24], 258: [8], 262: [1]}, [gray_photo().tobytes()], next_page=8)
    assert refusal(data) == (RejectReason.BAD_HEADER, "the directories form a loop")
