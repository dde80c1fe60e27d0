"""Big JPEGs are decoded at a reduced scale, but only where that gives what the whole image would, within bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from shardmill.images.geometry import REDUCTIONS, choose_reduction, kept_spans, reduced_length
from shardmill.images.jpeg import decode_jpeg
from shardmill.images.normalize import normalize
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason
from tests.shardmill.images.make import STORED_FOR_ORIENTATION, refusal, with_orientation
from tests.shardmill.images.reference import (
    LEAST_REDUCED_PSNR_DB,
    LEAST_REDUCED_SSIM,
    encoded,
    photographs,
    psnr,
    ssim,
    whole,
)

MODES = ("crop", "pad", "stretch")


def options_of(size: int, mode: str = "crop") -> NormalizeOptions:
    return NormalizeOptions.model_validate({"image_size": size, "resize_mode": mode})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("subsampling", ["420", "444"])
def test_the_result_is_that_of_the_whole_image_within_the_bounds(mode: str, subsampling: str) -> None:
    scales = set()
    for pixels_HWC, size in itertools.product(photographs(), (16, 24, 32, 48, 64, 72, 100, 128, 150)):
        options, data = options_of(size, mode), encoded(pixels_HWC, subsampling)
        scale = choose_reduction(pixels_HWC.shape[0], pixels_HWC.shape[1], options)
        decoded = decode_jpeg(data, options)
        assert decoded.pixels_HWC.shape[:2] == tuple(reduced_length(side, scale) for side in pixels_HWC.shape[:2])
        if scale > 1:
            scales.add(scale)
            exact_HWC = whole(data, options)
            assert psnr(normalize(decoded.pixels_HWC, options), exact_HWC) >= LEAST_REDUCED_PSNR_DB, (size, scale)
            assert ssim(normalize(decoded.pixels_HWC, options), exact_HWC) >= LEAST_REDUCED_SSIM, (size, scale)
    assert scales >= {2, 4}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_within_the_bounds_too(orientation: int) -> None:
    upright_HWC = photographs()[0]
    stored_HWC = np.ascontiguousarray(STORED_FOR_ORIENTATION[orientation](upright_HWC))
    options = options_of(64)
    assert choose_reduction(stored_HWC.shape[0], stored_HWC.shape[1], options) == 2
    decoded = decode_jpeg(with_orientation(encoded(stored_HWC), orientation), options)
    assert psnr(normalize(decoded.pixels_HWC, options), whole(encoded(upright_HWC), options)) >= LEAST_REDUCED_PSNR_DB


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    size=st.integers(1, 600),
    mode=st.sampled_from(MODES),
)
def test_small_sources_are_decoded_whole_and_no_edge_moves_far(height: int, width: int, size: int, mode: str) -> None:
    options = options_of(size, mode)
    scale = choose_reduction(height, width, options)
    kept = kept_spans(height, width, options)
    if max(span.length for span in kept) < 2 * size:
        assert scale == 1
    if scale > 1:
        blocks = kept_spans(reduced_length(height, scale), reduced_length(width, scale), options)
        # What a stored pixel covers of the source; the shorter side of `pad` is rounded to whole pixels.
        covered = max(span.length for span in kept) / size * (2 if mode == "pad" else 1)
        for exact, reduced in zip(kept, blocks, strict=True):
            assert abs(reduced.start * scale - exact.start) <= covered / 64
            assert abs(reduced.end * scale - exact.end) <= covered / 64


def test_libjpeg_gives_the_pixels_that_were_planned_at_every_scale() -> None:
    for height, width in itertools.product(range(64, 81), (64, 71, 72, 73, 200)):
        data = encoded(np.zeros((height, width, 3), np.uint8))
        for scale in REDUCTIONS:
            planned = reduced_length(height, scale), reduced_length(width, scale)
            pixels_HWC = simplejpeg.decode_jpeg(data, "RGB", min_height=planned[0], min_width=planned[1])
            assert pixels_HWC.shape[:2] == planned


@pytest.mark.parametrize(
    ("height", "width", "size", "scale"),
    [
        (3000, 4000, 256, 4),
        (3024, 4032, 224, 4),
        (3468, 4624, 256, 2),
        (3001, 4001, 256, 1),
        (375, 500, 256, 1),
        (512, 512, 256, 1),
    ],
)
def test_the_scale_for_usual_photographs(height: int, width: int, size: int, scale: int) -> None:
    assert choose_reduction(height, width, options_of(size)) == scale
    assert choose_reduction(width, height, options_of(size)) == scale


def test_damage_is_found_at_a_reduced_scale_too() -> None:
    data = encoded(photographs()[0])
    assert choose_reduction(416, 640, options_of(32)) == 4
    for start in (len(data) // 3, len(data) - 40):
        damaged = data[:start] + b"\x55\xaa" * 10 + data[start + 20 :]
        assert refusal(damaged, options_of(32))[0] is RejectReason.CORRUPT_SCAN
    assert refusal(data[: len(data) // 2], options_of(32))[0] is RejectReason.TRUNCATED
