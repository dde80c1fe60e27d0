"""Moves boxes from a source image to its stored image, by the geometry that its pixels follow.

A box is x0, y0, x1, y1 in pixels of the upright image: pixel n reaches from n to n + 1, so a box over all of an image
that is 40 wide has x0 = 0 and x1 = 40. Shape legend: K boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.images.geometry import Geometry
from shardmill.images.pixels import FLIPS_COLUMNS, FLIPS_ROWS, SWAPS_SIDES
from shardmill.typed_columns import NUM_SIDES

CLIPPED_NOTE = "boxes_clipped"
DROPPED_NOTE = "boxes_dropped_"
"""Followed by how many of an image's boxes were dropped."""
OUTSIDE_NOTE = "boxes_outside_"
"""Followed by how many of an image's boxes end outside of the source, whatever is kept of it."""
# Sides are rounded.
_MARGIN = 1.0


@dataclass(frozen=True, slots=True)
class MovedBoxes:
    """The boxes of a stored image."""

    sides: tuple[float, ...]
    """Four numbers for each box, all of float32."""
    kept: tuple[int, ...]
    """Which of the source's boxes each one is."""
    num_clipped: int
    num_dropped: int
    """Boxes of which no part is left."""


def move_boxes(sides: Sequence[float], geometry: Geometry) -> MovedBoxes:
    """Boxes of the upright source in the stored image: clipped to what is kept of the source, and dropped outside."""
    given_K4 = np.array(sides, np.float64).reshape(-1, NUM_SIDES)
    columns, rows = geometry.columns, geometry.rows
    starts = np.array([columns.start, rows.start] * 2)
    lengths = np.array([columns.length, rows.length] * 2)
    inside_K4 = np.clip(given_K4 - starts, 0, lengths)
    is_clipped_K = (inside_K4 != given_K4 - starts).any(axis=1)
    # Each step rounds by itself, as no library may fuse them: so every machine computes the same numbers.
    moved_K4 = inside_K4 * np.array([geometry.width, geometry.height] * 2)
    moved_K4 = moved_K4 / lengths + np.array([geometry.left, geometry.top] * 2)
    stored_K4 = moved_K4.astype(np.float32)
    is_left_K = (stored_K4[:, :2] < stored_K4[:, 2:]).all(axis=1)
    return MovedBoxes(
        sides=tuple(stored_K4[is_left_K].ravel().tolist()),
        kept=tuple(np.flatnonzero(is_left_K).tolist()),
        num_clipped=int((is_clipped_K & is_left_K).sum()),
        num_dropped=int((~is_left_K).sum()),
    )


def count_outside(sides: Sequence[float], height: int, width: int) -> int:
    """How many boxes end more than a pixel outside of an image."""
    given_K4 = np.array(sides, np.float64).reshape(-1, NUM_SIDES)
    is_outside_K4 = (given_K4 < -_MARGIN) | (given_K4 > np.array([width, height] * 2) + _MARGIN)
    return int(is_outside_K4.any(axis=1).sum())


def turn_boxes(sides: Sequence[float], orientation: int, height: int, width: int) -> tuple[float, ...]:
    """Boxes of a file's own pixels in the upright image, whose size is given. `orientation` is EXIF's 1 to 8."""
    turned: list[float] = []
    for first in range(0, len(sides), NUM_SIDES):
        x0, y0, x1, y1 = sides[first : first + NUM_SIDES]
        if orientation in SWAPS_SIDES:
            x0, y0, x1, y1 = y0, x0, y1, x1
        if orientation in FLIPS_ROWS:
            y0, y1 = height - y1, height - y0
        if orientation in FLIPS_COLUMNS:
            x0, x1 = width - x1, width - x0
        turned += x0, y0, x1, y1
    return tuple(turned)
