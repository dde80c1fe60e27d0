"""Windows are drawn for whole batches, equal to what single images got before, and lie where the options allow."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.augment.draws import COLUMN_DRAW, FLIP_DRAW, ROW_DRAW, Draws
from shardmill.augment.options import PRESETS, AugmentOptions, augment_options
from shardmill.augment.windows import Windows, cut_window, draw_windows
from shardmill.errors import UsageError
from shardmill.mix import mix64
from tests.shardmill.images.make import photo

ROWS = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5)), min_size=1, max_size=9)


def drawn(rows: list[tuple[int, int]], seed: int = 0, epoch: int = 0) -> Draws:
    sample_ids, occurrences = zip(*rows, strict=True)
    return Draws(seed, epoch, np.array(sample_ids, np.int64), np.array(occurrences, np.int64))


def many(count: int = 4000) -> Draws:
    return drawn([(sample_id, 0) for sample_id in range(count)])


def as_before(image_HWC: np.ndarray, padding: int, key: tuple[int, ...], *, flips: bool) -> np.ndarray:
    """What `shardmill.augment.augment` did to an image before batches were drawn at once."""
    height, width = image_HWC.shape[:2]
    top, left = mix64(*key, ROW_DRAW) % (2 * padding + 1), mix64(*key, COLUMN_DRAW) % (2 * padding + 1)
    padded_HWC = np.pad(image_HWC, ((padding, padding), (padding, padding), (0, 0)), mode="edge")
    cut_HWC = padded_HWC[top : top + height, left : left + width]
    return cut_HWC[:, ::-1] if flips and mix64(*key, FLIP_DRAW) >> 63 else cut_HWC


@given(rows=ROWS, seed=st.integers(0, 2**63), epoch=st.integers(0, 9999), draw=st.integers(0, 255))
def test_draws_of_a_batch_are_those_of_mix64(rows: list[tuple[int, int]], seed: int, epoch: int, draw: int) -> None:
    draws = drawn(rows, seed, epoch)
    expected = [mix64(seed, epoch, sample_id, occurrence, draw) for sample_id, occurrence in rows]
    assert draws.bits(draw).tolist() == expected
    assert draws.below(draw, 7).tolist() == [bits % 7 for bits in expected]
    assert draws.coins(draw).tolist() == [bool(bits >> 63) for bits in expected]
    assert draws.uniform(draw, 2, 4).tolist() == [2 + 2 * ((bits >> 11) / 2**53) for bits in expected]


@given(rows=ROWS, seed=st.integers(0, 2**63), padding=st.integers(0, 5), flips=st.booleans())
def test_padded_crops_and_flips_are_those_of_older_runs(
    rows: list[tuple[int, int]], seed: int, padding: int, flips: bool
) -> None:
    image_HWC = photo(7, 9)
    options = AugmentOptions(random_crop_padding=padding, random_flip=flips)
    windows = draw_windows(drawn(rows, seed, 3), options, (7, 9))
    for row, (sample_id, occurrence) in enumerate(rows):
        expected_HWC = as_before(image_HWC, padding, (seed, 3, sample_id, occurrence), flips=flips)
        assert np.array_equal(cut_window(image_HWC, windows, row), expected_HWC)


@given(stored_HW=st.tuples(st.integers(1, 400), st.integers(1, 400)), min_area=st.floats(0.001, 1))
def test_random_rectangles_lie_in_the_image(stored_HW: tuple[int, int], min_area: float) -> None:
    options = AugmentOptions(random_resized_crop=True, min_crop_area=min_area)
    windows = draw_windows(many(50), options, stored_HW)
    assert windows.size_HW == stored_HW
    assert (windows.top_N >= 0).all() and (windows.left_N >= 0).all()
    assert (windows.height_N >= 1).all() and (windows.width_N >= 1).all()
    assert (windows.top_N + windows.height_N <= stored_HW[0]).all()
    assert (windows.left_N + windows.width_N <= stored_HW[1]).all()


def test_random_rectangles_have_every_area_and_place_about_equally_often() -> None:
    windows = draw_windows(many(), AugmentOptions(preset="imagenet", size=100), (200, 200))
    assert windows.size_HW == (100, 100)
    area_N = windows.height_N * windows.width_N / 200**2
    assert 0.07 < area_N.min() < 0.09
    assert area_N.max() > 0.95
    # Large ones fit less often, so the mean is below that of 0.08 to 1.
    assert 0.46 < area_N.mean() < 0.50
    aspect_N = windows.width_N / windows.height_N
    assert 0.73 < aspect_N.min() < 0.77
    assert 1.30 < aspect_N.max() < 1.37
    assert abs(np.log(aspect_N).mean()) < 0.01
    for first_N, side_N in ((windows.top_N, windows.height_N), (windows.left_N, windows.width_N)):
        free_N = first_N[side_N < 190] / (200 - side_N[side_N < 190])
        assert np.histogram(free_N, 4, (0, 1))[0].min() > 0.22 * len(free_N)
    assert 0.47 < windows.is_flipped_N.mean() < 0.53


def test_random_rectangles_never_change() -> None:
    """Recorded once: a change here would change the batches of every run that resumes."""
    windows = draw_windows(
        drawn([(-1, 0), (0, 0), (1, 0), (2**62, 0)], 5, 1), AugmentOptions(preset="imagenet"), (256, 192)
    )
    columns = (windows.top_N, windows.left_N, windows.height_N, windows.width_N, windows.is_flipped_N)
    assert np.stack(columns, axis=1).tolist() == [
        [54, 1, 171, 191, 0], [100, 4, 124, 150, 1], [105, 7, 140, 175, 1], [17, 8, 160, 172, 0]
    ]  # fmt: skip


def test_without_a_random_crop_a_smaller_size_is_the_centre() -> None:
    image_HWC = photo(12, 15)
    for options in (AugmentOptions(preset="none", size=6), AugmentOptions(preset="imagenet", size=6).unchanged):
        windows = draw_windows(many(3), options, (12, 15))
        assert np.array_equal(cut_window(image_HWC, windows, 2), image_HWC[3:9, 4:10])


def test_the_padded_crop_of_a_smaller_size_reaches_all_of_the_padded_image() -> None:
    windows = draw_windows(many(), AugmentOptions(random_crop_padding=2, size=6), (12, 9))
    assert set(windows.top_N.tolist()) == set(range(-2, 9))
    assert set(windows.left_N.tolist()) == set(range(-2, 6))


def test_a_window_is_cut_resized_and_mirrored() -> None:
    image_HWC = photo(20, 24)
    ones = np.ones(2, np.int64)
    windows = Windows(-3 * ones, 20 * ones, 10 * ones, 9 * ones, np.array([False, True]), (5, 6))
    padded_HWC = np.pad(image_HWC, ((3, 0), (0, 5), (0, 0)), mode="edge")[:10, 20:]
    expected_HWC = cv2.resize(padded_HWC, (6, 5), interpolation=cv2.INTER_AREA)
    assert np.array_equal(cut_window(image_HWC, windows, 0), expected_HWC)
    assert np.array_equal(cut_window(image_HWC, windows, 1), expected_HWC[:, ::-1])
    grey_HWC = cut_window(image_HWC[:, :, :1], windows, 1)
    assert (grey_HWC.shape, grey_HWC.flags.c_contiguous) == ((5, 6, 1), True)


@pytest.mark.parametrize(
    ("height", "width", "filter"),
    [(8, 8, cv2.INTER_LINEAR), (17, 17, cv2.INTER_LINEAR), (18, 13, cv2.INTER_AREA), (12, 20, cv2.INTER_AREA)],
)
def test_a_window_is_averaged_if_a_side_shrinks_to_two_thirds_and_interpolated_otherwise(height, width, filter) -> None:
    image_HWC = photo(20, 20)
    number = np.ones(1, np.int64)
    windows = Windows(0 * number, 0 * number, height * number, width * number, np.zeros(1, bool), (12, 12))
    expected_HWC = cv2.resize(image_HWC[:height, :width], (12, 12), interpolation=filter)
    assert np.array_equal(cut_window(image_HWC, windows, 0), expected_HWC)


@pytest.mark.parametrize("name", ["default", "imagenet", "cifar", "none"])
def test_only_declared_photographs_are_mirrored(name: str) -> None:
    options = augment_options(name)
    assert options.flips == (name in ("imagenet", "cifar"))
    assert options == AugmentOptions(**options.model_dump())
    windows = draw_windows(many(40), options, (8, 8))
    assert windows.is_flipped_N.any() == options.flips
    assert (len(set(windows.top_N.tolist())) > 1) == (name != "none")


def test_options_beside_a_preset_replace_its_own() -> None:
    assert AugmentOptions(preset="imagenet", random_flip=False).flips is False
    assert AugmentOptions(preset="cifar", random_crop_padding=2).random_crop_padding == 2
    assert AugmentOptions() == AugmentOptions(preset="default")
    # What differs from the defaults is all of it, so a config without the rest means the same.
    for options in (AugmentOptions(preset="cifar", images="any"), AugmentOptions(preset="imagenet", size=8)):
        assert AugmentOptions(**options.model_dump(exclude_defaults=True)) == options
    assert set(PRESETS) == {"default", "imagenet", "cifar", "none"}


def test_refusals_name_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"augment\.size = 9, but the stored images have 8 x 12 pixels.*at most 8"):
        AugmentOptions(size=9).size_of((8, 12))
    with pytest.raises(UsageError, match="augment = 'imagnet'.*imagenet, cifar, none"):
        augment_options("imagnet")
