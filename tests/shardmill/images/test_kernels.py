"""JPEGs through `process_image` with the wheels and with the native kernel: the same bounds, notes and rejections."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg

from shardmill.errors import UsageError
from shardmill.images.decoder_id import DECODER_ID, decoder_id, normalization_fingerprint
from shardmill.images.geometry import choose_reduction
from shardmill.images.jpeg import decode_jpeg
from shardmill.images.jpeg_native import plan_shrink
from shardmill.images.normalize import normalize
from shardmill.images.process import process_image
from shardmill.kernel import KERNEL_VERSION, NATIVE_ID, resolve_kernel
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, RejectReason, SourceImage
from tests.shardmill.images.make import (
    STORED_FOR_ORIENTATION,
    gray_jpeg,
    gray_photo,
    gray_profile,
    jpeg,
    one_of_each_format,
    photo,
    refusal,
    rgb_profile,
    with_orientation,
    with_profile,
    with_segment,
)
from tests.shardmill.images.reference import (
    LEAST_PSNR_DB,
    LEAST_REDUCED_PSNR_DB,
    LEAST_REDUCED_SSIM,
    LEAST_SSIM,
    MOST_LEVELS,
    encoded,
    noise,
    normalize_reference,
    photographs,
    psnr,
    ssim,
    whole,
)

NEEDS_NATIVE = pytest.mark.skipif(not NATIVE_ID, reason="the native kernel is not built (scripts/setup.sh says why)")
KERNELS = ("wheels", pytest.param("native", marks=NEEDS_NATIVE))
MODES = ("crop", "pad", "stretch", "shorter", "longer", "none")
# Each kernel is within half a level of the exact box, and a little: together they may round to different sides.
MOST_LEVELS_APART = 1


def options_of(kernel: str = "native", size: int = 20, mode: str = "crop", **other: Any) -> NormalizeOptions:
    return NormalizeOptions.model_validate({"kernel": kernel, "image_size": size, "resize_mode": mode, **other})


def sample(data: bytes, options: NormalizeOptions) -> ImageSample:
    outcome = process_image(SourceImage("x.jpg", len(data)), data, options)
    assert isinstance(outcome, ImageSample)
    return outcome


def both(data: bytes, **other: Any) -> tuple[ImageSample, ImageSample]:
    """As raw pixels, by the wheels and by the native kernel."""
    wheels, native = (sample(data, options_of(kernel, encoding="raw", **other)) for kernel in ("wheels", "native"))
    return wheels, native


def apart(first: ImageSample, second: ImageSample) -> int:
    levels = (np.frombuffer(each.image, np.uint8).astype(int) for each in (first, second))
    return int(np.abs(next(levels) - next(levels)).max())


@NEEDS_NATIVE
@pytest.mark.parametrize("mode", MODES[:-1])
def test_every_mode_is_the_reference_within_the_bounds_of_the_wheels(mode: str) -> None:
    for (height, width), size, upscale in itertools.product(
        [(33, 91), (64, 64), (97, 64), (150, 91)], (16, 50), ("always", "never")
    ):
        data = jpeg(noise(height, width))
        options = options_of("native", size, mode, upscale=upscale)
        decoded_HWC = decode_jpeg(data, options_of("wheels", size, mode, upscale=upscale)).pixels_HWC
        expected_HWC = normalize_reference(decoded_HWC, size, mode, upscale=upscale == "always")
        image_HWC = normalize(decode_jpeg(data, options).pixels_HWC, options)
        case = f"{width}x{height} to {size}"
        assert np.abs(image_HWC - expected_HWC).max() <= MOST_LEVELS, case
        assert psnr(image_HWC, expected_HWC) >= LEAST_PSNR_DB, case
        assert ssim(image_HWC, expected_HWC) >= LEAST_SSIM, case


@NEEDS_NATIVE
@pytest.mark.parametrize("mode", ["crop", "pad", "stretch"])
def test_big_photos_are_those_of_the_whole_image_within_the_bounds_of_the_wheels(mode: str) -> None:
    scales = set()
    for pixels_HWC, size in itertools.product(photographs()[1:], (24, 32, 64, 100)):
        options, data = options_of("native", size, mode), encoded(pixels_HWC)
        scale = choose_reduction(pixels_HWC.shape[0], pixels_HWC.shape[1], options)
        image_HWC, exact_HWC = normalize(decode_jpeg(data, options).pixels_HWC, options), whole(data, options)
        scales.add(scale)
        assert psnr(image_HWC, exact_HWC) >= (LEAST_REDUCED_PSNR_DB if scale > 1 else LEAST_PSNR_DB - 3), size
        assert ssim(image_HWC, exact_HWC) >= (LEAST_REDUCED_SSIM if scale > 1 else LEAST_SSIM), size
    assert scales >= {1, 2, 4}


@NEEDS_NATIVE
@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_keeps_the_same_part_upright(orientation: int) -> None:
    upright_HWC = noise(51, 80)  # odd differences: a centre has two sides
    stored_HWC = np.ascontiguousarray(STORED_FOR_ORIENTATION.get(orientation, lambda same: same)(upright_HWC))
    data = with_orientation(jpeg(stored_HWC), orientation)
    for mode in MODES:
        wheels, native = both(data, mode=mode) if mode in MODES[:3] else both_as_png(data, mode)
        assert apart(wheels, native) <= MOST_LEVELS_APART
        assert wheels.notes == native.notes
        assert (wheels.height, wheels.width) == (native.height, native.width)


def both_as_png(data: bytes, mode: str) -> tuple[ImageSample, ImageSample]:
    """Of sizes that raw cannot store; the pixels in place of the file."""
    samples = [sample(data, options_of(kernel, mode=mode, encoding="png")) for kernel in ("wheels", "native")]
    decoded = [cv2.imdecode(np.frombuffer(each.image, np.uint8), cv2.IMREAD_UNCHANGED) for each in samples]
    first, second = (dataclasses.replace(each, image=p.tobytes()) for each, p in zip(samples, decoded, strict=True))
    return first, second


@NEEDS_NATIVE
@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("mode", ["crop", "pad", "stretch"])
def test_files_of_every_kind_have_the_same_notes_and_nearly_the_same_pixels(mode: str, color: str) -> None:
    small, tall = jpeg(photo(6, 40)), jpeg(photo(300, 40))
    files = {
        **one_of_each_format(photo(60, 44)),
        "gray": gray_jpeg(gray_photo(61, 45)),
        "small": small,
        "tall": tall,
        "constant": jpeg(np.full((60, 60, 3), 77, np.uint8)),
        "trailing": jpeg(photo(60, 44)) + b"tail",
        "profile": with_profile(jpeg(photo(60, 44)), rgb_profile()),
        "gray profile on colours": with_profile(jpeg(photo(60, 44)), gray_profile(1.8)),
        "profile without a part": with_segment(jpeg(photo(60, 44)), 0xE2, b"ICC_PROFILE\0\1\2half"),
        "exif without sense": with_segment(jpeg(photo(60, 44)), 0xE1, b"Exif\0\0II*\0"),
    }
    for name, data in files.items():
        for size in (5, 20, 41):
            wheels, native = both(data, size=size, mode=mode, color=color)
            assert native.notes == wheels.notes, (name, size)
            assert apart(wheels, native) <= MOST_LEVELS_APART, (name, size)
            if native.image == wheels.image:
                assert native == wheels


@NEEDS_NATIVE
def test_what_the_kernel_cannot_do_is_the_wheels_to_the_bit() -> None:
    for data in (
        one_of_each_format(photo(60, 44))["cmyk"],
        one_of_each_format(photo(60, 44))["png"],
        jpeg(photo(20, 30)),
        jpeg(photo(12, 12)),
    ):
        wheels, native = both(data)
        assert native == wheels


@NEEDS_NATIVE
@pytest.mark.parametrize("profile", [b"", rgb_profile()], ids=["plain", "profile"])
def test_the_kernel_is_at_work_at_all(profile: bytes) -> None:
    data = with_profile(jpeg(noise(90, 120)), profile)
    assert decode_jpeg(data, options_of("wheels")).pixels_HWC.shape[0] == 90
    assert decode_jpeg(data, options_of("native")).pixels_HWC.shape == (20, 20, 3)
    wheels, native = both(data)
    assert 0 < apart(wheels, native) <= MOST_LEVELS_APART


@NEEDS_NATIVE
def test_kept_bytes_are_those_of_the_wheels() -> None:
    for size, is_kept in ((20, False), (60, True)):
        data = jpeg(photo(60, 60))
        wheels, native = (sample(data, options_of(kernel, size, keep_bytes=True)) for kernel in ("wheels", "native"))
        assert (native.image == wheels.image == data) == is_kept


@pytest.mark.parametrize("kernel", KERNELS)
def test_damage_is_refused_for_the_same_reason(kernel: str) -> None:
    data = encoded(photographs()[0])
    damaged = data[: len(data) // 2] + b"\x55\xaa" * 10 + data[len(data) // 2 + 20 :]
    for size in (32, 100, 400):
        assert refusal(damaged, options_of(kernel, size))[0] is RejectReason.CORRUPT_SCAN
        assert refusal(data[: len(data) // 2], options_of(kernel, size))[0] is RejectReason.TRUNCATED


def test_normalizing_what_was_shrunk_changes_nothing() -> None:
    """So a decoder may shrink: `normalize` makes the same of its pixels."""
    num_shrunk = 0
    for mode, upscale, height, width in itertools.product(MODES, ("always", "never"), (33, 200), (20, 57, 190)):
        options = options_of("wheels", 20, mode, upscale=upscale)
        shrink = plan_shrink(height, width, 1, options)
        if shrink is not None:
            shrunk_HWC = noise(shrink.height, shrink.width)
            image_HWC = normalize(shrunk_HWC, options)
            assert image_HWC.shape == normalize(noise(height, width), options).shape
            assert image_HWC.astype(int).sum() == shrunk_HWC.astype(int).sum()
            num_shrunk += 1
    assert num_shrunk > 20


def test_the_id_names_the_kernel_and_a_missing_one_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoder_id(options_of("wheels")) == DECODER_ID
    monkeypatch.setattr("shardmill.kernel.NATIVE_ID", "native-7")
    monkeypatch.setattr("shardmill.images.decoder_id.NATIVE_ID", "native-7")
    assert resolve_kernel("auto") == "native"
    assert decoder_id(options_of("native")) == f"{DECODER_ID}+native-7"
    assert normalization_fingerprint(options_of("native")) != normalization_fingerprint(options_of("wheels"))
    monkeypatch.setattr("shardmill.kernel.NATIVE_ID", "")
    assert resolve_kernel("auto") == "wheels"
    with pytest.raises(UsageError, match=r"etl.kernel.*pip install ./native.*etl.kernel = wheels"):
        decoder_id(options_of("native"))


@NEEDS_NATIVE
def test_the_id_names_libjpeg() -> None:
    assert NATIVE_ID.startswith(f"native-{KERNEL_VERSION}+libjpeg-turbo-")
    assert simplejpeg.__version__ in DECODER_ID
