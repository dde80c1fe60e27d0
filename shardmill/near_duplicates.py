"""Finds stored images that look alike although their bytes differ: resized, recompressed or slightly edited copies.

Each image gets a difference hash, 64 bits that say whether a pixel of its 9 x 8 thumbnail is brighter than its left
neighbour (N. Krawetz, "Kind of Like That", 2013). Images whose hashes differ in few bits form a group.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import cv2
import numpy as np

from shardmill.dataset.dataset import Dataset
from shardmill.errors import UsageError
from shardmill.loader.samples import iterate_samples

MAX_BITS = 7
_HASH_BITS = 64
# Flatter thumbnails than this have hashes of noise, by which all plain images would look alike.
_MIN_CONTRAST = 8
# So many pairs are compared at once, about 90 bytes each.
_BLOCK_PAIRS = 1 << 20
_PROGRESS_IMAGES = 256


@dataclass(frozen=True, slots=True)
class SimilarImage:
    """A member of a group."""

    source: str
    split: str
    class_name: str | None


@dataclass(frozen=True, slots=True)
class SimilarImages:
    """Images that look alike, sorted by source; each is near at least one of the others."""

    images: tuple[SimilarImage, ...]

    @property
    def crosses_splits(self) -> bool:
        """Whether a model would be tested on what it was trained on."""
        return len({image.split for image in self.images}) > 1

    @property
    def has_conflict(self) -> bool:
        """Whether they are of several classes."""
        return len({image.class_name for image in self.images}) > 1


def find_near_duplicates(
    dataset: Dataset, max_bits: int, on_progress: Callable[[int, int], None] | None = None
) -> list[SimilarImages]:
    """Groups of images whose hashes differ in at most `max_bits` of 64, those that cross splits first.

    Reads and decodes every stored image; about 300 bytes an image stay in memory. `on_progress` gets the number of
    images read and of all. Raises UsageError unless 0 <= max_bits <= 7, and as reading samples does.
    """
    if not 0 <= max_bits <= MAX_BITS:
        raise UsageError(f"{max_bits} bits may differ", f"expected 0 to {MAX_BITS}; 3 finds most copies", "")
    images: list[SimilarImage] = []
    hashes: list[int] = []
    num_read = 0
    names, total = dataset.manifest.class_names, dataset.manifest.counts.accepted
    for split in dataset.manifest.splits:
        for sample in iterate_samples(dataset, split):
            num_read += 1
            found = difference_hash(sample.image_HWC)
            if found is not None:
                class_name = None if sample.label is None else names[sample.label]
                images.append(SimilarImage(sample.source, split, class_name))
                hashes.append(found)
            if on_progress is not None and num_read % _PROGRESS_IMAGES == 0:
                on_progress(num_read, total)
    groups = [
        SimilarImages(tuple(sorted((images[place] for place in group), key=lambda image: image.source)))
        for group in _groups(np.array(hashes, np.uint64), max_bits)
    ]
    return sorted(groups, key=lambda each: (not each.crosses_splits, not each.has_conflict, each.images[0].source))


def difference_hash(image_HWC: np.ndarray) -> int | None:
    """64 bits, or None for an image too plain to be distinguished; uint8, 1 or 3 channels."""
    gray_HW = cv2.cvtColor(image_HWC, cv2.COLOR_RGB2GRAY) if image_HWC.shape[2] == 3 else image_HWC[:, :, 0]
    small_8x9 = cv2.resize(gray_HW, (9, 8), interpolation=cv2.INTER_AREA)
    if int(small_8x9.max()) - int(small_8x9.min()) < _MIN_CONTRAST:
        return None
    return int.from_bytes(np.packbits(small_8x9[:, 1:] > small_8x9[:, :-1]).tobytes(), "big")


def _groups(hashes_N: np.ndarray, max_bits: int) -> list[list[int]]:
    """Places of hashes that are connected by steps of at most `max_bits`; groups of one are left out."""
    unique_U, place_of_N = np.unique(hashes_N, return_inverse=True)
    parent = list(range(len(unique_U)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    for one, other in near_pairs(unique_U, max_bits):
        parent[root(one)] = root(other)
    members: dict[int, list[int]] = defaultdict(list)
    for place, unique in enumerate(place_of_N.tolist()):
        members[root(unique)].append(place)
    return [group for group in members.values() if len(group) > 1]


def near_pairs(hashes_U: np.ndarray, max_bits: int) -> Iterator[tuple[int, int]]:
    """Pairs of places. Of b + 1 bands, two hashes that differ in b bits have at least one in common."""
    edges = np.linspace(0, _HASH_BITS, max_bits + 2).astype(int).tolist()
    for low, high in itertools.pairwise(edges):
        mask = np.uint64((1 << (high - low)) - 1)
        band_U = (hashes_U >> np.uint64(low)) & mask
        order_U = np.argsort(band_U, kind="stable")
        starts = np.flatnonzero(np.diff(band_U[order_U])) + 1
        for bucket in np.split(order_U, starts):
            block_rows = max(1, _BLOCK_PAIRS // len(bucket))
            for first in range(0, len(bucket) - 1, block_rows):
                block = bucket[first : first + block_rows]
                differ = np.bitwise_xor.outer(hashes_U[block], hashes_U[bucket[first:]])
                rows, columns = np.nonzero(_num_ones(differ) <= max_bits)
                for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
                    if row < column:
                        yield int(block[row]), int(bucket[first + column])


def _num_ones(values: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 8), axis=-1).sum(axis=-1)
