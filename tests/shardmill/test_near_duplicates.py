"""Copies that were resized, recompressed or brightened are found among other images; unlike ones are not."""

from __future__ import annotations

import random

import cv2
import numpy as np
import pytest

from etl.config import EtlConfig
from shardmill.data_faults.looks import read_looks
from shardmill.data_faults.near_duplicates import connect, find_near_duplicates
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.images.look import difference_hash, luma
from tests.lab.datasets import build_here


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
    leak, conflict = find_near_duplicates(read_looks(dataset), 3).groups
    assert [image.source for image in leak.images] == ["test/cat/resized.jpg", "train/cat/0.png"]
    assert leak.crosses_splits and not leak.has_conflict
    assert [image.source for image in conflict.images] == ["train/cat/brighter.png", "train/dog/1.png"]
    assert conflict.has_conflict and not conflict.crosses_splits


def test_the_number_of_bits_is_checked(dataset):
    with pytest.raises(UsageError, match="expected 0 to 7"):
        find_near_duplicates(read_looks(dataset), 8)


def hashes_with_neighbours(common_bits: int, count: int = 1500) -> np.ndarray:
    """Random but for the lowest bits; of a fifth there are neighbours, at every distance up to 9."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    generator = np.random.default_rng(seed)
    hashes = generator.integers(0, 2**64, count, np.uint64) >> np.uint64(common_bits) << np.uint64(common_bits)
    flips = [
        sum(1 << int(bit) for bit in generator.choice(64, place % 9 + 1, replace=False)) for place in range(count // 5)
    ]
    return np.unique(np.concatenate([hashes, hashes[: len(flips)] ^ np.array(flips, np.uint64)]))


def distances(hashes: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(hashes.view(np.uint8).reshape(-1, 8), axis=1).astype(np.float32)
    ones = bits.sum(axis=1)
    return ones[:, None] + ones[None] - 2 * bits @ bits.T


def connected_one_by_one(is_near: np.ndarray) -> np.ndarray:
    """Of each row the first row of its component, by a walk."""
    first = np.full(len(is_near), -1)
    for start in range(len(is_near)):
        reached = [start] if first[start] < 0 else []
        while reached:
            new = np.flatnonzero(is_near[reached.pop()] & (first < 0))
            first[new] = start
            reached += new.tolist()
    return first


# A white margin is one band of a thumbnail that all images have in common, or two.
@pytest.mark.parametrize("common_bits", [0, 16, 32, 46])
def test_no_near_hash_is_missed(common_bits: int):
    hashes = hashes_with_neighbours(common_bits)
    apart = distances(hashes)
    for max_bits in range(8):
        found = connect(hashes, max_bits)
        assert found.representative_U.tolist() == connected_one_by_one(apart <= max_bits).tolist(), max_bits
        assert not found.is_left_out_U.any()


@pytest.mark.parametrize("common_bits", [16, 32])
def test_a_common_band_does_not_lead_to_a_comparison_of_each_with_each(common_bits: int):
    hashes = hashes_with_neighbours(common_bits, 20_000)
    num_pairs = len(hashes) ** 2 // 2
    assert not connect(hashes, 3, max_comparisons=num_pairs // 8).is_left_out_U.any()


def test_hashes_beyond_the_limit_are_named_and_those_of_others_are_exact():
    crowd = np.arange(2**11, dtype=np.uint64)
    others = hashes_with_neighbours(0)
    hashes = np.unique(np.concatenate([crowd, others]))
    found = connect(hashes, 3, max_comparisons=500_000)
    assert found.is_left_out_U.any()
    expected = connected_one_by_one(distances(hashes) <= 3)
    # A left-out hash may have connected others.
    is_exact = ~np.isin(expected, expected[found.is_left_out_U])
    assert is_exact.sum() > 1000
    assert found.representative_U[is_exact].tolist() == expected[is_exact].tolist()


def test_a_plain_image_has_no_hash():
    assert difference_hash(luma(np.full((32, 32, 1), 7, np.uint8))) is None
    assert difference_hash(luma(picture(3))) == difference_hash(luma(picture(3)))
