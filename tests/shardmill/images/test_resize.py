"""Every resize mode against a plain resampler in NumPy, within stated bounds, on noise: the hardest case for both."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.images.normalize import normalize
from shardmill.options import NormalizeOptions
from tests.shardmill.images.make import photo
from tests.shardmill.images.reference import (
    LEAST_PSNR_DB,
    LEAST_SSIM,
    MOST_LEVELS,
    noise,
    normalize_reference,
    psnr,
    resize_reference,
    ssim,
)

SQUARE_MODES, FREE_MODES = ("crop", "pad", "stretch"), ("shorter", "longer", "none")
HEIGHTS, WIDTHS, SIZES = (5, 33, 64, 97, 300), (7, 64, 90, 250), (16, 64, 100)


def options_of(size: int, mode: str, *, upscale: bool = True) -> NormalizeOptions:
    chosen = "always" if upscale else "never"
    return NormalizeOptions.model_validate({"image_size": size, "resize_mode": mode, "upscale": chosen})


@pytest.mark.parametrize("upscale", [True, False])
@pytest.mark.parametrize("mode", SQUARE_MODES + FREE_MODES)
def test_every_mode_is_the_reference_within_the_bounds(mode: str, upscale: bool) -> None:
    for height, width, size in itertools.product(HEIGHTS, WIDTHS, SIZES):
        image_HWC = normalize(noise(height, width), options_of(size, mode, upscale=upscale))
        expected_HWC = normalize_reference(noise(height, width), size, mode, upscale=upscale)
        case = f"{width}x{height} to {size}"
        assert np.abs(image_HWC - expected_HWC).max() <= MOST_LEVELS, case
        assert psnr(image_HWC, expected_HWC) >= LEAST_PSNR_DB, case
        assert ssim(image_HWC, expected_HWC) >= LEAST_SSIM, case


def test_the_measures_tell_kernels_apart() -> None:
    """A linear kernel, which skips pixels when it shrinks, is far outside the bounds."""
    source_HWC = noise(256, 256)
    skipping_HWC = source_HWC[4::8, 4::8]
    reference_HWC = resize_reference(source_HWC, 32, 32)
    assert psnr(skipping_HWC, reference_HWC) < 20
    assert ssim(skipping_HWC, reference_HWC) < 0.5


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_side_that_shrinks_is_averaged_although_the_other_grows(is_turned: bool) -> None:
    stripes_HWC = np.zeros((20, 400, 3), np.uint8)
    stripes_HWC[:, ::2] = 200
    source_HWC = stripes_HWC.transpose(1, 0, 2) if is_turned else stripes_HWC
    assert (normalize(source_HWC, options_of(40, "stretch")) == 100).all()


def test_stretch_fills_the_square_with_everything() -> None:
    source_HWC = np.zeros((10, 40, 3), np.uint8)
    source_HWC[:, :20] = 200
    image_HWC = normalize(source_HWC, options_of(20, "stretch"))
    assert (image_HWC[:, :10] == 200).all()
    assert not image_HWC[:, 10:].any()


@pytest.mark.parametrize(
    ("mode", "height", "width", "kept_height", "kept_width"),
    [("crop", 10, 14, 10, 10), ("pad", 10, 14, 10, 14), ("stretch", 10, 60, 10, 20), ("pad", 10, 60, 3, 20)],
)
def test_without_upscaling_a_small_source_keeps_its_pixels_on_black(
    mode: str, height: int, width: int, kept_height: int, kept_width: int
) -> None:
    source_HWC = np.maximum(photo(height, width), 1)
    image_HWC = normalize(source_HWC, options_of(20, mode, upscale=False))
    rows, columns = (np.flatnonzero(image_HWC.any(axis=(axis, 2))) for axis in (1, 0))
    assert (len(rows), len(columns)) == (kept_height, kept_width)
    assert (rows[0], columns[0]) == ((20 - kept_height) // 2, (20 - kept_width) // 2)
    if (kept_height, kept_width) == (height, width):
        assert np.array_equal(image_HWC[np.ix_(rows, columns)], source_HWC)


@pytest.mark.parametrize("mode", SQUARE_MODES)
def test_upscaling_changes_nothing_for_sources_that_are_large_enough(mode: str) -> None:
    source_HWC = photo(60, 90)
    without_HWC = normalize(source_HWC, options_of(20, mode, upscale=False))
    assert np.array_equal(without_HWC, normalize(source_HWC, options_of(20, mode)))


@pytest.mark.parametrize(
    ("mode", "source", "stored"),
    [
        ("shorter", (60, 90), (20, 30)),
        ("shorter", (90, 61), (30, 20)),
        ("shorter", (10, 15), (10, 15)),
        ("shorter", (15, 60), (15, 60)),
        ("longer", (60, 90), (13, 20)),
        ("longer", (10, 15), (10, 15)),
        ("longer", (1, 90), (1, 20)),
        ("none", (60, 90), (60, 90)),
    ],
)
def test_other_modes_keep_the_aspect_ratio_and_enlarge_only_if_asked(
    mode: str, source: tuple[int, int], stored: tuple[int, int]
) -> None:
    options = NormalizeOptions.model_validate({"image_size": 20, "resize_mode": mode})
    assert normalize(photo(*source), options).shape[:2] == stored
    assert options.one_shape_HWC is None
    assert stored[0] * stored[1] <= options.max_stored_pixels
    with pytest.raises(UsageError, match="etl.resize_mode"):
        _ = options.image_shape_HWC


def test_enlarging_to_a_side_when_asked() -> None:
    assert normalize(photo(10, 15), options_of(20, "shorter")).shape[:2] == (20, 30)
    assert normalize(photo(10, 15), options_of(20, "longer")).shape[:2] == (13, 20)
    assert np.array_equal(
        normalize(photo(10, 15), options_of(20, "crop")),
        normalize(photo(10, 15), NormalizeOptions(image_size=20)),
    )


def test_raw_has_no_place_for_sizes() -> None:
    with pytest.raises(ValueError, match="raw stores no sizes"):
        NormalizeOptions(resize_mode="shorter", encoding="raw")
