"""GIF and WebP: the first frame on white, exact where the format is, and damage by its name."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from shardmill.images.pixels import Refused
from shardmill.values import RejectReason
from tests.shardmill.images.make import (
    OPTIONS,
    animated_webp,
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
    webp,
)

RGBA_HWC = np.dstack([photo(), ramp_alpha()])
FLATTENED_HWC = over_white(photo(), ramp_alpha())


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
