"""TIFFs of several pages or bands: a preview is not taken for the photo, and no band is dropped in silence."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from shardmill.values import RejectReason
from tests.shardmill.images.make import decode, gray_photo, mean_error, photo, refusal, tiff, tiff_of, with_pages

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
