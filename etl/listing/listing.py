"""The driver's view of a source: counts, sums and names of files. It does not grow with the number of images.

An image belongs to a *cell*, an unsigned 64-bit hash: of its sample id, or of its block if it lies in a container. A
work unit is a range of cells, so that a listing that has grown leaves the old members of a unit together.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardmill.ids import DIGEST_MODULUS, add_digests, format_digest, key_hash

if TYPE_CHECKING:
    from etl.listing.segments import ListingSegment
    from shardmill.dataset.ledger import RejectionLog

NUM_BUCKETS = 1 << 16
"""Finest ranges of cells that are counted: the largest number of work units."""
CELLS_PER_BUCKET = (1 << 64) // NUM_BUCKETS


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Listing:
    """The driver's view of a source: counts, sums and the segments' ranges; the images are in the segments."""

    folder: Path
    """A local folder that goes with this value."""
    segments: tuple[ListingSegment, ...]
    """Segments by ranges of cells, ascending; only the images of one cell may be in two of them."""
    rejections: RejectionLog
    """Refused by the listing alone, in the order of their keys' bytes."""
    images_by_label: Counter[tuple[str | None, str | None]]
    """(split, label) -> images to process."""
    images_by_bucket: np.ndarray
    """Images of each range of 2^48 cells; shape (NUM_BUCKETS,)."""
    facts_by_bucket: np.ndarray
    """Sums of the images' `fact_limbs`, as eight 32-bit limbs in uint64; shape (NUM_BUCKETS, 8)."""
    probes: tuple[str, ...]
    """Paths of a few files, spread over the listing; if none of them is left later, the source itself is absent."""
    key_sum: str
    """Additive hash of all listed keys, rejected ones included."""
    warnings: tuple[str, ...]
    multi_labels: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    """(split, class) -> images to process, where an image may have several classes, or none."""
    source_bytes: int = 0
    """Total size of all images that were listed with their size."""
    has_all_sizes: bool = True
    """Whether every image was listed with its size: then equal facts are hardly those of different files."""
    extra_types: Mapping[str, str] = field(default_factory=dict)
    """The source's extra columns: name -> type."""

    @property
    def num_images(self) -> int:
        return self.images_by_label.total()

    @property
    def num_listed(self) -> int:
        return self.num_images + len(self.rejections)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Every class that has an image to process, sorted."""
        return tuple(sorted({label for (_, label), times in self.images_by_class.items() if label and times}))

    @property
    def images_by_class(self) -> Counter[tuple[str | None, str | None]]:
        """(split, class) -> images, whether an image has one class or several."""
        return self.multi_labels or self.images_by_label

    @property
    def has_splits(self) -> bool:
        """Whether the source names splits; hashes of the contents decide otherwise."""
        return any(split is not None for (split, _), times in self.images_by_label.items() if times)

    @property
    def has_unnamed_splits(self) -> bool:
        """Whether a hash of its content decides the split of some image."""
        return any(split is None and times for (split, _), times in self.images_by_label.items())

    @property
    def num_rejected_by_reason(self) -> dict[str, int]:
        """Reason -> refused inputs, by name of the reason."""
        return {str(reason): times for reason, times in sorted(self.rejections.by_reason.items())}

    @property
    def fingerprint(self) -> str:
        """Equal listings (keys, sizes, times, labels, splits) have equal fingerprints, in any order."""
        refused = (key_hash(f"{each.key}\0{each.reason}\0{each.size_bytes}") for each in self.rejections)
        parts = (format_digest(sum_limbs(self.facts_by_bucket)), format_digest(sum(refused) % DIGEST_MODULUS))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def sum_limbs(limbs_N8: np.ndarray) -> int:
    """The sum modulo 2^256 of numbers that are given as eight 32-bit limbs in their last axis."""
    sums = limbs_N8.reshape(-1, 8).sum(axis=0, dtype=np.uint64)
    return add_digests(*(int(limb) << (32 * (7 - place)) for place, limb in enumerate(sums)))


def limbs(digests_N32: np.ndarray) -> np.ndarray:
    """256-bit digests (uint8, shape (N, 32)) as eight 32-bit limbs in uint64, shape (N, 8), most significant first."""
    return digests_N32.view(">u4").astype(np.uint64)
