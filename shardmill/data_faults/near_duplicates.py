"""Finds stored images that look alike although their bytes differ: resized, recompressed or slightly edited copies.

Images whose difference hashes (`shardmill.images.look`) differ in few bits form a group; `near_hashes` finds them.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from shardmill.data_faults.looks import RowLooks
from shardmill.data_faults.near_hashes import connect
from shardmill.errors import UsageError

MAX_BITS = 7


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


@dataclass(frozen=True, slots=True)
class Copies:
    """The images of a version that look alike."""

    groups: tuple[SimilarImages, ...]
    """Those that cross splits first, then those of several classes."""
    num_left_out: int
    """Images that look too alike to be compared with each other, of which groups may be missing or too small."""


def find_near_duplicates(looks: RowLooks, max_bits: int) -> Copies:
    """Groups of images whose hashes differ in at most `max_bits` of 64, by steps from one to the next.

    Raises UsageError unless 0 <= max_bits <= 7.
    """
    if not 0 <= max_bits <= MAX_BITS:
        raise UsageError(f"{max_bits} bits may differ", f"expected 0 to {MAX_BITS}; 3 finds most copies", "")
    hashes = looks.rows.column("difference_hash")
    rows_N = np.flatnonzero(pc.is_valid(hashes).to_numpy())
    unique_U, place_of_N = np.unique(
        hashes.drop_null().to_numpy().astype(np.int64).view(np.uint64), return_inverse=True
    )
    found = connect(unique_U, max_bits)
    groups = [
        SimilarImages(tuple(sorted((_image(looks, row) for row in group), key=lambda each: each.source)))
        for group in _groups(rows_N, found.representative_U[place_of_N])
    ]
    groups.sort(key=lambda each: (not each.crosses_splits, not each.has_conflict, each.images[0].source))
    return Copies(tuple(groups), int(found.is_left_out_U[place_of_N].sum()))


def _image(looks: RowLooks, row: int) -> SimilarImage:
    return SimilarImage(looks.sources[row], looks.split(row), looks.class_name(row))


def _groups(rows_N: np.ndarray, group_of_N: np.ndarray) -> list[list[int]]:
    """Rows of the same number; groups of one are left out."""
    order_N = np.argsort(group_of_N, kind="stable")
    parts = np.split(rows_N[order_N], np.flatnonzero(np.diff(group_of_N[order_N])) + 1)
    return [part.tolist() for part in parts if len(part) > 1]
