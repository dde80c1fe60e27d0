"""Boxes and masks of an image, moved by the geometry that its pixels follow; a mask is stored as PNG.

A box is x0, y0, x1, y1 in pixels of the upright image: pixel n reaches from n to n + 1, so a box over all of an image
that is 40 wide has x0 = 0 and x1 = 40. A mask has a class number for each pixel: it is a PNG of one channel with at
most 8 bits, gray or with a palette, whose numbers are then the values, or is drawn from polygons or COCO's
run lengths. Nothing is interpolated: each stored pixel has the value of one pixel of the source.

Shape legend: K boxes, H height, W width, P corners of a polygon, E edges, C crossings of edges and rows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardmill.formats.encodings import encode_mask
from shardmill.images.normalize import Geometry, Span, plan_geometry
from shardmill.images.pixels import (
    FLIPS_COLUMNS,
    FLIPS_ROWS,
    SWAPS_SIDES,
    Refused,
    apply_orientation,
    decode_with_opencv,
    expect_size,
    refusal_of,
)
from shardmill.images.png import GRAY, PALETTE, SIGNATURE, read_chunks
from shardmill.options import NormalizeOptions
from shardmill.typed_columns import NUM_SIDES
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from shardmill.words import printable

MAX_BITS = 8


def decode_mask(data: bytes) -> np.ndarray:
    """The values of a mask as its file has them, uint8 (H, W). Raises `Refused` for what is no such PNG."""
    if not data.startswith(SIGNATURE):
        raise Refused(RejectReason.BAD_MASK, "not a PNG, which a mask must be")
    header, others = read_chunks(data)
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    depth, color_type = header[8], header[9]
    if color_type not in (GRAY, PALETTE) or depth > MAX_BITS:
        raise Refused(
            RejectReason.BAD_MASK,
            f"a PNG of colour type {color_type} with {depth} bits; a mask is gray or has a palette, of at most 8 bits",
        )
    # As gray, whatever colours a palette gives to the numbers.
    gray = header[:9] + bytes([GRAY]) + header[10:]
    mask_HWC = decode_with_opencv(SIGNATURE + _chunk(b"IHDR", gray) + others, keep_alpha_and_depth=True)
    expect_size(mask_HWC, height, width)
    mask_HW = mask_HWC[:, :, 0]
    # OpenCV spreads fewer bits over the range of eight.
    return mask_HW if depth == MAX_BITS else mask_HW // (255 // ((1 << depth) - 1))


def size_of_mask(data: bytes) -> tuple[int, int] | None:
    """Height and width that a PNG declares, before anything of that size is allocated; None for other bytes."""
    sides = data[16:24]
    return (int.from_bytes(sides[4:]), int.from_bytes(sides[:4])) if data.startswith(SIGNATURE) else None


def move_mask(mask_HW: np.ndarray, geometry: Geometry) -> np.ndarray:
    """A mask of the upright source as that of its stored image; 0 where that is black."""
    rows, columns = nearest(geometry.rows, geometry.height), nearest(geometry.columns, geometry.width)
    stored_HW = np.zeros((geometry.stored_height, geometry.stored_width), np.uint8)
    place = (
        slice(geometry.top, geometry.top + geometry.height),
        slice(geometry.left, geometry.left + geometry.width),
    )
    stored_HW[place] = mask_HW[np.ix_(rows, columns)]
    return stored_HW


def nearest(kept: Span, length: int) -> np.ndarray:
    """For each of `length` pixels the one of a kept range in which its centre lies: int64."""
    return kept.start + (2 * np.arange(length, dtype=np.int64) + 1) * kept.length // (2 * length)


def _chunk(kind: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(4) + kind + payload + zlib.crc32(kind + payload).to_bytes(4)


MAKE_MASK = "shardmill.images.annotations:make_mask"


@dataclass(frozen=True, slots=True)
class UprightSize:
    """The size of a source that was turned upright by EXIF's orientation."""

    height: int
    width: int
    orientation: int

    def is_of_file(self, height: int, width: int, what: str, sides: Sequence[float] = ()) -> bool:
        """Whether this is the size of the file's own pixels, with the sides exchanged, and not that of the upright
        image.

        Raises Refused if it is neither, or if boxes of these `sides` can only have been drawn in the upright image.
        """
        if (height, width) == (self.height, self.width):
            return False
        detail = f"{what} {width}x{height} pixels; the image has {self.width}x{self.height}"
        if self.orientation in SWAPS_SIDES and (width, height) == (self.height, self.width):
            if count_outside(sides, height, width) == 0 or count_outside(sides, self.height, self.width):
                return True
            detail = f"{what} {width}x{height} pixels, as its source says, and end outside of them; upright {detail}"
        raise Refused(RejectReason.ANNOTATED_SIZE, detail)


@dataclass(frozen=True, slots=True)
class MaskTask:
    """What a mask is made of, besides its file."""

    source: UprightSize
    segmentations: str | None = None
    """JSON: of each segmentation its value, whether it is of a crowd, its box and its region; None for a file."""
    segmentations_shape_HW: tuple[int, int] | None = None
    """Of the image in which they were drawn; of the upright one if the source does not say."""

    def with_file(self, mask: bytes) -> bytes:
        """The bytes from which `make_mask` makes it."""
        return json.dumps(asdict(self)).encode() + b"\n" + mask


def make_mask(source: SourceImage, data: bytes, options: NormalizeOptions) -> ImageSample | Rejection:
    """The stored mask as the `image` of a sample; a rejection if it is none, or of an image of another size."""
    line, _, file = data.partition(b"\n")
    facts: dict[str, Any] = json.loads(line)
    task = MaskTask(**{**facts, "source": UprightSize(**facts["source"])})
    try:
        mask_HW = _of_file(file, task) if task.segmentations is None else _of_segmentations(task.segmentations, task)
        stored_HW = move_mask(mask_HW, plan_geometry(task.source.height, task.source.width, options))
        stored = encode_mask(stored_HW)
    except Exception as error:
        refused = refusal_of(error, RejectReason.BAD_MASK)
        return source.rejected(refused.reason, refused.detail)
    height, width = stored_HW.shape
    return ImageSample(stored, height, width, 1, source_sha256="", channel_sums=(), channel_square_sums=())


def _of_file(file: bytes, task: MaskTask) -> np.ndarray:
    size = size_of_mask(file)
    is_of_file = size is not None and task.source.is_of_file(*size, "its mask has")
    return _upright(decode_mask(file), task, is_of_file=is_of_file)


def _of_segmentations(text: str, task: MaskTask) -> np.ndarray:
    height, width = task.segmentations_shape_HW or (task.source.height, task.source.width)
    segmentations = [
        Segmentation(value, bool(is_crowd), box=_box_of(bbox), **_region(segmentation, height, width))
        for value, is_crowd, bbox, segmentation in json.loads(text)
    ]
    sides = [side for segmentation in segmentations for side in segmentation.box or ()]
    is_of_file = task.source.is_of_file(height, width, "its segmentations are of", sides)
    return _upright(draw_segmentations(segmentations, height, width), task, is_of_file=is_of_file)


def _box_of(bbox: Any) -> tuple[float, float, float, float] | None:
    """COCO's corner, width and height as two corners; None for what is no box."""
    try:
        x, y, width, height = map(float, bbox)
    except (ValueError, TypeError, OverflowError):
        return None
    return x, y, x + width, y + height


def _region(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    if isinstance(segmentation, list):
        return {"polygons_P2": tuple(map(polygon_of, segmentation))}
    if not isinstance(segmentation, dict) or "counts" not in segmentation:
        raise Refused(RejectReason.BAD_MASK, f"the segmentation {printable(repr(segmentation)[:60])} is no polygon")
    size = segmentation.get("size")
    if size != [height, width]:
        raise Refused(
            RejectReason.ANNOTATED_SIZE,
            f"the size (height, width) of its run lengths is {size}; its annotations have {[height, width]}",
        )
    return {"run_lengths": run_lengths_of(segmentation["counts"])}


def _upright(mask_HW: np.ndarray, task: MaskTask, *, is_of_file: bool) -> np.ndarray:
    return apply_orientation(mask_HW[:, :, None], task.source.orientation)[:, :, 0] if is_of_file else mask_HW


# Exact in float64 far beyond any image, so that no intermediate result overflows.
_MAX_COORDINATE = 1e9
_MAX_CROSSINGS_AT_ONCE = 1 << 20
_MIN_CORNERS = 3
# A box may be drawn by hand, and be rounded: the rectangle around a segmentation is inside by so much of its area.
_BOX_MARGIN, _LEAST_IN_BOX = 2.0, 0.8
MAX_CROSSINGS = 1 << 24
"""Of all edges of an image's segmentations and the rows of pixels: those of dense contours are some ten thousand."""


@dataclass(frozen=True, slots=True)
class Segmentation:
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


def draw_segmentations(segmentations: Sequence[Segmentation], height: int, width: int) -> np.ndarray:
    """The mask, uint8 (H, W), 0 outside all segmentations. Of equally large ones the later is on top.

    Raises Refused for run lengths of an image of another size, and for segmentations that cross too many rows.
    """
    num_crossings = sum(_num_crossings(corners_P2, height) for each in segmentations for corners_P2 in each.polygons_P2)
    if num_crossings > MAX_CROSSINGS:
        detail = f"the segmentations cross {num_crossings} rows of pixels; at most {MAX_CROSSINGS} are drawn"
        raise Refused(RejectReason.BAD_MASK, detail)
    regions = [_regions_of(segmentation, height, width) for segmentation in segmentations]
    for segmentation, of_segmentation in zip(segmentations, regions, strict=True):
        _check_in_box(segmentation, of_segmentation)
    areas = [sum(region.num_pixels for region in each) for each in regions]
    order = sorted(
        range(len(segmentations)), key=lambda place: (not segmentations[place].is_crowd, -areas[place], place)
    )
    mask_HW = np.zeros((height, width), np.uint8)
    for place in order:
        for region in regions[place]:
            region.paint(mask_HW, segmentations[place].value)
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
        raise Refused(RejectReason.BAD_MASK, f"the segmentation {text} is no list of x and y of at least three corners")
    return values.reshape(-1, 2)


def run_lengths_of(counts: Sequence[int] | str) -> np.ndarray:
    """COCO's run lengths, int64, of numbers or of the text that they are compressed to. Raises Refused for others."""
    try:
        lengths = np.array(_unpacked(counts) if isinstance(counts, str) else counts)
        if lengths.ndim == 1 and lengths.dtype == np.int64 and len(lengths) and lengths.min() >= 0:
            return lengths
    except (ValueError, OverflowError):
        pass
    raise Refused(RejectReason.BAD_MASK, f"the run lengths {str(counts)[:60]!r} of a segmentation do not decode")


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


def _regions_of(segmentation: Segmentation, height: int, width: int) -> list[_Region]:
    if segmentation.run_lengths is None:
        return [_inside(corners_P2, height, width) for corners_P2 in segmentation.polygons_P2]
    lengths = segmentation.run_lengths
    if (lengths > height * width).any() or int(lengths.sum()) != height * width:
        raise Refused(
            RejectReason.BAD_MASK, f"the run lengths of a segmentation do not add up to {width}x{height} pixels"
        )
    # Where a run ends. The last one is not a place if it is outside, and a run of no pixels is none.
    ends, times = np.unique(np.cumsum(lengths)[: len(lengths) // 2 * 2], return_counts=True)
    return [_Region(0, 0, height, width, ends[times % 2 == 1], is_by_columns=True)]


def _check_in_box(segmentation: Segmentation, regions: Sequence[_Region]) -> None:
    """Raise Refused for a segmentation that leaves its box, as one of y and x, or of run lengths row by row, does."""
    if segmentation.box is None:
        return
    if segmentation.run_lengths is None:
        corners_P2 = np.concatenate([np.zeros((0, 2)), *segmentation.polygons_P2])
    else:
        corners_P2 = np.concatenate([_corners_of_columns(region) for region in regions])
    if not len(corners_P2):
        return
    start, end, box = corners_P2.min(axis=0), corners_P2.max(axis=0), np.array(segmentation.box)
    inside = np.minimum(end, box[2:] + _BOX_MARGIN) - np.maximum(start, box[:2] - _BOX_MARGIN)
    if inside.clip(0).prod() < _LEAST_IN_BOX * (end - start).prod():
        spans, boxed = (", ".join(f"{side:g}" for side in sides) for sides in ((*start, *end), box))
        raise Refused(RejectReason.BAD_MASK, f"a segmentation from {spans} is not that of its bbox, from {boxed}")


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
        starts_E, stops_E = (
            np.clip(np.ceil(side - 0.5), top, bottom).astype(np.int64) for side in (y_E2.min(1), y_E2.max(1))
        )
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
