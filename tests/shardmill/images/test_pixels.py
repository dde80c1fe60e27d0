"""Changes of pixels: each row's depend on its own key alone, stay in range, and do what their names say."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.augment import colours
from shardmill.augment.draws import Draws
from shardmill.augment.options import AugmentOptions
from shardmill.augment.pixels import OPERATIONS, change_pixels
from tests.shardmill.images.make import photo

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
