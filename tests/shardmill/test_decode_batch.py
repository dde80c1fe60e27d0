"""Batches are decoded to the same pixels whoever decodes them, and whatever part of an image is needed."""

from __future__ import annotations

import random

import cv2
import numpy as np
import pytest
import simplejpeg

from shardmill.augment.windows import Windows, cut_window, whole_windows
from shardmill.errors import IntegrityError
from shardmill.formats import encodings
from shardmill.formats.rows import Scattered
from shardmill.images.jpeg_windows import CAN_DECODE_WINDOWS
from shardmill.loader import step_decoder
from shardmill.loader.step_decoder import decode_batch
from shardmill.options import NormalizeOptions

_SEED = random.SystemRandom().randrange(1 << 32)
KERNELS = [
    pytest.param(True, marks=pytest.mark.skipif(not CAN_DECODE_WINDOWS, reason="the native kernel is not built")),
    False,
]

NEEDS_COPY_SLICES = pytest.mark.skipif(encodings._copy_slices is None, reason="the native kernel is not built")


def smooth_noise(rng: np.random.Generator, side: int) -> np.ndarray:
    small_HWC = rng.integers(0, 256, (9, 9, 3)).astype(np.uint8)
    large_HWC = cv2.resize(small_HWC, (side, side), interpolation=cv2.INTER_CUBIC).astype(np.int64)
    return np.clip(large_HWC + rng.integers(-9, 10, large_HWC.shape), 0, 255).astype(np.uint8)


def jpegs(rng: np.random.Generator, side: int, subsampling: str, count: int = 16) -> list[memoryview]:
    colors = "GRAY" if subsampling == "Gray" else "RGB"
    images = (smooth_noise(rng, side)[:, :, : 1 if colors == "GRAY" else 3] for _ in range(count))
    return [
        memoryview(
            simplejpeg.encode_jpeg(np.ascontiguousarray(image), 90, colorspace=colors, colorsubsampling=subsampling)
        )
        for image in images
    ]


def options(side: int, subsampling: str) -> NormalizeOptions:
    return NormalizeOptions(image_size=side, color="gray" if subsampling == "Gray" else "rgb")


def random_windows(rng: np.random.Generator, side: int, size: int, count: int) -> Windows:
    """Of any size, a third of them as large as the batch's images; they reach beyond every edge, some lie outside."""
    heights, widths = rng.integers(1, side + 1, count), rng.integers(1, side + 1, count)
    heights[::3] = widths[::3] = size
    top, left = (rng.integers(-side // 8, side - lengths + side // 8 + 1) for lengths in (heights, widths))
    is_inside = np.arange(count) % 2 == 0
    top, left = (
        np.where(is_inside, np.clip(start, 0, side - length), start)
        for start, length in ((top, heights), (left, widths))
    )
    return Windows(top, left, heights, widths, rng.random(count) < 0.3, (size, size))


@pytest.mark.parametrize("with_native", KERNELS)
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "Gray"])
def test_windows_are_cut_out_of_the_pixels_that_the_wheels_decode(subsampling, with_native, monkeypatch):
    print(f"seed {_SEED}")
    monkeypatch.setattr(step_decoder, "CAN_DECODE_WINDOWS", with_native)
    rng = np.random.default_rng(_SEED)
    for side in (16, 97, 256):
        encoded, normalize = jpegs(rng, side, subsampling), options(side, subsampling)
        whole = [simplejpeg.decode_jpeg(data, "GRAY" if subsampling == "Gray" else "RGB") for data in encoded]
        for size in (side, side * 7 // 8):
            windows = random_windows(rng, side, size, len(encoded))
            images_NHWC = np.empty((len(encoded), size, size, normalize.num_channels), np.uint8)
            decode_batch(encoded, normalize, windows, images_NHWC)
            for place, image_HWC in enumerate(whole):
                assert np.array_equal(images_NHWC[place], cut_window(image_HWC, windows, place)), (side, size, place)
        images_NHWC = np.empty((len(encoded), side, side, normalize.num_channels), np.uint8)
        decode_batch(encoded, normalize, whole_windows(len(encoded), (side, side)), images_NHWC)
        assert np.array_equal(images_NHWC, np.stack(whole))


@pytest.mark.parametrize("with_native", KERNELS)
@pytest.mark.parametrize("damage", ["another size", "cut", "no image"])
def test_an_image_that_is_not_as_stored_is_an_integrity_error(damage, with_native, monkeypatch):
    monkeypatch.setattr(step_decoder, "CAN_DECODE_WINDOWS", with_native)
    rng = np.random.default_rng(0)
    encoded = jpegs(rng, 64, "444", 4)
    encoded[2] = {
        "another size": jpegs(rng, 72, "444", 1)[0],
        "cut": encoded[2][: len(encoded[2]) // 2],
        "no image": memoryview(b"hello"),
    }[damage]
    images_NHWC = np.empty((4, 64, 64, 3), np.uint8)
    with pytest.raises(IntegrityError, match="stored jpeg image"):
        decode_batch(encoded, options(64, "444"), whole_windows(4, (64, 64)), images_NHWC)


@pytest.mark.skipif(not CAN_DECODE_WINDOWS, reason="the native kernel is not built")
@pytest.mark.parametrize(
    "place", [(-1, 0, 8, 8, 0), (0, 0, 65, 8, 0), (60, 0, 8, 8, 0), (0, 0, 8, 0, 0), (0, 0, 8, 8, -1), (0, 0, 8, 8, 1)]
)
def test_a_window_outside_of_image_or_target_is_refused(place):
    import shardmill_native

    encoded = jpegs(np.random.default_rng(0), 64, "444", 1)
    target, is_done = np.empty(8 * 8 * 3, np.uint8), np.zeros(1, np.uint8)
    with pytest.raises(ValueError, match="inside"):
        shardmill_native.decode_jpegs(encoded, (64, 64, 3), np.array([place], np.int64), target, is_done)


@pytest.mark.parametrize("with_native", [pytest.param(True, marks=NEEDS_COPY_SLICES), False])
def test_pixels_that_are_stored_as_they_are_are_gathered_from_several_chunks(with_native, monkeypatch):
    if not with_native:
        monkeypatch.setattr(encodings, "_copy_slices", None)
    rng = np.random.default_rng(_SEED)
    data = [memoryview(rng.integers(0, 256, 5000, np.uint8)).toreadonly() for _ in range(3)]
    slots, starts = rng.integers(0, 3, 40), rng.integers(0, 5000 - 192 + 1, 40)
    scattered = Scattered(data, slots, starts, starts + 192)
    expected = [bytes(data[slot][start : start + 192]) for slot, start in zip(slots, starts, strict=True)]
    assert [bytes(each) for each in scattered] == [bytes(scattered[place]) for place in range(40)] == expected
    assert [bytes(each) for each in scattered[7:9]] == expected[7:9]
    raw = NormalizeOptions(image_size=8, encoding="raw")
    images_NHWC = np.empty((40, 8, 8, 3), np.uint8)
    decode_batch(scattered, raw, whole_windows(40, (8, 8)), images_NHWC)
    assert images_NHWC.tobytes() == b"".join(expected)
    windows = random_windows(rng, 8, 8, 40)
    decode_batch(scattered, raw, windows, images_NHWC)
    for place, pixels in enumerate(expected):
        image_HWC = np.frombuffer(pixels, np.uint8).reshape(8, 8, 3)
        assert np.array_equal(images_NHWC[place], cut_window(image_HWC, windows, place))
    with pytest.raises(IntegrityError, match="does not have the shape"):
        decode_batch(Scattered(data, slots, starts, starts + 191), raw, whole_windows(40, (8, 8)), images_NHWC)


@NEEDS_COPY_SLICES
@pytest.mark.parametrize(
    ("slots", "starts", "stops"),
    [
        ([2, 0], [0, 0], [4, 4]), ([-1, 0], [0, 0], [4, 4]), ([0, 0], [-1, 0], [3, 4]), ([0, 1], [0, 7], [4, 11]),
        ([0, 0], [0, 0], [4, 5]), ([0, 0], [0, 4], [4, 0]), ([0], [0], [4]), ([0, 0, 0], [0, 0, 0], [4, 4, 4]),
        ([], [], []), ([0, 0], [0], [4, 4]), ([0, 0], [-(1 << 63), 0], [4 - (1 << 63), 4]),
        ([0, 0], [(1 << 63) - 4, 0], [(1 << 63) - 1, 4]),
    ],
)  # fmt: skip
def test_slices_outside_of_their_source_are_refused(slots, starts, stops):
    import shardmill_native

    numbers = [np.array(each, np.int64) for each in (slots, starts, stops)]
    with pytest.raises(ValueError, match="inside"):
        shardmill_native.copy_slices([b"0123456789", b"0123456789"], *numbers, np.empty(8, np.uint8))


def test_rows_that_padding_repeats_are_decoded_once(monkeypatch):
    rng = np.random.default_rng(_SEED)
    encoded, normalize = jpegs(rng, 64, "444", 5), options(64, "444")
    which = np.array([3, 1, 1, 4, 3, 3, 0, 1])
    windows = random_windows(rng, 64, 48, 5).take(which)
    expected, found = np.empty((2, 8, 48, 48, 3), np.uint8)
    repeated = [encoded[place] for place in which.tolist()]
    decode_batch(repeated, normalize, windows, expected)
    decoded: list[int] = []
    sound = step_decoder.decode_batch
    monkeypatch.setattr(
        step_decoder, "decode_batch", lambda images, *rest: (decoded.append(len(images)), sound(images, *rest))
    )
    step_decoder.decode_distinct(repeated, normalize, windows, found, np.stack([which, which % 2], axis=1))
    assert np.array_equal(found, expected) and decoded == [4]
