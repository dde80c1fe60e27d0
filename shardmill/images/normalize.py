"""Converts upright pixels to the one size and colour of the dataset.

The geometry decides stored pixels (docs/images.md): the centre square is cut out first and resized then. Only kernels
that give the same integers on every CPU are used: OpenCV's AREA to shrink and LINEAR_EXACT to enlarge (its cubic kernel
gave five results on five instruction sets). Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import cv2
import numpy as np

from shardmill.images.geometry import Geometry, plan_geometry
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
