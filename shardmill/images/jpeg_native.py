"""Decodes a JPEG directly to the downscaled pixels of its kept part with the native kernel, in one pass.

It declines whatever it cannot do as the wheels would, every file that libjpeg objects to among it; the wheels decide
then. So rejections and notes never depend on it. Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardmill.images.geometry import (
    LEAST_REDUCED_SIDE,
    Span,
    kept_spans,
    reduced_length,
    resized_shape,
)
from shardmill.images.pixels import FLIPS_COLUMNS, FLIPS_ROWS, SWAPS_SIDES
from shardmill.kernel import shardmill_native

if TYPE_CHECKING:
    from shardmill.images.icc import Conversion
    from shardmill.options import NormalizeOptions

# What the kernel's 16-bit weights are good for (native/area.h).
MOST_SHRINK = 64


@dataclass(frozen=True, slots=True)
class Shrink:
    """The kept part of the pixels as they are stored, upright or not, and the size that it shrinks to."""

    rows: Span
    columns: Span
    height: int
    width: int


def decode_shrunk(
    data: bytes,
    shape_HWC: tuple[int, int, int],
    scale: int,
    orientation: int,
    options: NormalizeOptions,
    conversion: Conversion | None,
) -> np.ndarray | None:
    """Return the pixels that `normalize` would compute, gray or RGB, not yet upright; None if the kernel declines.

    `shape_HWC` is what the file's header states; of it, a pixel of each `scale` x `scale` is decoded, and its colour
    converted by `conversion`.
    """
    height, width, channels = shape_HWC
    assert shardmill_native is not None, "who asked for the kernel native has found it"
    shrink = plan_shrink(reduced_length(height, scale), reduced_length(width, scale), orientation, options)
    tables = conversion.tables if conversion is not None else None
    if shrink is None or channels not in (1, 3) or (conversion is not None and tables is None):
        return None
    pixels_HWC = np.empty((shrink.height, shrink.width, channels), dtype=np.uint8)
    box = shrink.rows.start, shrink.columns.start, shrink.rows.length, shrink.columns.length
    colours = () if tables is None else (tables.linear, tables.matrix, tables.levels)
    is_done = shardmill_native.shrink_jpeg(data, pixels_HWC, (height, width), scale, box, *colours)
    return pixels_HWC if is_done else None


def plan_shrink(height: int, width: int, orientation: int, options: NormalizeOptions) -> Shrink | None:
    """Plan the downscaling of decoded pixels; None if no side shrinks, one grows or shrinks too far, or the result
    would look tiny.
    """
    is_turned = orientation in SWAPS_SIDES
    upright = (width, height) if is_turned else (height, width)
    rows, columns = kept_spans(*upright, options)
    shape = resized_shape(rows.length, columns.length, options)
    if shape == (rows.length, columns.length) or min(shape) < LEAST_REDUCED_SIDE:
        return None
    for length, stored in zip((rows.length, columns.length), shape, strict=True):
        if not stored <= length <= MOST_SHRINK * stored:
            return None
    if orientation in FLIPS_ROWS:
        rows = rows.mirrored(upright[0])
    if orientation in FLIPS_COLUMNS:
        columns = columns.mirrored(upright[1])
    return Shrink(columns, rows, shape[1], shape[0]) if is_turned else Shrink(rows, columns, *shape)
