"""Statistics of a version as exact integers: sums over pixels, and images by size. Those of parts add up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
from pydantic import Field

from shardmill.section import Section

NUM_SIDE_BUCKETS = 16
# Between the common ratios: 9:16, then 2:3 and 3:4, about square, then 4:3 and 3:2, 16:9, panoramas.
_ASPECT_EDGES = tuple(map(Fraction, ("1/4", "1/2", "5/8", "7/8", "8/7", "8/5", "2", "4")))

SIDE_NAMES = (
    "1",
    *(f"{1 << place}-{(2 << place) - 1}" for place in range(1, NUM_SIDE_BUCKETS - 1)),
    f"{1 << (NUM_SIDE_BUCKETS - 1)}+",
)
"""Pixels of the longer side of each bucket, both ends included: powers of two."""
_EDGE_NAMES = [f"{edge.numerator}:{edge.denominator}" for edge in _ASPECT_EDGES]
ASPECT_NAMES = (
    f"< {_EDGE_NAMES[0]}",
    *(f"{low} to {high}" for low, high in itertools.pairwise(_EDGE_NAMES)),
    f"> {_EDGE_NAMES[-1]}",
)
"""Width to height of each bucket. An edge belongs to the bucket that is nearer to the square."""


class ChannelSums(Section):
    """Exact sums over the train split's normalized pixels; they merge by addition."""

    num_pixels: int = Field(default=0, ge=0)
    sums: tuple[int, ...] = ()
    square_sums: tuple[int, ...] = ()

    def mean(self) -> tuple[float, ...]:
        """Per channel, on the 0..255 scale."""
        return tuple(total / self.num_pixels for total in self.sums) if self.num_pixels else (0.0,) * len(self.sums)

    def std(self) -> tuple[float, ...]:
        """Per channel, on the 0..255 scale; 1 for a constant channel, so that it can be divided by."""
        # n * sum(x^2) - sum(x)^2 in integers: no cancellation.
        variances = [
            (self.num_pixels * square - total * total) / (self.num_pixels * self.num_pixels) if self.num_pixels else 0.0
            for total, square in zip(self.sums, self.square_sums, strict=True)
        ]
        return tuple(math.sqrt(variance) or 1.0 for variance in variances)


class SizeCounts(Section):
    """Images by size and by aspect ratio. Each is counted once in both."""

    by_longer_side: tuple[int, ...] = Field(
        default=(0,) * NUM_SIDE_BUCKETS, min_length=NUM_SIDE_BUCKETS, max_length=NUM_SIDE_BUCKETS
    )
    """Counts in the order of `SIDE_NAMES`."""
    by_aspect_ratio: tuple[int, ...] = Field(
        default=(0,) * len(ASPECT_NAMES), min_length=len(ASPECT_NAMES), max_length=len(ASPECT_NAMES)
    )
    """Counts in the order of `ASPECT_NAMES`."""
    num_bytes: int = Field(default=0, ge=0)
    """Total size of their files, or as stored in one format."""

    @property
    def num_images(self) -> int:
        return sum(self.by_longer_side)


class ImageSizes(Section):
    """Sizes of the images of a version, or of a part of it, before and after normalization."""

    source: SizeCounts = SizeCounts()
    """Upright, before they were cropped and resized."""
    stored: SizeCounts = SizeCounts()


def count_sizes(heights: Sequence[int] | np.ndarray, widths: Sequence[int] | np.ndarray, num_bytes: int) -> SizeCounts:
    """Count images with these sides in pixels. A height of 0 means that the size is unknown; such images
    are skipped.
    """
    heights_N, widths_N = np.asarray(heights, np.int64), np.asarray(widths, np.int64)
    is_known_N = heights_N > 0
    heights_N, widths_N = heights_N[is_known_N], widths_N[is_known_N]
    # frexp gives the exponent of a power of two above the side, exactly.
    sides_N = np.frexp(np.maximum(heights_N, widths_N))[1] - 1
    aspects_N = np.zeros(len(heights_N), np.int64)
    for edge in _ASPECT_EDGES:
        wide_N, tall_N = widths_N * edge.denominator, heights_N * edge.numerator
        aspects_N += wide_N >= tall_N if edge < 1 else wide_N > tall_N
    return SizeCounts(
        by_longer_side=_counted(np.minimum(sides_N, NUM_SIDE_BUCKETS - 1), NUM_SIDE_BUCKETS),
        by_aspect_ratio=_counted(aspects_N, len(ASPECT_NAMES)),
        num_bytes=num_bytes,
    )


def add_sizes(parts: Iterable[ImageSizes]) -> ImageSizes:
    """Add the sizes of all parts."""
    parts = tuple(parts)
    return ImageSizes(source=_add([each.source for each in parts]), stored=_add([each.stored for each in parts]))


def _add(parts: Sequence[SizeCounts]) -> SizeCounts:
    empty = SizeCounts()
    return SizeCounts(
        by_longer_side=_sum_elementwise(each.by_longer_side for each in (empty, *parts)),
        by_aspect_ratio=_sum_elementwise(each.by_aspect_ratio for each in (empty, *parts)),
        num_bytes=sum(each.num_bytes for each in parts),
    )


def _sum_elementwise(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts, strict=True)))


def _counted(buckets_N: np.ndarray, num_buckets: int) -> tuple[int, ...]:
    return tuple(np.bincount(buckets_N, minlength=num_buckets).tolist())
