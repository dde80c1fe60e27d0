"""Colour profiles: what is not sRGB is converted to it, what is stays as it is, and a broken profile does no harm."""

from __future__ import annotations

import hashlib
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
from PIL import ImageCms

from shardmill.images.icc import MAX_PROFILE_BYTES
from shardmill.images.normalize import normalize
from shardmill.kernel import NATIVE_ID
from tests.shardmill.images.make import (
    ADOBE_RGB_XYZ,
    OPTIONS,
    SRGB_XYZ,
    cmyk_profile,
    decode,
    gray_jpeg,
    gray_photo,
    gray_profile,
    jpeg,
    photo,
    png,
    png_chunk,
    ramp_alpha,
    rgb_profile,
    tiff_of,
    webp,
    with_orientation,
    with_profile,
)

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
RGBA_HWC = np.dstack([photo(), ramp_alpha()])


def encode_srgb(linear: np.ndarray) -> np.ndarray:
    linear = np.clip(linear, 0, 1)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return 255 * curved


def adobe_to_srgb(pixels_HWC: np.ndarray) -> np.ndarray:
    """The textbook formula: undo the gamma, change the primaries, apply sRGB's curve."""
    change_33 = np.linalg.inv(np.array(SRGB_XYZ)) @ np.array(ADOBE_RGB_XYZ)
    return encode_srgb((pixels_HWC / 255) ** (563 / 256) @ change_33.T)


def png_with_profile(data: bytes, profile: bytes) -> bytes:
    chunk = png_chunk(b"iCCP", b"name\0\0" + zlib.compress(profile))
    return data[:33] + chunk + data[33:]


def tiff_with_profile(pixels: np.ndarray, profile: bytes) -> bytes:
    padded = profile + bytes(-len(profile) % 4)
    return tiff_of(pixels, {34675: struct.unpack(f"<{len(padded) // 4}I", padded)})


def webp_with_profile(data: bytes, profile: bytes, *, has_alpha: bool = False) -> bytes:
    bits = bytes((0x20 | 0x10 * has_alpha, 0, 0, 0)) + struct.pack("<I", 31)[:3] + struct.pack("<I", 23)[:3]
    padded = profile + bytes(len(profile) % 2)
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bits + b"ICCP" + struct.pack("<I", len(padded)) + padded + data[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [
        with_profile(jpeg(photo(), 100), rgb_profile()),
        png_with_profile(png(photo()), rgb_profile()),
        tiff_with_profile(photo(), rgb_profile()),
        webp_with_profile(webp(photo()), rgb_profile()),
    ],
    ids=["jpeg", "png", "tiff", "webp"],
)
def test_adobe_rgb_becomes_srgb_in_every_format(data: bytes) -> None:
    decoded = decode(data, OPTIONS.model_copy(update={"resize_mode": "none"}))
    assert decoded.notes == ("icc_converted",)
    expected_HWC = adobe_to_srgb(photo())
    difference_HWC = np.abs(decoded.pixels_HWC - expected_HWC)
    # A JPEG's own loss is a level or two, and dark colours are stretched. Without a conversion the mean is 14.
    assert difference_HWC.mean() < 1
    assert np.quantile(difference_HWC, 0.99) <= 4
    assert np.abs(photo() - expected_HWC).mean() > 5


def test_converted_pixels_are_within_two_levels_of_the_formula() -> None:
    decoded = decode(png_with_profile(png(photo()), rgb_profile()))
    assert np.abs(decoded.pixels_HWC - adobe_to_srgb(photo())).max() <= 2


def test_golden_digest_of_the_conversion() -> None:
    """If this changes, pixels of existing datasets change: raise RULES_VERSION, or find out what moved them."""
    ramp_HWC = np.stack(np.meshgrid(*[np.arange(0, 256, 5)] * 3), axis=-1).reshape(52, -1, 3).astype(np.uint8)
    decoded = decode(
        png_with_profile(png(ramp_HWC), rgb_profile()), OPTIONS.model_copy(update={"max_aspect_ratio": 60})
    )
    assert hashlib.sha256(decoded.pixels_HWC.tobytes()).hexdigest()[:16] == "ef5a1852eb6d4b65"


def test_srgb_changes_no_pixel_and_says_nothing() -> None:
    for plain, tagged in (
        (jpeg(photo()), with_profile(jpeg(photo()), SRGB)),
        (gray_jpeg(gray_photo()), with_profile(gray_jpeg(gray_photo()), SRGB)),
        (png(photo()), png_with_profile(png(photo()), SRGB)),
        (webp(photo()), webp_with_profile(webp(photo()), SRGB)),
    ):
        decoded = decode(tagged)
        assert decoded.notes == ()
        assert np.array_equal(decoded.pixels_HWC, decode(plain).pixels_HWC)


def test_a_profile_is_known_by_what_it_does_and_not_by_its_name() -> None:
    """A linear profile that calls itself sRGB, as one of GIMP's does."""
    named = rgb_profile(SRGB_XYZ, gamma=1.0).replace(b"test\0", b"sRGB\0")
    decoded = decode(png_with_profile(png(photo()), named))
    assert decoded.notes == ("icc_converted",)
    assert np.abs(decoded.pixels_HWC - encode_srgb(photo() / 255)).max() <= 2


def test_gray_keeps_its_one_channel() -> None:
    expected_HW = encode_srgb((gray_photo() / 255) ** 1.8)
    decoded = decode(png_with_profile(png(gray_photo()), gray_profile(1.8)))
    assert (decoded.notes, decoded.pixels_HWC.shape) == (("icc_converted",), (24, 32, 1))
    assert np.abs(decoded.pixels_HWC[:, :, 0] - expected_HW).max() <= 2


def test_colours_are_converted_before_they_are_laid_over_white() -> None:
    weight_HWC = ramp_alpha()[:, :, np.newaxis] / 255
    expected_HWC = adobe_to_srgb(photo()) * weight_HWC + 255 * (1 - weight_HWC)
    for data in (
        png_with_profile(png(RGBA_HWC), rgb_profile()),
        webp_with_profile(webp(RGBA_HWC), rgb_profile(), has_alpha=True),
    ):
        decoded = decode(data)
        assert decoded.notes == ("icc_converted", "alpha_flattened")
        opaque_HW = ramp_alpha() > 16  # WebP drops the colours of what can hardly be seen
        assert np.abs(decoded.pixels_HWC - expected_HWC)[opaque_HW].max() <= 3


def test_a_print_is_shown_by_its_own_profile() -> None:
    """Here the ink called cyan prints red: only the profile knows."""
    inks_HWC = np.zeros((16, 16, 4), np.uint8)
    inks_HWC[:8, :, 0] = 255
    data = simplejpeg.encode_jpeg(255 - inks_HWC, 98, colorspace="CMYK", colorsubsampling="444")
    decoded = decode(with_profile(data, cmyk_profile()))
    assert decoded.notes == ("cmyk_converted", "icc_converted")
    assert np.abs(decoded.pixels_HWC[2:6].astype(int) - (255, 0, 0)).max() <= 6
    assert decoded.pixels_HWC[10:14].min() >= 252
    assert np.abs(decode(data).pixels_HWC[2:6].astype(int) - (0, 255, 255)).max() <= 6


@pytest.mark.parametrize(
    "profile",
    [
        b"x", bytes(200), rgb_profile()[:200], rgb_profile()[:128] + bytes(400), gray_profile(1.8), cmyk_profile(),
        rgb_profile() + bytes(MAX_PROFILE_BYTES),
    ],
    ids=["one byte", "zeros", "cut", "no tags", "of gray", "of a print", "too large"],
)  # fmt: skip
def test_a_profile_that_cannot_be_used_is_ignored_with_a_note(profile: bytes) -> None:
    for data in (with_profile(jpeg(photo()), profile), png_with_profile(png(photo()), profile)):
        decoded = decode(data)
        assert decoded.notes == ("icc_ignored",)
    assert np.array_equal(decoded.pixels_HWC, photo())


def test_a_profile_in_several_segments_is_put_together_by_number() -> None:
    whole = decode(with_profile(jpeg(photo()), rgb_profile()))
    parts = with_profile(jpeg(photo()), rgb_profile(), part_bytes=150)
    assert parts.count(b"ICC_PROFILE\0") == 4
    decoded = decode(parts)
    assert decoded.notes == ("icc_converted",)
    assert np.array_equal(decoded.pixels_HWC, whole.pixels_HWC)

    first, second = (parts.index(b"ICC_PROFILE\0" + bytes((number, 4))) - 4 for number in (1, 2))
    length = second - first
    swapped = parts[:first] + parts[second : second + length] + parts[first:second] + parts[second + length :]
    assert swapped != parts
    assert np.array_equal(decode(swapped).pixels_HWC, whole.pixels_HWC)
    assert decode(parts[:first] + parts[second:]).notes == ("icc_ignored",)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kernel", ["wheels", "native"] if NATIVE_ID else ["wheels"])
def test_only_what_is_kept_is_converted_and_its_pixels_are_those_of_the_whole(orientation: int, kernel: str) -> None:
    data = with_orientation(with_profile(jpeg(photo(41, 60), 95), rgb_profile()), orientation)
    whole = decode(data, OPTIONS.model_copy(update={"resize_mode": "none", "kernel": kernel}))
    crop = OPTIONS.model_copy(update={"resize_mode": "crop", "image_size": 17, "kernel": kernel})
    kept = decode(data, crop)
    # The native kernel shrinks as it converts: by its own areas, a level apart at most from those of the wheels.
    side, most_levels = {"wheels": (41, 0), "native": (17, 1)}[kernel]
    assert (kept.notes, kept.pixels_HWC.shape) == (whole.notes, (side, side, 3))
    apart_HWC = normalize(kept.pixels_HWC, crop).astype(int) - normalize(whole.pixels_HWC, crop)
    assert np.abs(apart_HWC).max() <= most_levels
