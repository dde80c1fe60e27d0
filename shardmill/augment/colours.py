"""Changes of one image's colours: each takes uint8 pixels and returns new ones of the same shape.

Factors are whole 256ths: so OpenCV's 32-bit arithmetic is exact, and the pixels are the same on every processor.
Shape legend: H height, W width, C channels (3: RGB, or 1).
"""

from __future__ import annotations

import cv2
import numpy as np

_LEVELS = np.arange(256)


def in_256ths(factor: float) -> float:
    """The nearest whole number of 256ths."""
    return round(factor * 256) / 256


def grey_of(image_HWC: np.ndarray) -> np.ndarray:
    """The luma of an image, of the same shape."""
    if image_HWC.shape[2] == 1:
        return image_HWC
    return cv2.cvtColor(cv2.cvtColor(image_HWC, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def by_table(image_HWC: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Each value replaced by its entry in a table of 256, which is rounded and clipped."""
    table = np.clip(np.rint(levels), 0, 255).astype(np.uint8)
    return cv2.LUT(image_HWC, table).reshape(image_HWC.shape)


def blend(image_HWC: np.ndarray, other_HWC: np.ndarray, factor: float) -> np.ndarray:
    """`factor` of the image and the rest of the other; beyond 1 it moves away from the other."""
    factor = in_256ths(factor)
    return cv2.addWeighted(image_HWC, factor, other_HWC, 1 - factor, 0).reshape(image_HWC.shape)


def _scale(image_HWC: np.ndarray, factor: float, level: int) -> np.ndarray:
    """Each value's distance from the level times the factor."""
    factor = in_256ths(factor)
    return cv2.addWeighted(image_HWC, factor, image_HWC, 0, level * (1 - factor)).reshape(image_HWC.shape)


def change_brightness(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    """Nearer to black (below 1), or brighter."""
    return _scale(image_HWC, factor, 0)


def change_contrast(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    """Nearer to the mean grey of the image (below 1), or farther from it."""
    grey_HW = image_HWC if image_HWC.shape[2] == 1 else cv2.cvtColor(image_HWC, cv2.COLOR_RGB2GRAY)
    return _scale(image_HWC, factor, round(cv2.mean(grey_HW)[0]))


def change_saturation(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    """Nearer to the grey of each pixel (below 1), or farther from it."""
    return image_HWC if image_HWC.shape[2] == 1 else blend(image_HWC, grey_of(image_HWC), factor)


def change_hue(image_HWC: np.ndarray, turn: float) -> np.ndarray:
    """Turned on the colour circle; a turn of 1 is the whole circle."""
    if image_HWC.shape[2] == 1:
        return image_HWC
    hsv_HWC = cv2.cvtColor(image_HWC, cv2.COLOR_RGB2HSV_FULL)
    hsv_HWC[:, :, 0] += np.uint8(round(turn * 256) % 256)
    return cv2.cvtColor(hsv_HWC, cv2.COLOR_HSV2RGB_FULL)


def change_sharpness(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    """Smoother (below 1), or sharper; the smooth image is PIL's: the mean of 3 x 3 pixels, the middle one 5 times."""
    sums_HWC = cv2.boxFilter(image_HWC, cv2.CV_16U, (3, 3), normalize=False, borderType=cv2.BORDER_REPLICATE)
    smooth_HWC = (sums_HWC.reshape(image_HWC.shape) + 4 * image_HWC.astype(np.uint16) + 6) // 13
    return blend(image_HWC, smooth_HWC.astype(np.uint8), factor)


def stretch_contrast(image_HWC: np.ndarray) -> np.ndarray:
    """The darkest value of each channel becomes 0 and the brightest 255."""
    stretched = []
    for channel_HW in cv2.split(image_HWC):
        low, high = int(channel_HW.min()), int(channel_HW.max())
        levels = (_LEVELS - low) * 255 / (high - low) if low < high else _LEVELS
        stretched.append(by_table(channel_HW, levels))
    return cv2.merge(stretched).reshape(image_HWC.shape)


def equalize(image_HWC: np.ndarray) -> np.ndarray:
    """Every value of each channel about equally often."""
    return cv2.merge([cv2.equalizeHist(each) for each in cv2.split(image_HWC)]).reshape(image_HWC.shape)


def posterize(image_HWC: np.ndarray, bits: int) -> np.ndarray:
    """Only the highest bits of each value."""
    return image_HWC & np.uint8(0x100 - (1 << (8 - bits)))


def solarize(image_HWC: np.ndarray, threshold: float) -> np.ndarray:
    """Values from the threshold on are inverted."""
    return by_table(image_HWC, np.where(threshold <= _LEVELS, 255 - _LEVELS, _LEVELS))
