"""BMP, TIFF, GIF, WebP, AVIF and other formats: each gives the pixels of its lossless twin, or a reject."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from importlib import metadata

import cv2
import numpy as np
import pillow_heif
import pytest
from PIL import Image
from pillow_jxl import JpegXLImagePlugin

from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.manifest import encode_manifest, parse_manifest
from shardmill.images.decoder_id import decoder_id, normalization_fingerprint
from shardmill.images.exif import ROTATED_NOTE
from shardmill.images.icc import CONVERTED_NOTE
from shardmill.images.pixels import Refused
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason
from tests.lab.datasets import make_dataset
from tests.shardmill.images.make import (
    OPTIONS,
    animated_webp,
    avif,
    bmp,
    by_opencv,
    decode,
    gif,
    gif_by_hand,
    gif_frame,
    gray_photo,
    mean_error,
    over_white,
    photo,
    ramp_alpha,
    refusal,
    rgb_profile,
    run_length_bmp,
    tiff,
    tiff_of,
    webp,
    with_pages,
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


Tags = Mapping[int, Sequence[int]]
PREVIEW = np.full((6, 8, 3), 9, np.uint8)


def page(pixels: np.ndarray, tags: Tags | None = None) -> bytes:
    return tiff_of(pixels, tags)


@pytest.mark.parametrize("flag", [{254: [1]}, {255: [2]}, {254: [4]}, {254: [5]}])
def test_a_preview_in_front_is_passed_over(flag: Tags) -> None:
    decoded = decode(with_pages([page(PREVIEW, flag), page(photo())]))
    assert (mean_error(decoded.pixels_HWC, photo()), decoded.notes) == (0, ())
    decoded = decode(with_pages([page(PREVIEW, {**flag, 330: [0]}), page(photo())], tag=330))
    assert (mean_error(decoded.pixels_HWC, photo()), decoded.notes) == (0, ())
    behind = decode(with_pages([page(photo()), page(PREVIEW, flag), page(photo())]))
    assert (mean_error(behind.pixels_HWC, photo()), behind.notes) == (0, ("first_frame_of_2",))


def test_a_larger_page_below_the_first_one_is_the_photo_and_a_smaller_one_is_not() -> None:
    assert mean_error(decode(with_pages([page(PREVIEW, {330: [0]}), page(photo())], tag=330)).pixels_HWC, photo()) == 0
    for flag in ({}, {254: [1]}):
        pyramid = with_pages([page(photo(), {330: [0]}), page(PREVIEW, flag)], tag=330)
        assert mean_error(decode(pyramid).pixels_HWC, photo()) == 0


def test_a_photo_that_does_not_decode_is_not_replaced_by_its_preview() -> None:
    for name, tags, reason in (
        ("compression 7", {259: [7]}, RejectReason.UNSUPPORTED_MODE),
        ("raw photo", {262: [32803]}, RejectReason.UNSUPPORTED_FORMAT),
        ("raw photo", {262: [34892]}, RejectReason.UNSUPPORTED_FORMAT),
    ):
        for pages, tag in (([{254: [1], 330: [0]}, tags], 330), ([{254: [1]}, tags], 0), ([{330: [0]}, tags], 330)):
            data = with_pages([page(PREVIEW, pages[0]), page(photo(), pages[1])], tag=tag)
            found, detail = refusal(data)
            assert found is reason
            assert name in detail
            assert "preview" in detail
    dng = with_pages([page(PREVIEW, {254: [1], 330: [0], 50706: [1025]}), page(photo(), {262: [32803]})], tag=330)
    assert "format=dng" in refusal(dng)[1]
    lost = page(PREVIEW, {254: [1], 330: [1 << 30]})
    assert refusal(lost) == (
        RejectReason.BAD_HEADER,
        "the first page is a preview, and the directory of the photo is damaged",
    )


def test_a_file_of_nothing_but_a_preview_says_so() -> None:
    decoded = decode(page(PREVIEW, {254: [1]}))
    assert (mean_error(decoded.pixels_HWC, PREVIEW), decoded.notes) == (0, ("preview_only",))


@pytest.mark.parametrize("size", [(12, 16), (13, 16), (24, 32), (23, 32), (600, 800)])
@pytest.mark.parametrize("between", [(), ((4, 8),)])
def test_a_first_page_that_may_be_the_preview_of_a_later_one_is_taken_with_a_note(
    size: tuple[int, int], between: Sequence[tuple[int, int]]
) -> None:
    pages = [page(PREVIEW), *(page(photo(*each)) for each in between), page(photo(*size))]
    decoded = decode(with_pages(pages))
    assert mean_error(decoded.pixels_HWC, PREVIEW) == 0
    assert decoded.notes == (f"first_frame_of_{len(pages)}", "larger_page_behind")
    behind_a_preview = decode(with_pages([page(PREVIEW[:3, :4], {254: [1]}), *pages]))
    assert mean_error(behind_a_preview.pixels_HWC, PREVIEW) == 0
    assert behind_a_preview.notes == decoded.notes


@pytest.mark.parametrize("size", [(6, 8), (3, 4), (11, 15), (24, 24), (12, 40), (32, 24)])
def test_pages_of_a_document_and_of_a_pyramid_are_no_previews_of_each_other(size: tuple[int, int]) -> None:
    decoded = decode(with_pages([page(PREVIEW), page(photo(*size)), page(PREVIEW)]))
    assert (mean_error(decoded.pixels_HWC, PREVIEW), decoded.notes) == (0, ("first_frame_of_3",))
    mask = decode(with_pages([page(PREVIEW), page(photo(), {254: [4]})]))
    assert (mean_error(mask.pixels_HWC, PREVIEW), mask.notes) == (0, ())


@pytest.mark.parametrize(
    ("head", "name"),
    [(b"II*\0\x10\0\0\0CR\2\0", "cr2"), (b"IIU\0", "rw2"), (b"IIRO", "orf"), (b"FUJIFILMCCD-RAW", "raf")],
)
def test_other_raw_photos_are_named(head: bytes, name: str) -> None:
    reason, detail = refusal(head + page(PREVIEW)[len(head) :] if name != "cr2" else _as_canon(head))
    assert reason is RejectReason.UNSUPPORTED_FORMAT
    assert f"format={name}" in detail


def _as_canon(head: bytes) -> bytes:
    """A preview that decodes, its directory 8 bytes further on."""
    data = tiff({256: [8], 257: [6], 258: [8], 262: [1]}, [bytes(48)])
    moved = bytearray(head + bytes(4) + data[8:])
    for entry in range(18, 18 + 12 * struct.unpack_from("<H", moved, 16)[0], 12):
        if struct.unpack_from("<H", moved, entry)[0] == 273:
            struct.pack_into("<I", moved, entry + 8, struct.unpack_from("<I", moved, entry + 8)[0] + 8)
    return bytes(moved)


def bands(count: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.RandomState(count).randint(0, 256, (24, 32, count)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("photometric", [0, 1])
def test_bands_without_colours_are_refused(photometric: int, count: int, dtype: type) -> None:
    for extra in ({}, {338: [0] * (count - 1)}, {338: [2] + [0] * (count - 2)} if count > 2 else {338: [0]}):
        reason, detail = refusal(tiff_of(bands(count, dtype), {262: [photometric], **extra}))
        assert reason is RejectReason.UNSUPPORTED_MODE
        assert f"{count} bands that are no colours" in detail


@pytest.mark.parametrize("count", [4, 5, 6])
def test_bands_beside_colours_are_dropped_with_a_note(count: int) -> None:
    for extra in ({}, {338: [0] * (count - 3)}):
        decoded = decode(tiff_of(bands(count), extra))
        assert mean_error(decoded.pixels_HWC, bands(count)[:, :, :3]) == 0
        assert decoded.notes == ("extra_bands_dropped",)
    inks = bands(count)
    if count > 4:
        notes = decode(tiff_of(inks, {262: [5]})).notes
        assert notes == ("extra_bands_dropped", "cmyk_converted")


def test_alpha_is_found_among_the_other_bands() -> None:
    stored = bands(5)
    stored[:, :, 4] = 0
    decoded = decode(tiff_of(stored, {338: [0, 2]}))
    assert np.all(decoded.pixels_HWC == 255)
    assert decoded.notes == ("extra_bands_dropped", "alpha_flattened")
    both = np.dstack([gray_photo(), np.zeros_like(gray_photo())])
    assert decode(tiff_of(both, {262: [1], 338: [2]})).notes == ("alpha_flattened",)
    planes = [stored[:, :, channel].tobytes() for channel in range(5)]
    layout = {256: [32], 257: [24], 278: [24], 258: [8] * 5, 262: [2], 277: [5], 284: [2], 338: [0, 2]}
    assert np.all(decode(tiff(layout, planes)).pixels_HWC == 255)


def test_gif_first_frame_is_exact() -> None:
    assert decode(gif(gray_photo())).notes == ()
    decoded = decode(gif(gray_photo(), 255 - gray_photo(), gray_photo()))
    assert mean_error(decoded.pixels_HWC, np.repeat(gray_photo()[:, :, np.newaxis], 3, axis=2)) == 0
    assert decoded.notes == ("first_frame_of_3",)


def test_gif_with_an_offset_frame_and_transparency_lies_on_white() -> None:
    control = b"\x21\xf9\x04" + struct.pack("<BHB", 1, 0, 2) + b"\0"
    decoded = decode(gif_by_hand(gif_frame(1, 1, 2, 1, [4, 1, 2, 5]), control=control))
    white = [255, 255, 255]
    assert decoded.pixels_HWC.tolist() == [[white] * 3, [white, [10, 20, 30], white]]
    assert decoded.notes == ("alpha_flattened",)


@pytest.mark.parametrize(
    ("frame", "screen", "reason"),
    [
        (gif_frame(0, 0, 3, 1, [4, 1, 2, 5]), (3, 2), RejectReason.TRUNCATED),  # ends one pixel early
        (gif_frame(0, 0, 3, 1, [4, 1, 7]), (3, 2), RejectReason.CORRUPT_SCAN),  # a code from nowhere
        (gif_frame(0, 0, 3, 1, [4, 1]), (3, 2), RejectReason.TRUNCATED),  # no end code; the file itself is whole
        (gif_frame(0, 0, 0, 1, [4, 1, 5]), (3, 2), RejectReason.BAD_HEADER),
        (gif_frame(3, 0, 1, 1, [4, 1, 5]), (3, 2), RejectReason.BAD_HEADER),
        (gif_frame(0, 0, 3, 1, [4] * 99), (3, 2), RejectReason.TRUNCATED),
        (gif_frame(0, 0, 1, 1, [4, 1, 5]), (0, 2), RejectReason.BAD_HEADER),
        (gif_frame(0, 0, 1, 1, [4, 1, 5]), (65535, 65535), RejectReason.TOO_MANY_PIXELS),
        (gif_frame(0, 0, 65535, 65535, [4, 1, 5]), (3, 2), RejectReason.TOO_MANY_PIXELS),
        (b"", (3, 2), RejectReason.BAD_HEADER),
        (b"\x77", (3, 2), RejectReason.BAD_HEADER),
    ],
)
def test_gifs_that_are_refused(frame: bytes, screen: tuple[int, int], reason: RejectReason) -> None:
    assert refusal(gif_by_hand(frame, screen))[0] is reason


def test_a_cut_gif_shows_its_whole_first_frame_or_is_refused() -> None:
    one, two = gif(gray_photo(8, 8)), gif(gray_photo(8, 8), 255 - gray_photo(8, 8))
    num_shown = 0
    for length in range(6, len(two)):
        try:
            shown = decode(two[:length])
        except Refused as refusal:
            assert refusal.reason in (RejectReason.TRUNCATED, RejectReason.BAD_HEADER, RejectReason.CORRUPT_SCAN)
        else:
            assert np.array_equal(shown.pixels_HWC[:, :, 0], gray_photo(8, 8)), length
            num_shown += 1
    assert 0 < num_shown < len(two) - len(one) / 2
    assert decode(one + b"x").notes == ()


def test_gif_frames_beside_the_screen_are_cut_and_have_no_background() -> None:
    hanging_over = decode(gif_by_hand(gif_frame(2, 1, 2, 1, [4, 1, 2, 5])))
    white = [255, 255, 255]
    assert hanging_over.pixels_HWC.tolist() == [[white] * 3, [white, white, [10, 20, 30]]]
    assert hanging_over.notes == ("alpha_flattened",)


def test_a_gif_with_a_colour_that_its_palette_lacks_is_damaged() -> None:
    palette = bytes([0, 0, 0, 10, 20, 30])
    head = b"GIF89a" + struct.pack("<HHBBB", 3, 1, 0xF0, 0, 0) + palette
    reason, detail = refusal(head + gif_frame(0, 0, 3, 1, [4, 1, 3, 1, 5]) + b"\x3b")
    assert (reason, detail) == (RejectReason.CORRUPT_SCAN, "colour 3 of 2")


def test_interlaced_gif_rows_are_put_in_order() -> None:
    data = bytearray(gif(gray_photo(11, 7)))
    data[data.index(b"\x2c\0\0\0\0") + 9] = 0x40
    row_order = [*range(0, 11, 8), *range(4, 11, 8), *range(2, 11, 4), *range(1, 11, 2)]
    assert np.array_equal(decode(bytes(data)).pixels_HWC[row_order, :, 0], gray_photo(11, 7))


def test_webp_lossless_alpha_and_lossy() -> None:
    assert mean_error(decode(webp(photo())).pixels_HWC, photo()) == 0
    decoded = decode(webp(RGBA_HWC))
    assert (mean_error(decoded.pixels_HWC, FLATTENED_HWC) < 1, decoded.notes) == (True, ("alpha_flattened",))
    lossy = webp(RGBA_HWC, 95)
    assert b"ALPH" in lossy
    assert mean_error(decode(lossy).pixels_HWC, FLATTENED_HWC) < 12


def test_animated_webp_shows_its_first_frame_on_white() -> None:
    decoded = decode(animated_webp(3))
    expected = np.full((30, 40, 3), 255, np.uint8)
    expected[2:26, 4:36] = photo()
    assert mean_error(decoded.pixels_HWC, expected) == 0
    assert decoded.notes == ("first_frame_of_3", "alpha_flattened")


def test_filters_look_at_the_canvas_and_not_at_a_frame_of_it() -> None:
    strict = OPTIONS.model_copy(update={"min_source_side_pixels": 30, "max_aspect_ratio": 1.35})
    assert decode(animated_webp(1), strict).pixels_HWC.shape == (30, 40, 3)
    one_pixel_high = gif_by_hand(gif_frame(0, 0, 3, 1, [4, 1, 1, 1, 5]), (40, 30))
    assert decode(one_pixel_high, strict).pixels_HWC.shape == (30, 40, 3)


def test_damaged_webp() -> None:
    data = webp(photo())
    for length in (13, 25, len(data) // 2, len(data) - 1):
        assert refusal(data[:length])[0] is RejectReason.TRUNCATED
    assert decode(data + b"xyz").notes == ("trailing_bytes",)
    shorter = data[: len(data) // 2 // 2 * 2]
    consistent = b"RIFF" + struct.pack("<I", len(shorter) - 8) + b"WEBPVP8L" + struct.pack("<I", len(shorter) - 20)
    assert refusal(consistent + shorter[20:])[0] is RejectReason.CORRUPT_SCAN
    assert refusal(b"RIFF\4\0\0\0WEBP")[0] is RejectReason.BAD_HEADER
    bomb = b"\x2f" + struct.pack("<I", 16383 | 16383 << 14)
    assert (
        refusal(b"RIFF" + struct.pack("<I", 18) + b"WEBPVP8L\5\0\0\0" + bomb + b"\0")[0] is RejectReason.TOO_MANY_PIXELS
    )


def test_pixels_are_those_of_the_picture_but_for_the_loss_of_the_codec() -> None:
    decoded = decode(avif(photo(), quality=100))
    assert mean_error(decoded.pixels_HWC, photo()) < 1.5 and decoded.notes == ()


def test_alpha_lies_on_white_and_of_an_animation_the_first_frame_is_taken() -> None:
    flattened = decode(avif(np.dstack([photo(), ramp_alpha()]), quality=100))
    assert mean_error(flattened.pixels_HWC, over_white(photo(), ramp_alpha())) < 2.5
    assert flattened.notes == ("alpha_flattened",)
    file = io.BytesIO()
    others = [Image.fromarray(255 - photo())] * 2
    Image.fromarray(photo()).save(file, "AVIF", save_all=True, append_images=others, quality=100)
    animated = decode(file.getvalue())
    assert mean_error(animated.pixels_HWC, photo()) < 3 and animated.notes == ("first_frame_of_3",)


@pytest.mark.parametrize(("orientation", "upright"), [(6, np.rot90(photo(), -1)), (4, photo()[::-1])])
def test_the_turn_of_the_container_is_applied_once(orientation: int, upright: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode(avif(photo(), quality=100, exif=exif))
    assert mean_error(decoded.pixels_HWC, upright) < 1.5 and decoded.notes == (ROTATED_NOTE,)


def test_a_profile_is_converted() -> None:
    assert decode(avif(photo(), icc_profile=rgb_profile())).notes == (CONVERTED_NOTE,)


def test_damage_and_sizes_beyond_the_limits_are_refused() -> None:
    data = avif(photo())
    assert refusal(data[:-40])[0] in (RejectReason.TRUNCATED, RejectReason.CORRUPT_SCAN)
    assert refusal(data[:60])[0] in (RejectReason.TRUNCATED, RejectReason.BAD_HEADER)
    # The size that the container declares is looked at before anything is decoded.
    sized = data.replace(struct.pack(">II", 32, 24), struct.pack(">II", 30_001, 24))
    assert sized != data and refusal(sized)[0] is RejectReason.TOO_MANY_PIXELS
    small = OPTIONS.model_copy(update={"min_source_side_pixels": 25})
    assert refusal(data, small)[0] is RejectReason.TOO_SMALL


@pytest.mark.parametrize(
    ("brands", "expected"),
    [(b"mif1\0\0\0\0avifmif1", RejectReason.TRUNCATED), (b"mif1\0\0\0\0heicmif1", RejectReason.UNSUPPORTED_FORMAT)],
)
def test_a_container_of_any_codec_is_recognized_by_its_compatible_brands(brands: bytes, expected: RejectReason) -> None:
    assert refusal(struct.pack(">I", 8 + len(brands)) + b"ftyp" + brands)[0] is expected


MORE = OPTIONS.model_copy(update={"more_formats": ("heic", "jpeg_xl")})
SAVED = {"heic": "HEIF", "jpeg_xl": JpegXLImagePlugin.JXLImageFile.format}
EVERY = pytest.mark.parametrize("name", SAVED)


def encoded(name: str, pixels_HWC: np.ndarray) -> bytes:
    pillow_heif.register_heif_opener()
    file = io.BytesIO()
    options = {"quality": 100, "chroma": 444} if name == "heic" else {"lossless": True}
    Image.fromarray(pixels_HWC).save(file, SAVED[name], **options)
    return file.getvalue()


@EVERY
def test_they_are_accepted_if_the_options_name_them(name: str) -> None:
    data = encoded(name, photo())
    reason, detail = refusal(data)
    assert reason is RejectReason.UNSUPPORTED_FORMAT and f'etl.more_formats = ["{name}"] accepts it' in detail
    decoded = decode(data, MORE)
    assert mean_error(decoded.pixels_HWC, photo()) < 1.5 and decoded.notes == ()
    flattened = decode(encoded(name, np.dstack([photo(), ramp_alpha()])), MORE)
    assert mean_error(flattened.pixels_HWC, over_white(photo(), ramp_alpha())) < 2
    assert flattened.notes == ("alpha_flattened",)


@EVERY
@pytest.mark.parametrize("shape_HW", [(24, 24), (77, 100), (480, 640), (3, 250)])
def test_sizes_are_checked_before_anything_is_decoded(name: str, shape_HW: tuple[int, int]) -> None:
    data = encoded(name, photo(*shape_HW))
    assert decode(data, MORE).pixels_HWC.shape[:2] == shape_HW
    limited = MORE.model_copy(update={"max_source_side_pixels": max(shape_HW) - 1})
    reason, detail = refusal(data, limited)
    assert reason is RejectReason.TOO_MANY_PIXELS and f"declares {shape_HW[1]}x{shape_HW[0]}" in detail
    damaged = (RejectReason.TRUNCATED, RejectReason.BAD_HEADER, RejectReason.CORRUPT_SCAN)
    assert refusal(data[: len(data) // 2], MORE)[0] in damaged
    assert refusal(data[:14], MORE)[0] in damaged


# Three frames of 24 x 32 pixels: dark, gray, bright. The plugin decodes the last one, and writes no animations.
ANIMATED = (
    "ff0ac5044d0020260804010040004b188b158055fe7f0000a50300d01c090804010044004b188b15801dfcff0000500700182d22010804050044"
    "004b188b15805dfcff000052070050294202"
)


def test_an_animated_jpeg_xl_is_refused() -> None:
    data = bytes.fromhex(ANIMATED)
    assert refusal(data, MORE) == (RejectReason.UNSUPPORTED_MODE, "jpeg_xl with an animation")


def test_the_size_of_a_jpeg_xl_may_have_its_longest_form() -> None:
    # 1 bit (not small), the selector and 30 bits of the height, no ratio, the selector and 30 bits of the width.
    size = 0 | 3 << 1 | (24 - 1) << 3 | 0 << 33 | 3 << 36 | (40 - 1) << 38
    data = b"\xff\x0a" + (size | 1 << 68).to_bytes(9, "little")
    # All that is missing is the picture behind its head.
    assert refusal(data, MORE)[0] is RejectReason.BAD_HEADER
    limited = MORE.model_copy(update={"max_source_side_pixels": 39})
    assert refusal(data, limited)[0] is RejectReason.TOO_MANY_PIXELS


def test_a_jpeg_xl_that_was_made_from_a_jpeg_is_upright_too(tmp_path) -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    Image.fromarray(photo(24, 40)).save(tmp_path / "turned.jpg", quality=95, subsampling=0, exif=exif)
    file = io.BytesIO()
    Image.open(tmp_path / "turned.jpg").save(file, SAVED["jpeg_xl"], lossless_jpeg=True)
    decoded = decode(file.getvalue(), MORE)
    assert decoded.orientation == 6 and decoded.pixels_HWC.shape == (40, 24, 3)
    assert mean_error(decoded.pixels_HWC, np.rot90(photo(24, 40), -1)) < 3


def test_the_packages_are_part_of_the_id_and_of_the_manifest(tmp_path) -> None:
    assert decoder_id(MORE).endswith(f"+pillow-jxl-plugin-{metadata.version('pillow-jxl-plugin')}")
    assert "heif" not in decoder_id(OPTIONS)
    assert normalization_fingerprint(MORE) != normalization_fingerprint(OPTIONS)
    manifest = open_dataset(make_dataset(tmp_path, num_images=12)).manifest
    asked = manifest.model_copy(update={"normalize": NormalizeOptions(more_formats=("heic",))})
    assert parse_manifest(encode_manifest(asked), 1, "").normalize.more_formats == ("heic",)
