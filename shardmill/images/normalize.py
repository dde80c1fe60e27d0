"""Upright pixels to the one size and colour of the dataset.

The geometry decides stored pixels: the centre square is cut out first and resized then. Only kernels that give the
same integers on every CPU are used: OpenCV's AREA to shrink and LINEAR_EXACT to enlarge (its cubic kernel gave five
results on five instruction sets). Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import cv2
import numpy as np

from shardmill.images.pixels import prepare_opencv
from shardmill.options import NormalizeOptions

# ITU-R BT.601 luma in units of 2^-16; the three add up to 2^16.
LUMA_WEIGHTS_RGB = np.array([19595, 38470, 7471], dtype=np.uint32)


def normalize(pixels_HWC: np.ndarray, options: NormalizeOptions) -> np.ndarray:
    """A fresh uint8 array of `options.image_shape_HWC` from gray or RGB pixels of any size."""
    prepare_opencv()
    if options.resize_mode == "crop":
        image_HWC = _resize(_crop_square(pixels_HWC), options.image_size, options.image_size)
    else:
        image_HWC = _fit_in_square(pixels_HWC, options.image_size)
    return _to_channels(image_HWC, options.num_channels)


def _crop_square(pixels_HWC: np.ndarray) -> np.ndarray:
    height, width = pixels_HWC.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels_HWC[top : top + side, left : left + side]


def _fit_in_square(pixels_HWC: np.ndarray, size: int) -> np.ndarray:
    height, width, num_channels = pixels_HWC.shape
    longer = max(height, width)
    fitted_height = max(1, (height * size + longer // 2) // longer)
    fitted_width = max(1, (width * size + longer // 2) // longer)
    padded_HWC = np.zeros((size, size, num_channels), dtype=np.uint8)
    top, left = (size - fitted_height) // 2, (size - fitted_width) // 2
    padded_HWC[top : top + fitted_height, left : left + fitted_width] = _resize(pixels_HWC, fitted_height, fitted_width)
    return padded_HWC


def _resize(pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    contiguous_HWC = np.ascontiguousarray(pixels_HWC)  # upright pixels may be a flipped view
    if contiguous_HWC.shape[:2] == (height, width):
        return contiguous_HWC
    shrinks = height <= contiguous_HWC.shape[0] and width <= contiguous_HWC.shape[1]
    kernel = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR_EXACT
    resized = cv2.resize(contiguous_HWC, (width, height), interpolation=kernel)
    return resized.reshape(height, width, -1)  # OpenCV drops the axis of a single channel


def _to_channels(image_HWC: np.ndarray, num_channels: int) -> np.ndarray:
    if image_HWC.shape[2] == num_channels:
        return image_HWC.copy() if not image_HWC.flags.owndata else image_HWC
    if num_channels == 3:
        return np.repeat(image_HWC, 3, axis=2)
    luma_HW = (image_HWC.astype(np.uint32) @ LUMA_WEIGHTS_RGB + (1 << 15)) >> 16
    return luma_HW.astype(np.uint8)[:, :, np.newaxis]
