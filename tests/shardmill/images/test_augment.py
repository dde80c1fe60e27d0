"""Augmentation is a function of (seed, epoch, sample id, occurrence) alone, and moves pixels without changing them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.augment.one_image import augment
from shardmill.augment.options import AugmentOptions
from tests.shardmill.images.make import photo

KEYS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63),
        "epoch": st.integers(0, 10_000),
        "sample_id": st.integers(-(2**63), 2**63 - 1),
        "occurrence": st.integers(0, 5),
    }
)


def every_change(image_HWC: np.ndarray, padding: int, *, with_flips: bool) -> set[bytes]:
    """All images that the options allow, worked out with NumPy's own padding."""
    height, width = image_HWC.shape[:2]
    padded_HWC = np.pad(image_HWC, ((padding, padding), (padding, padding), (0, 0)), mode="edge")
    offsets = range(2 * padding + 1)
    crops = [padded_HWC[top : top + height, left : left + width] for top in offsets for left in offsets]
    return {crop.tobytes() for crop in crops} | {crop[:, ::-1].tobytes() for crop in crops if with_flips}


@given(key=KEYS, padding=st.integers(0, 3), random_flip=st.booleans(), num_channels=st.sampled_from([1, 3]))
def test_the_result_is_one_of_the_allowed_ones_and_repeats(
    key: dict[str, int], padding: int, random_flip: bool, num_channels: int
) -> None:
    options = AugmentOptions(random_crop_padding=padding, random_flip=random_flip)
    image_HWC = photo(7, 9)[:, :, :num_channels]
    changed_HWC = augment(image_HWC, options, **key)
    assert (changed_HWC.shape, changed_HWC.dtype) == (image_HWC.shape, np.uint8)
    assert changed_HWC.flags.c_contiguous
    assert changed_HWC.tobytes() in every_change(image_HWC, padding, with_flips=random_flip)
    assert np.array_equal(changed_HWC, augment(image_HWC.copy(), options, **key))


@pytest.mark.parametrize("part", ["seed", "epoch", "sample_id", "occurrence"])
def test_every_part_of_the_key_matters(part: str) -> None:
    key = {"seed": 1, "epoch": 2, "sample_id": 3, "occurrence": 0}
    results = {augment(photo(), AugmentOptions(), **{**key, part: value}).tobytes() for value in range(30)}
    assert len(results) > 10


def test_all_offsets_and_both_directions_come_up_about_equally_often() -> None:
    image_HWC = photo(7, 9)
    options = AugmentOptions(random_crop_padding=1, random_flip=True)
    counts: dict[bytes, int] = {}
    for sample_id in range(1800):
        result = augment(image_HWC, options, seed=0, epoch=0, sample_id=sample_id).tobytes()
        counts[result] = counts.get(result, 0) + 1
    assert counts.keys() == every_change(image_HWC, 1, with_flips=True)
    assert len(counts) == 18
    assert min(counts.values()) > 60  # 100 expected
    assert max(counts.values()) < 150


def test_switched_off_it_is_a_copy() -> None:
    image_HWC = photo()
    options = AugmentOptions(random_crop_padding=0, random_flip=False)
    copy_HWC = augment(image_HWC, options, seed=0, epoch=0, sample_id=0)
    assert np.array_equal(copy_HWC, image_HWC)
    assert not np.shares_memory(copy_HWC, image_HWC)


def test_the_draws_never_change() -> None:
    """Recorded once: a change here would change the batches of every run that resumes."""
    positions_HWC = np.arange(81, dtype=np.uint8).reshape(9, 9, 1)
    centres = [
        int(augment(positions_HWC, AugmentOptions(), seed=5, epoch=1, sample_id=sample_id)[4, 4, 0])
        for sample_id in (-1, 0, 1, 2**62)
    ]
    assert centres == [28, 52, 61, 47]


def test_a_run_says_what_it_changes() -> None:
    for chosen, words in (
        ({}, "shift by up to 4 pixels, no mirroring"),
        ({"preset": "cifar", "cutmix_alpha": 1}, "shift by up to 4 pixels, mirroring, cutmix_alpha"),
        ({"preset": "imagenet", "hue": 0.1, "brightness": 0.4}, "random resized crop, mirroring, brightness, hue"),
        ({"preset": "none"}, "no crop, no mirroring"),
    ):
        assert AugmentOptions(**chosen).in_words == words
