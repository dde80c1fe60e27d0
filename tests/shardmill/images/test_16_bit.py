"""16-bit sources that use fewer bits: by what they declare, by what the options say, and never dark in silence."""

from __future__ import annotations

import numpy as np
import pytest

from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason
from tests.shardmill.images.make import OPTIONS, decode, photo, png, png_chunk, refusal, tiff, tiff_of


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
