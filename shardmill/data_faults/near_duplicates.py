"""Finds stored images that look alike although their bytes differ: resized, recompressed or slightly edited copies.

Images whose difference hashes (`shardmill.images.look`) differ in few bits form a group.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from shardmill.data_faults.looks import RowLooks
from shardmill.errors import UsageError

MAX_BITS = 7
_HASH_BITS = 64
# So many pairs are compared at once, about 90 bytes each.
_BLOCK_PAIRS = 1 << 20


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


def find_near_duplicates(looks: RowLooks, max_bits: int) -> list[SimilarImages]:
    """Groups of images whose hashes differ in at most `max_bits` of 64, those that cross splits first.

    Raises UsageError unless 0 <= max_bits <= 7.
    """
    if not 0 <= max_bits <= MAX_BITS:
        raise UsageError(f"{max_bits} bits may differ", f"expected 0 to {MAX_BITS}; 3 finds most copies", "")
    hashes = looks.rows.column("difference_hash")
    rows_N = np.flatnonzero(pc.is_valid(hashes).to_numpy())
    groups = [
        SimilarImages(
            tuple(sorted((_image(looks, int(rows_N[place])) for place in group), key=lambda each: each.source))
        )
        for group in _groups(hashes.drop_null().to_numpy().astype(np.int64).view(np.uint64), max_bits)
    ]
    return sorted(groups, key=lambda each: (not each.crosses_splits, not each.has_conflict, each.images[0].source))


def _image(looks: RowLooks, row: int) -> SimilarImage:
    return SimilarImage(looks.sources[row], looks.split(row), looks.class_name(row))


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
