"""Draws the outlines of objects, polygons or COCO's run lengths, as a mask in pixels of their source.

A pixel belongs to a polygon if its centre lies inside, by the even-odd rule. Where outlines overlap, the smaller one is
on top. Shape legend: H height, W width, P corners of a polygon, E edges, C crossings of edges and rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.images.pixels import Refused
from shardmill.values import RejectReason

# Exact in float64 far beyond any image, so that no intermediate result overflows.
_MAX_COORDINATE = 1e9
_MAX_CROSSINGS_AT_ONCE = 1 << 20
_MIN_CORNERS = 3
# A box may be drawn by hand, and be rounded: the rectangle around an outline is inside by so much of its area.
_BOX_MARGIN, _LEAST_IN_BOX = 2.0, 0.8
MAX_CROSSINGS = 1 << 24
"""Of the edges of all outlines of an image and the rows of pixels: those of dense contours are some ten thousand."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The region of one object, or of a crowd of objects."""

    value: int
    """What the mask has there, from 1 to 255."""
    is_crowd: bool
    """Crowds are below all single objects."""
    polygons_P2: tuple[np.ndarray, ...] = ()
    """The corners, x and y; the region is the union of the polygons."""
    run_lengths: np.ndarray | None = None
    """In place of polygons: pixels outside and inside by turns, column by column."""
    box: tuple[float, float, float, float] | None = None
    """Two corners between which its pixels lie, if the source says so."""


@dataclass(frozen=True, slots=True)
class _Region:
    """Pixels of a part of the mask, one row after the other: from each edge to the next they are inside by turns."""

    top: int
    left: int
    height: int
    width: int
    edges: np.ndarray
    """Ascending places, an even number of them; the last one may be behind the last pixel."""
    is_by_columns: bool = False
    """Whether the pixels are one column after the other."""

    @property
    def num_pixels(self) -> int:
        return int((self.edges[1::2] - self.edges[::2]).sum(dtype=np.int64))

    def paint(self, mask_HW: np.ndarray, value: int) -> None:
        toggles = np.zeros(self.height * self.width + 1, np.uint8)
        toggles[self.edges] = 1
        is_inside = np.bitwise_xor.accumulate(toggles)[:-1].view(bool)
        if self.is_by_columns:
            is_inside_HW = is_inside.reshape(self.width, self.height).T
        else:
            is_inside_HW = is_inside.reshape(self.height, self.width)
        mask_HW[self.top : self.top + self.height, self.left : self.left + self.width][is_inside_HW] = value


def draw_outlines(outlines: Sequence[Outline], height: int, width: int) -> np.ndarray:
    """The mask, uint8 (H, W), 0 outside all outlines. Of equally large ones the later is on top.

    Raises Refused for run lengths of an image of another size, and for outlines that cross too many rows.
    """
    num_crossings = sum(_num_crossings(corners_P2, height) for each in outlines for corners_P2 in each.polygons_P2)
    if num_crossings > MAX_CROSSINGS:
        detail = f"the outlines cross {num_crossings} rows of pixels; at most {MAX_CROSSINGS} are drawn"
        raise Refused(RejectReason.BAD_MASK, detail)
    regions = [_regions_of(outline, height, width) for outline in outlines]
    for outline, of_outline in zip(outlines, regions, strict=True):
        _check_in_box(outline, of_outline)
    areas = [sum(region.num_pixels for region in each) for each in regions]
    order = sorted(range(len(outlines)), key=lambda place: (not outlines[place].is_crowd, -areas[place], place))
    mask_HW = np.zeros((height, width), np.uint8)
    for place in order:
        for region in regions[place]:
            region.paint(mask_HW, outlines[place].value)
    return mask_HW


def polygon_of(coordinates: Sequence[float]) -> np.ndarray:
    """The corners of x0, y0, x1, y1, ..., float64 (P, 2). Raises Refused for what is no polygon."""
    try:
        values = np.array(coordinates, np.float64)
    except (ValueError, TypeError, OverflowError):
        values = np.zeros(0)
    is_polygon = values.ndim == 1 and len(values) % 2 == 0 and len(values) >= 2 * _MIN_CORNERS
    if not is_polygon or not (np.abs(values) <= _MAX_COORDINATE).all():
        text = str(coordinates)[:60]
        raise Refused(RejectReason.BAD_MASK, f"the outline {text} is no list of x and y of at least three corners")
    return values.reshape(-1, 2)


def run_lengths_of(counts: Sequence[int] | str) -> np.ndarray:
    """COCO's run lengths, int64, of numbers or of the text that they are compressed to. Raises Refused for others."""
    try:
        lengths = np.array(_unpacked(counts) if isinstance(counts, str) else counts)
        if lengths.ndim == 1 and lengths.dtype == np.int64 and len(lengths) and lengths.min() >= 0:
            return lengths
    except (ValueError, OverflowError):
        pass
    raise Refused(RejectReason.BAD_MASK, f"the run lengths {str(counts)[:60]!r} of an outline do not decode")


def _unpacked(text: str) -> list[int]:
    """Five bits a character, least first, from `0` on; from the third on differences to the number before the last."""
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - ord("0")
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError
    return lengths


def _regions_of(outline: Outline, height: int, width: int) -> list[_Region]:
    if outline.run_lengths is None:
        return [_inside(corners_P2, height, width) for corners_P2 in outline.polygons_P2]
    lengths = outline.run_lengths
    if (lengths > height * width).any() or int(lengths.sum()) != height * width:
        raise Refused(RejectReason.BAD_MASK, f"the run lengths of an outline do not add up to {width}x{height} pixels")
    # Where a run ends. The last one is not a place if it is outside, and a run of no pixels is none.
    ends, times = np.unique(np.cumsum(lengths)[: len(lengths) // 2 * 2], return_counts=True)
    return [_Region(0, 0, height, width, ends[times % 2 == 1], is_by_columns=True)]


def _check_in_box(outline: Outline, regions: Sequence[_Region]) -> None:
    """Raise Refused for an outline that leaves its box, as one of y and x, or of run lengths row by row, does."""
    if outline.box is None:
        return
    if outline.run_lengths is None:
        corners_P2 = np.concatenate([np.zeros((0, 2)), *outline.polygons_P2])
    else:
        corners_P2 = np.concatenate([_corners_of_columns(region) for region in regions])
    if not len(corners_P2):
        return
    start, end, box = corners_P2.min(axis=0), corners_P2.max(axis=0), np.array(outline.box)
    inside = np.minimum(end, box[2:] + _BOX_MARGIN) - np.maximum(start, box[:2] - _BOX_MARGIN)
    if inside.clip(0).prod() < _LEAST_IN_BOX * (end - start).prod():
        spans, boxed = (", ".join(f"{side:g}" for side in sides) for sides in ((*start, *end), box))
        raise Refused(RejectReason.BAD_MASK, f"an outline from {spans} is not that of its bbox, from {boxed}")


def _corners_of_columns(region: _Region) -> np.ndarray:
    """Two corners around the pixels of a region by columns, (2, 2); none without pixels."""
    if not region.num_pixels:
        return np.zeros((0, 2))
    starts, lasts = region.edges[::2], region.edges[1::2] - 1
    (left_R, top_R), (right_R, bottom_R) = (np.divmod(places, region.height) for places in (starts, lasts))
    goes_on = (left_R != right_R).any()
    top, bottom = (0, region.height) if goes_on else (top_R.min(), bottom_R.max() + 1)
    return np.array([[left_R.min(), top], [right_R.max() + 1, bottom]], np.float64)


def _num_crossings(corners_P2: np.ndarray, height: int) -> int:
    """How often the edges of a polygon cross the centres of rows."""
    rows_P = np.clip(np.ceil(corners_P2[:, 1] - 0.5), 0, height)
    return int(np.abs(rows_P - np.roll(rows_P, -1)).sum())


def _inside(corners_P2: np.ndarray, height: int, width: int) -> _Region:
    """In each row, a pixel is inside if edges cross the row at an odd number of places left of the pixel's centre."""
    top, bottom = (_first_centre(side, height) for side in (corners_P2[:, 1].min(), corners_P2[:, 1].max()))
    left, right = (_first_centre(side, width) for side in (corners_P2[:, 0].min(), corners_P2[:, 0].max()))
    # Behind the last pixel of a row is the first one of the next, where that row goes on or begins to be inside.
    toggles = np.zeros((bottom - top) * (right - left) + 1, np.uint8)
    ends_P2 = np.roll(corners_P2, -1, axis=0)
    step = max(1, _MAX_CROSSINGS_AT_ONCE // max(1, bottom - top))
    for first in range(0, len(corners_P2), step):
        x_E2, y_E2 = (
            np.stack([corners_P2[first : first + step, axis], ends_P2[first : first + step, axis]], axis=1)
            for axis in (0, 1)
        )
        starts_E, stops_E = (np.clip(np.ceil(side - 0.5), top, bottom).astype(np.int64) for side in _sorted(y_E2))
        counts_E = stops_E - starts_E
        slopes_E = (x_E2[:, 1] - x_E2[:, 0]) / np.where(counts_E == 0, 1, y_E2[:, 1] - y_E2[:, 0])
        rows_C = np.arange(counts_E.sum()) + np.repeat(starts_E - (np.cumsum(counts_E) - counts_E), counts_E)
        x0_C, y0_C, slopes_C = (np.repeat(each, counts_E) for each in (x_E2[:, 0], y_E2[:, 0], slopes_E))
        x_C = x0_C + (rows_C + 0.5 - y0_C) * slopes_C
        columns_C = np.clip(np.ceil(x_C - 0.5), left, right).astype(np.int64)
        np.add.at(toggles, (rows_C - top) * (right - left) + columns_C - left, np.uint8(1))
    return _Region(top, left, bottom - top, right - left, np.flatnonzero(toggles & 1))


def _first_centre(edge: float, length: int) -> int:
    """The first pixel of a side whose centre is not before an edge."""
    return int(np.clip(np.ceil(edge - 0.5), 0, length))


def _sorted(y_E2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return y_E2.min(axis=1), y_E2.max(axis=1)
