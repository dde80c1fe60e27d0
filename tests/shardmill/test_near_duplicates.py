"""Copies that were resized, recompressed or brightened are found among other images; unlike ones are not."""

from __future__ import annotations

import random

import cv2
import numpy as np
import pytest

from etl.config import EtlConfig
from shardmill.data_faults.looks import read_looks
from shardmill.data_faults.near_duplicates import find_near_duplicates, near_pairs
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.images.look import difference_hash, luma
from tests.support import build_here


def picture(seed: int, side: int = 96) -> np.ndarray:
    """Large blobs, as photos have and noise has not."""
    blobs = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return cv2.resize(blobs, (side, side), interpolation=cv2.INTER_CUBIC)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("near")
    for name in ("train/cat", "train/dog", "test/cat"):
        (folder / "images" / name).mkdir(parents=True)
    for seed in range(12):
        cv2.imwrite(str(folder / "images" / "train" / ("cat", "dog")[seed % 2] / f"{seed}.png"), picture(seed))
    cv2.imwrite(str(folder / "images/test/cat/resized.jpg"), picture(0, 61), [cv2.IMWRITE_JPEG_QUALITY, 60])
    cv2.imwrite(str(folder / "images/train/cat/brighter.png"), cv2.convertScaleAbs(picture(1), alpha=0.9, beta=20))
    for shade in (10, 200):
        cv2.imwrite(str(folder / f"images/train/dog/plain{shade}.png"), np.full((40, 40, 3), shade, np.uint8))
    build_here(str(folder / "images"), str(folder / "dataset"), EtlConfig(image_size=48, encoding="jpeg"))
    return open_dataset(str(folder / "dataset"))


def test_copies_are_found_and_leaks_lead(dataset):
    leak, conflict = find_near_duplicates(read_looks(dataset), 3)
    assert [image.source for image in leak.images] == ["test/cat/resized.jpg", "train/cat/0.png"]
    assert leak.crosses_splits and not leak.has_conflict
    assert [image.source for image in conflict.images] == ["train/cat/brighter.png", "train/dog/1.png"]
    assert conflict.has_conflict and not conflict.crosses_splits


def test_the_number_of_bits_is_checked(dataset):
    with pytest.raises(UsageError, match="expected 0 to 7"):
        find_near_duplicates(read_looks(dataset), 8)


def test_no_near_pair_is_missed():
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    generator = np.random.default_rng(seed)
    hashes = generator.integers(0, 2**64, 300, np.uint64)
    # Neighbours of some, at every distance up to 9.
    flips = [sum(1 << int(bit) for bit in generator.choice(64, count, replace=False)) for count in range(1, 10)]
    hashes = np.unique(np.concatenate([hashes, hashes[:9] ^ np.array(flips, np.uint64)]))
    distances = np.array([[(one ^ other).bit_count() for other in hashes.tolist()] for one in hashes.tolist()])
    for max_bits in range(8):
        expected = {(i, j) for i, j in np.argwhere(distances <= max_bits).tolist() if i < j}
        assert {tuple(sorted(pair)) for pair in near_pairs(hashes, max_bits)} == expected


def test_a_plain_image_has_no_hash():
    assert difference_hash(luma(np.full((32, 32, 1), 7, np.uint8))) is None
    assert difference_hash(luma(picture(3))) == difference_hash(luma(picture(3)))
