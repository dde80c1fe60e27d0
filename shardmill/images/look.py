"""What normalized pixels look like, in two integers that are equal on every CPU: how sharp they are, and what they
resemble.
"""

from __future__ import annotations

import cv2
import numpy as np

from shardmill.images.pixels import prepare_opencv
from shardmill.kernel import shardmill_native

# OpenCV averages whole blocks ten times as fast as other areas: so large images are shrunk to about this side first.
_BLOCKS_PER_SIDE = 32
# Flatter thumbnails than this have hashes of noise, by which all plain images would look alike.
_MIN_CONTRAST = 8
# The same integers as OpenCV's, sooner.
_native_square_sum = getattr(shardmill_native, "laplacian_square_sum", None)
_native_average = getattr(shardmill_native, "average_blocks", None)


def luma(image_HWC: np.ndarray) -> np.ndarray:
    """The brightness of a uint8 image with 1 or 3 channels: uint8, (H, W)."""
    prepare_opencv()
    return cv2.cvtColor(image_HWC, cv2.COLOR_RGB2GRAY) if image_HWC.shape[2] == 3 else image_HWC[:, :, 0]


def laplacian_square_sum(luma_HW: np.ndarray) -> int:
    """The sum of the squared Laplacian. For each pixel it is the variance of the Laplacian, a measure of focus (J. L.
    Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000); its mean is about 0.
    """
    if _native_square_sum is not None:
        return _native_square_sum(np.ascontiguousarray(luma_HW))
    prepare_opencv()  # IPP rounds the sum
    return int(cv2.norm(cv2.Laplacian(luma_HW, cv2.CV_16S), cv2.NORM_L2SQR))


def difference_hash(luma_HW: np.ndarray) -> int | None:
    """64 bits that say whether a pixel of the 9 x 8 thumbnail is brighter than its left neighbour (N. Krawetz, "Kind of
    Like That", 2013), as a signed number; None for an image too plain to be distinguished.
    """
    # Python's integers, because a call of NumPy takes longer than this loop while a decoder fills the caches.
    brightness = cv2.resize(_shrunk(luma_HW), (9, 8), interpolation=cv2.INTER_AREA).tobytes()
    if max(brightness) - min(brightness) < _MIN_CONTRAST:
        return None
    bits = left = 0
    for place, here in enumerate(brightness):
        if place % 9:
            bits = bits << 1 | (here > left)
        left = here
    return bits - (1 << 64) if bits >> 63 else bits


def _shrunk(luma_HW: np.ndarray) -> np.ndarray:
    """The means of whole blocks; what is left at the lower and the right edge, less than a block, does not count."""
    height, width = (max(1, side // _BLOCKS_PER_SIDE) for side in luma_HW.shape)
    rows, columns = luma_HW.shape[0] // height, luma_HW.shape[1] // width
    if _native_average is not None and height * width > 1:
        means_HW = np.empty((rows, columns), np.uint8)
        _native_average(np.ascontiguousarray(luma_HW), means_HW, (height, width))
        return means_HW
    blocks_HW = luma_HW[: rows * height, : columns * width]
    return cv2.resize(blocks_HW, (columns, rows), interpolation=cv2.INTER_AREA)
