"""Converts upright pixels to the one size and colour of the dataset.

The geometry decides stored pixels (docs/images.md): the centre square is cut out first and resized then. It is integer
arithmetic on sizes, which boxes and masks follow, too, and decides when a JPEG may be decoded at a reduced scale. Only
kernels that give the same integers on every CPU are used: OpenCV's AREA to shrink and LINEAR_EXACT to enlarge (its
cubic kernel gave five results on five instruction sets). Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from shardmill.images.pixels import prepare_opencv
from shardmill.options import NormalizeOptions

# ITU-R BT.601 luma in units of 2^-16; the three add up to 2^16.
LUMA_WEIGHTS_RGB = np.array([19595, 38470, 7471], dtype=np.uint32)


def normalize(pixels_HWC: np.ndarray, options: NormalizeOptions) -> np.ndarray:
    """Gray or RGB pixels of any size as a uint8 array of `options.one_shape_HWC`, if there is one.

    It is the given array itself if nothing is left to do.
    """
    if pixels_HWC.shape == options.one_shape_HWC:
        return np.ascontiguousarray(pixels_HWC)
    prepare_opencv()
    geometry = plan_geometry(pixels_HWC.shape[0], pixels_HWC.shape[1], options)
    rows, columns = geometry.rows, geometry.columns
    kept_HWC = pixels_HWC[rows.start : rows.end, columns.start : columns.end]
    image_HWC = _placed_on_black(_resize(kept_HWC, geometry.height, geometry.width), geometry)
    return _to_channels(image_HWC, options.num_channels)


def _resize(pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    resized_HWC = np.ascontiguousarray(pixels_HWC)  # upright pixels may be a flipped view
    # What shrinks is averaged first, also if the other side grows: a linear kernel would skip pixels there (alias).
    shrunk_shape = min(height, resized_HWC.shape[0]), min(width, resized_HWC.shape[1])
    for shape, kernel in ((shrunk_shape, cv2.INTER_AREA), ((height, width), cv2.INTER_LINEAR_EXACT)):
        if resized_HWC.shape[:2] != shape:
            resized = cv2.resize(resized_HWC, shape[::-1], interpolation=kernel)
            resized_HWC = resized.reshape(*shape, -1)  # OpenCV drops the axis of a single channel
    return resized_HWC


def _placed_on_black(image_HWC: np.ndarray, geometry: Geometry) -> np.ndarray:
    height, width, num_channels = image_HWC.shape
    if (height, width) == (geometry.stored_height, geometry.stored_width):
        return image_HWC
    stored_HWC = np.zeros((geometry.stored_height, geometry.stored_width, num_channels), dtype=np.uint8)
    stored_HWC[geometry.top : geometry.top + height, geometry.left : geometry.left + width] = image_HWC
    return stored_HWC


def _to_channels(image_HWC: np.ndarray, num_channels: int) -> np.ndarray:
    if image_HWC.shape[2] == num_channels:
        return image_HWC.copy() if not image_HWC.flags.owndata else image_HWC
    if num_channels == 3:
        return np.repeat(image_HWC, 3, axis=2)
    luma_HW = (image_HWC.astype(np.uint32) @ LUMA_WEIGHTS_RGB + (1 << 15)) >> 16
    return luma_HW.astype(np.uint8)[:, :, np.newaxis]


# Of a JPEG: libjpeg gives the mean of each block of so many pixels a side then, rounding aside, so the result differs
# only where a stored pixel covers part of a block.
REDUCTIONS = (8, 4, 2)
# Fewer blocks to a stored pixel show: measured on photographs, docs/images.md has the figures.
LEAST_BLOCKS_PER_STORED_PIXEL = 2.75
# How far, in stored pixels, an edge may move because blocks do not begin where the kept part does.
MOST_EDGE_SHIFT = 1 / 64
# Sources below 8 pixels are noted as tiny; no reduced image must look like one.
LEAST_REDUCED_SIDE = 8


@dataclass(frozen=True, slots=True)
class Span:
    """The kept range of one side, in pixels."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def mirrored(self, side: int) -> Span:
        """The same pixels of a side that is turned around."""
        return Span(side - self.end, self.length)


def kept_spans(height: int, width: int, options: NormalizeOptions) -> tuple[Span, Span]:
    """Rows and columns that are kept: the centre square in mode `crop`, everything otherwise."""
    if options.resize_mode != "crop":
        return Span(0, height), Span(0, width)
    side = min(height, width)
    return Span((height - side) // 2, side), Span((width - side) // 2, side)


def resized_shape(height: int, width: int, options: NormalizeOptions) -> tuple[int, int]:
    """Height and width, in stored pixels, of a kept part of this size."""
    size = options.image_size
    if options.resize_mode == "none":
        return height, width
    if options.resize_mode in ("crop", "stretch"):
        resized_height = resized_width = size
    else:
        side = min(height, width) if options.resize_mode == "shorter" else max(height, width)
        resized_height = max(1, (height * size + side // 2) // side)
        resized_width = max(1, (width * size + side // 2) // side)
    if options.enlarges:
        return resized_height, resized_width
    return min(resized_height, height), min(resized_width, width)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where an upright source goes in its stored image: kept, resized, placed. Pixels and boxes follow it alike."""

    rows: Span
    """What is kept of the source."""
    columns: Span
    height: int
    """What the kept part becomes, in stored pixels."""
    width: int
    stored_height: int
    stored_width: int

    @property
    def top(self) -> int:
        """First row of the resized part; a smaller part than the stored image is centred in it."""
        return (self.stored_height - self.height) // 2

    @property
    def left(self) -> int:
        return (self.stored_width - self.width) // 2


def plan_geometry(height: int, width: int, options: NormalizeOptions) -> Geometry:
    """The geometry of an upright source of this size."""
    rows, columns = kept_spans(height, width, options)
    resized = resized_shape(rows.length, columns.length, options)
    stored = resized if options.one_shape_HWC is None else options.one_shape_HWC[:2]
    return Geometry(rows, columns, *resized, *stored)


def choose_reduction(height: int, width: int, options: NormalizeOptions) -> int:
    """8, 4 or 2 if decoding every block of so many pixels a side to one gives what the whole image would; else 1."""
    if not _is_large(height, width, options):
        return 1
    return next((scale for scale in REDUCTIONS if _is_faithful(height, width, scale, options)), 1)


def reduced_length(length: int, scale: int) -> int:
    """The pixels that libjpeg makes of a side: a block that hangs over the edge counts."""
    return -(-length // scale)


def _is_large(height: int, width: int, options: NormalizeOptions) -> bool:
    """Whether any reduction leaves enough blocks for each stored pixel; this alone decides for most images."""
    least = min(REDUCTIONS)
    # In every mode that shrinks, some side becomes `image_size`.
    if reduced_length(max(height, width), least) < LEAST_BLOCKS_PER_STORED_PIXEL * options.image_size:
        return False
    rows, columns = kept_spans(height, width, options)
    stored_height, stored_width = resized_shape(rows.length, columns.length, options)
    return (
        reduced_length(rows.length, least) >= LEAST_BLOCKS_PER_STORED_PIXEL * stored_height
        and reduced_length(columns.length, least) >= LEAST_BLOCKS_PER_STORED_PIXEL * stored_width
    )


def _is_faithful(height: int, width: int, scale: int, options: NormalizeOptions) -> bool:
    reduced = reduced_length(height, scale), reduced_length(width, scale)
    kept, kept_blocks = kept_spans(height, width, options), kept_spans(*reduced, options)
    shape = resized_shape(kept[0].length, kept[1].length, options)
    if min(reduced) < LEAST_REDUCED_SIDE:
        return False
    if shape != resized_shape(kept_blocks[0].length, kept_blocks[1].length, options):
        return False
    for length, pixels, blocks, stored in zip((height, width), kept, kept_blocks, shape, strict=True):
        # An orientation may turn the side around; then the block that hangs over is the first one.
        overhang = reduced_length(length, scale) * scale - length
        shifts = [
            abs(edge * scale - turned - exact)
            for turned in (0, overhang)
            for edge, exact in ((blocks.start, pixels.start), (blocks.end, pixels.end))
        ]
        if max(shifts) * stored > MOST_EDGE_SHIFT * pixels.length:
            return False
        if blocks.length < LEAST_BLOCKS_PER_STORED_PIXEL * stored:
            return False
    return True
