"""PNG, 16 bits, and what the first bytes of a file say."""

from __future__ import annotations

import struct
import subprocess
import tracemalloc
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.augment import pixels as colours
from shardmill.augment.draws import Draws
from shardmill.augment.options import AugmentOptions
from shardmill.augment.pixels import OPERATIONS, change_pixels
from shardmill.images.decode import DECODERS, sniff_format
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason
from tests.shardmill.images.make import (
    OPTIONS,
    PNG_SIGNATURE,
    decode,
    gray_photo,
    mean_error,
    one_of_each_format,
    over_white,
    photo,
    png,
    png_by_hand,
    png_chunk,
    png_header,
    ramp_alpha,
    refusal,
    tiff,
    tiff_of,
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


def of_bits(num_bits: int, channels: int = 3) -> np.ndarray:
    """Samples over that range, 1 the smallest and the largest among them."""
    most = (1 << num_bits) - 1
    stored = (photo().astype(np.uint32) * most // 255).astype(np.uint16)
    stored[0, 0], stored[0, 1] = most, 1
    return stored[:, :, 0] if channels == 1 else stored


def with_significant_bits(data: bytes, *bits: int) -> bytes:
    """The PNG with a chunk sBIT behind its header."""
    return data[:33] + png_chunk(b"sBIT", bytes(bits)) + data[33:]


@pytest.mark.parametrize("num_bits", [9, 10, 12, 14, 15])
@pytest.mark.parametrize("channels", [1, 3])
def test_bits_that_a_file_declares_count(num_bits: int, channels: int) -> None:
    stored = of_bits(num_bits, channels)
    expected = (stored >> (num_bits - 8)).reshape(24, 32, channels)
    most = (1 << num_bits) - 1
    for data in (
        with_significant_bits(png(stored), *[num_bits] * channels),
        tiff_of(stored, {281: [most] * channels}),
        tiff_of(stored, {341: [most] * channels}),
    ):
        decoded = decode(data)
        assert np.array_equal(decoded.pixels_HWC, expected)
        assert decoded.notes == (f"scaled_{num_bits}_bit",)


def test_a_declaration_that_the_samples_do_not_keep_is_ignored() -> None:
    stored = of_bits(16)
    for data in (
        with_significant_bits(png(stored), 12, 12, 12),
        tiff_of(stored, {281: [4095]}),
        tiff_of(stored, {281: [60_000]}),
        with_significant_bits(png(stored), 16, 16, 16),
    ):
        decoded = decode(data)
        assert np.array_equal(decoded.pixels_HWC, stored >> 8)
        assert decoded.notes == ("scaled_16_bit",)


def test_samples_that_the_standard_way_spreads_over_16_bits_stay_as_dark_as_they_are() -> None:
    """A night photo of 12 bits: below the declared bits are the highest ones again, which are all 0."""
    stored = (photo().astype(np.uint16)) << 4
    decoded = decode(with_significant_bits(png(stored), 12, 12, 12))
    assert np.array_equal(decoded.pixels_HWC, stored >> 8)
    assert decoded.notes == ("low_range_16_bit", "scaled_16_bit")


@pytest.mark.parametrize("num_bits", [10, 12, 14])
def test_a_low_range_without_a_declaration_is_noted_and_scaled_if_the_options_say_so(num_bits: int) -> None:
    stored = of_bits(num_bits)
    options = OPTIONS.model_copy(update={"significant_bits": num_bits})
    for data in (png(stored), tiff_of(stored)):
        dark = decode(data)
        assert np.array_equal(dark.pixels_HWC, stored >> 8)
        assert dark.notes == ("low_range_16_bit", "scaled_16_bit")
        decoded = decode(data, options)
        assert np.array_equal(decoded.pixels_HWC, stored >> (num_bits - 8))
        assert decoded.notes == (f"scaled_{num_bits}_bit",)
        reason, detail = refusal(png(of_bits(16)), options)
        assert reason is RejectReason.UNSUPPORTED_MODE
        assert f"significant_bits = {num_bits}" in detail


def test_what_is_bright_or_black_has_no_note() -> None:
    assert decode(png(of_bits(15))).notes == ("scaled_16_bit",)
    assert decode(png(np.zeros((24, 32), np.uint16))).notes == ("scaled_16_bit",)
    assert decode(png(photo()), NormalizeOptions(significant_bits=12)).notes == ()


def test_alpha_keeps_its_own_range() -> None:
    stored = of_bits(12)
    options = OPTIONS.model_copy(update={"significant_bits": 12})
    for opaque in (4095, 65535):
        rgba = np.dstack([stored, np.full((24, 32), opaque, np.uint16)])
        for data in (png(rgba), tiff_of(rgba, {338: [2]})):
            decoded = decode(data, options)
            assert np.array_equal(decoded.pixels_HWC, stored >> 4)
            assert decoded.notes == ("scaled_12_bit",)


def test_a_palette_of_eight_bits_is_not_black() -> None:
    indices = np.arange(24 * 32).reshape(24, 32).astype(np.uint8)
    layout = {256: [32], 257: [24], 258: [8], 262: [3], 278: [24]}
    decoded = decode(tiff({**layout, 320: list(range(256)) * 3}, [indices.tobytes()]))
    assert np.array_equal(decoded.pixels_HWC[:, :, 0], indices)


EVERYTHING = {
    "random_vertical_flip": True, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1,
    "rand_augment_operations": 2, "random_erasing": 0.5,
}  # fmt: skip


def draws_of(sample_ids: list[int], seed: int = 0) -> Draws:
    return Draws(seed, 0, np.array(sample_ids, np.int64), np.zeros(len(sample_ids), np.int64))


def changed(num_rows: int, num_channels: int = 3, first: int = 0, **options: object) -> np.ndarray:
    images_NHWC = np.repeat(photo(24, 20)[None, :, :, :num_channels], num_rows, axis=0)
    change_pixels(images_NHWC, draws_of(list(range(first, first + num_rows))), AugmentOptions(**options))  # pyright: ignore
    return images_NHWC


@given(
    sample_ids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6),
    names=st.sets(st.sampled_from(sorted(EVERYTHING))), num_channels=st.sampled_from([1, 3]),
)  # fmt: skip
def test_a_row_does_not_depend_on_the_others(sample_ids: list[int], names: set[str], num_channels: int) -> None:
    options = AugmentOptions(**{name: EVERYTHING[name] for name in names})  # pyright: ignore[reportArgumentType]
    images_NHWC = np.repeat(photo(11, 13)[None, :, :, :num_channels], len(sample_ids), axis=0)
    before_NHWC = images_NHWC.copy()
    change_pixels(images_NHWC, draws_of(sample_ids), options)
    for row, sample_id in enumerate(sample_ids):
        change_pixels(before_NHWC[row : row + 1], draws_of([sample_id]), options)
    assert np.array_equal(images_NHWC, before_NHWC)


def test_nothing_changes_by_default() -> None:
    for options in ({}, {"preset": "imagenet"}, {"preset": "cifar"}, {"preset": "none"}):
        assert np.array_equal(changed(3, **options), changed(3))
    assert np.array_equal(changed(1)[0], photo(24, 20))


def test_half_of_the_rows_are_upside_down() -> None:
    images_NHWC, stored_HWC = changed(200, random_vertical_flip=True), photo(24, 20)
    is_flipped_N = (images_NHWC == stored_HWC[::-1]).all(axis=(1, 2, 3))
    is_same_N = (images_NHWC == stored_HWC).all(axis=(1, 2, 3))
    assert (is_flipped_N ^ is_same_N).all()
    assert 75 < is_flipped_N.sum() < 125


def test_brightness_and_contrast_spread_about_the_stored_image() -> None:
    stored = photo(24, 20).astype(float)
    means_N = changed(400, brightness=0.3).mean(axis=(1, 2, 3)) / stored.mean()
    assert 0.69 < means_N.min() < 0.72
    assert means_N.max() > 1.15  # the brightest values are clipped
    assert np.histogram(means_N, 3, (0.7, 1.15))[0].min() > 80
    spreads_N = changed(400, contrast=0.5).std(axis=(1, 2, 3)) / stored.std()
    assert spreads_N.min() < 0.55
    assert spreads_N.max() > 1.2


def test_colours_are_those_of_the_textbook() -> None:
    image_HWC = photo(24, 20)
    grey_HW = cv2.cvtColor(image_HWC, cv2.COLOR_RGB2GRAY)
    assert np.array_equal(colours.change_saturation(image_HWC, 0)[:, :, 1], grey_HW)
    assert np.array_equal(colours.change_saturation(image_HWC, 1), image_HWC)
    assert (colours.change_contrast(image_HWC, 0) == round(grey_HW.mean())).all()
    assert np.array_equal(colours.change_contrast(image_HWC, 1), image_HWC)
    assert np.array_equal(colours.change_brightness(image_HWC, 0.5), np.rint(image_HWC / 2))
    far_HWC = round(grey_HW.mean()) + 1.25 * (image_HWC.astype(float) - round(grey_HW.mean()))
    assert np.array_equal(colours.change_contrast(image_HWC, 1.25), np.clip(np.rint(far_HWC), 0, 255))
    assert np.array_equal(colours.posterize(image_HWC, 4), image_HWC // 16 * 16)
    assert np.array_equal(colours.solarize(image_HWC, 0), 255 - image_HWC)
    assert colours.stretch_contrast(image_HWC // 2).max(axis=(0, 1)).tolist() == [255] * 3
    primary = np.array([[[250, 0, 0]]], np.uint8)
    turned = np.rint(colours.change_hue(primary, 1 / 3)).astype(int).ravel().tolist()
    assert turned[0] < 10 and turned[1] == 250 and turned[2] < 10
    for change in (colours.change_saturation, colours.change_hue):
        assert np.array_equal(change(image_HWC[:, :, :1], 0.2), image_HWC[:, :, :1])


@given(factor=st.floats(-1, 2))
def test_blending_is_exact_arithmetic(factor: float) -> None:
    """Whatever instructions the processor has: the sums of 256ths are exact in 32 bits, and halves go to even."""
    first_HWC = np.repeat(np.arange(256, dtype=np.uint8), 256).reshape(256, 256, 1)
    second_HWC = np.tile(np.arange(256, dtype=np.uint8), 256).reshape(256, 256, 1)
    parts = round(factor * 256)
    expected = np.clip(np.rint((parts * first_HWC.astype(int) + (256 - parts) * second_HWC.astype(int)) / 256), 0, 255)
    assert np.array_equal(colours.blend(first_HWC, second_HWC, factor), expected)


@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_of_rand_augment(operation, num_channels: int) -> None:
    image_HWC = photo(24, 20)[:, :, :num_channels].copy()
    before_HWC = image_HWC.copy()
    for strength in (0, 0.3, 1):
        for sign in (1, -1):
            result_HWC = operation(image_HWC, strength, sign)
            assert (result_HWC.shape, result_HWC.dtype) == (image_HWC.shape, np.uint8)
            assert np.array_equal(image_HWC, before_HWC)


def test_rand_augment_draws_all_operations_and_turns_about_the_centre() -> None:
    num_images = len({image_HWC.tobytes() for image_HWC in changed(200, rand_augment_operations=1)})
    # One leaves it alone, three have no sign, as both signs of posterize, solarize, ... are the same.
    assert num_images == 1 + 9 * 2 + 4
    image_HWC = np.zeros((21, 21, 1), np.uint8)
    image_HWC[10, 10] = 255
    for operation in OPERATIONS[1:3] + OPERATIONS[5:6]:
        assert operation(image_HWC, 1.0, 1)[10, 10, 0] == 255
    assert OPERATIONS[3](image_HWC, 0.5, 1)[10, 15, 0] == 255
    assert OPERATIONS[4](image_HWC, 0.5, -1)[5, 10, 0] == 255


def test_erasing_puts_noise_into_one_rectangle() -> None:
    images_NHWC = np.full((300, 40, 30, 3), 128, np.uint8)
    change_pixels(images_NHWC, draws_of(list(range(300))), AugmentOptions(random_erasing=0.5))
    areas = []
    for image_HWC in images_NHWC:
        is_erased_HW = (image_HWC != 128).any(axis=2)
        if is_erased_HW.any():
            rows, columns = np.flatnonzero(is_erased_HW.any(axis=1)), np.flatnonzero(is_erased_HW.any(axis=0))
            inside_HWC = image_HWC[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            areas.append(inside_HWC.shape[0] * inside_HWC.shape[1] / 1200)
            assert (inside_HWC != 128).any(axis=2).mean() > 0.9
    assert 110 < len(areas) < 190
    assert min(areas) < 0.05
    assert 0.28 < max(areas) < 0.36


REFUSED = {
    b"": (RejectReason.EMPTY_FILE, "0 bytes"),
    b"\xff": (RejectReason.NOT_AN_IMAGE, "looks_like=unknown"),
    bytes(100_000): (RejectReason.NOT_AN_IMAGE, "looks_like=zeros"),
    b"  <!DOCTYPE HTML><p>404": (RejectReason.NOT_AN_IMAGE, "looks_like=html"),
    b"\xef\xbb\xbf<html lang=de>": (RejectReason.NOT_AN_IMAGE, "looks_like=html"),
    b'<?xml version="1.0"?><Error/>': (RejectReason.NOT_AN_IMAGE, "looks_like=xml"),
    b'{"error": "AccessDenied"}': (RejectReason.NOT_AN_IMAGE, "looks_like=json"),
    b"BMW is a make of car": (RejectReason.NOT_AN_IMAGE, "looks_like=text"),
    "Übung".encode() * 1000: (RejectReason.NOT_AN_IMAGE, "looks_like=text"),
    b"version https://git-lfs.github.com/spec/v1\noid": (RejectReason.NOT_AN_IMAGE, "looks_like=git_lfs"),
    b"\0\5\x16\7\0\2\0\0": (RejectReason.NOT_AN_IMAGE, "looks_like=apple_double"),
    b"\0\0\0\x18ftypisom": (RejectReason.NOT_AN_IMAGE, "looks_like=video"),
    b"RIFF\0\0\0\0WAVE": (RejectReason.NOT_AN_IMAGE, "looks_like=riff"),
    b"%!PS-Adobe-3.0 EPSF-3.0\n": (RejectReason.UNSAFE_FORMAT, "format=postscript"),
    b"\xc5\xd0\xd3\xc6": (RejectReason.UNSAFE_FORMAT, "format=eps"),
    b"%PDF-1.7": (RejectReason.UNSAFE_FORMAT, "format=pdf"),
    b"\0\0\0\x1cftypheic": (RejectReason.UNSUPPORTED_FORMAT, "format=heic"),
    b"\0\0\0\x0cjP  \r\n\x87\n": (RejectReason.UNSUPPORTED_FORMAT, "format=jp2"),
    b"<svg xmlns='x'/>": (RejectReason.UNSUPPORTED_FORMAT, "format=svg"),
    b'<?xml version="1.0"?>\n<svg/>': (RejectReason.UNSUPPORTED_FORMAT, "format=svg"),
    b"\0\0\1\0\1\0": (RejectReason.UNSUPPORTED_FORMAT, "format=ico"),
    b"P6\n1 1\n255\n...": (RejectReason.UNSUPPORTED_FORMAT, "format=netpbm"),
    b"8BPS\0\1": (RejectReason.UNSUPPORTED_FORMAT, "format=psd"),
    b"SIMPLE  =  T": (RejectReason.UNSUPPORTED_FORMAT, "format=fits"),
    b"\0\0\2\0" + bytes(20) + b"TRUEVISION-XFILE.\0": (RejectReason.UNSUPPORTED_FORMAT, "format=tga"),
}


@pytest.mark.parametrize("data", REFUSED, ids=lambda data: repr(data[:16]))
def test_refused_by_name(data: bytes) -> None:
    expected_reason, expected_detail = REFUSED[data]
    reason, detail = refusal(data)
    assert reason is expected_reason
    assert detail.startswith(expected_detail)


def test_every_decoder_is_reached_by_content() -> None:
    assert {sniff_format(data) for data in one_of_each_format().values()} == set(DECODERS)


def test_no_program_is_started_for_postscript(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    assert refusal(b"%!PS\n(%pipe%id) (r) file")[0] is RejectReason.UNSAFE_FORMAT
