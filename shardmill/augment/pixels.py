"""Changes of a batch's pixels in place, after its windows were decoded and before its rows are mixed.

Changes of colours take uint8 pixels and return new ones of the same shape. Their factors are whole 256ths: so OpenCV's
32-bit arithmetic is exact, and the pixels are the same on every processor. RandAugment (arXiv:1909.13719): random
operations of one strength on each image, as torchvision has them.

Shape legend: N rows, H height, W width, C channels (3: RGB, or 1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import cv2
import numpy as np

from shardmill.augment.draws import (
    BRIGHTNESS_DRAW,
    CONTRAST_DRAW,
    ERASE_AREA_DRAW,
    ERASE_ASPECT_DRAW,
    ERASE_COLUMN_DRAW,
    ERASE_DRAW,
    ERASE_NOISE_DRAW,
    ERASE_ROW_DRAW,
    HUE_DRAW,
    OPERATION_DRAW,
    ORDER_DRAW,
    SATURATION_DRAW,
    SIGN_DRAW,
    VERTICAL_FLIP_DRAW,
    Draws,
)
from shardmill.augment.options import AugmentOptions
from shardmill.augment.windows import centre_windows, cut_window, draw_windows
from shardmill.mix import extend_mix64

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


MAX_MAGNITUDE = 30
_FILL = 128

Operation = Callable[[np.ndarray, float, int], np.ndarray]
"""(image_HWC, strength from 0 to 1, sign 1 or -1) -> new pixels."""


def rand_augment(images_NHWC: np.ndarray, draws: Draws, options: AugmentOptions) -> None:
    """Apply the operations to each image, in place. Every operation is as likely as any other."""
    strength = options.rand_augment_magnitude / MAX_MAGNITUDE
    for place in range(options.rand_augment_operations):
        numbers = draws.below(OPERATION_DRAW + place, len(OPERATIONS)).tolist()
        signs = draws.coins(SIGN_DRAW + place).tolist()
        for image_HWC, number, is_negative in zip(images_NHWC, numbers, signs, strict=True):
            image_HWC[:] = OPERATIONS[number](image_HWC, strength, -1 if is_negative else 1)


def _warp(image_HWC: np.ndarray, matrix: list[list[float]]) -> np.ndarray:
    """Moved about the centre by (x, y) -> matrix @ (x, y, 1); what comes from beyond the image is grey."""
    height, width, num_channels = image_HWC.shape
    (a, b, right), (c, d, down) = matrix
    x, y = (width - 1) / 2, (height - 1) / 2
    centred = np.array([[a, b, right + x - a * x - b * y], [c, d, down + y - c * x - d * y]])
    fill = (_FILL,) * num_channels
    moved_HWC = cv2.warpAffine(image_HWC, centred, (width, height), flags=cv2.INTER_LINEAR, borderValue=fill)
    return moved_HWC.reshape(image_HWC.shape)


def _rotate(image_HWC: np.ndarray, strength: float, sign: int) -> np.ndarray:
    angle = math.radians(30 * strength * sign)
    cosine, sine = math.cos(angle), math.sin(angle)
    return _warp(image_HWC, [[cosine, sine, 0], [-sine, cosine, 0]])


def _shear_x(image_HWC: np.ndarray, strength: float, sign: int) -> np.ndarray:
    return _warp(image_HWC, [[1, 0.3 * strength * sign, 0], [0, 1, 0]])


def _shear_y(image_HWC: np.ndarray, strength: float, sign: int) -> np.ndarray:
    return _warp(image_HWC, [[1, 0, 0], [0.3 * strength * sign, 1, 0]])


def _translate_x(image_HWC: np.ndarray, strength: float, sign: int) -> np.ndarray:
    return _warp(image_HWC, [[1, 0, round(150 / 331 * image_HWC.shape[1] * strength) * sign], [0, 1, 0]])


def _translate_y(image_HWC: np.ndarray, strength: float, sign: int) -> np.ndarray:
    return _warp(image_HWC, [[1, 0, 0], [0, 1, round(150 / 331 * image_HWC.shape[0] * strength) * sign]])


OPERATIONS: tuple[Operation, ...] = (
    lambda image_HWC, strength, sign: image_HWC,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
    _rotate,
    lambda image_HWC, strength, sign: change_brightness(image_HWC, 1 + 0.9 * strength * sign),
    lambda image_HWC, strength, sign: change_saturation(image_HWC, 1 + 0.9 * strength * sign),
    lambda image_HWC, strength, sign: change_contrast(image_HWC, 1 + 0.9 * strength * sign),
    lambda image_HWC, strength, sign: change_sharpness(image_HWC, 1 + 0.9 * strength * sign),
    lambda image_HWC, strength, sign: posterize(image_HWC, 8 - round(4 * strength)),
    lambda image_HWC, strength, sign: solarize(image_HWC, 255 * (1 - strength)),
    lambda image_HWC, strength, sign: stretch_contrast(image_HWC),
    lambda image_HWC, strength, sign: equalize(image_HWC),
)
"""Their numbers are drawn: an operation is only ever added by a new option."""


_JITTERS = (
    ("brightness", change_brightness, BRIGHTNESS_DRAW),
    ("contrast", change_contrast, CONTRAST_DRAW),
    ("saturation", change_saturation, SATURATION_DRAW),
    ("hue", change_hue, HUE_DRAW),
)
_ORDERS = tuple(itertools.permutations(range(len(_JITTERS))))
_ERASED_AREA = (0.02, 0.33)
_ERASED_MAX_ASPECT = 3.3


def change_pixels(images_NHWC: np.ndarray, draws: Draws, options: AugmentOptions) -> None:
    """All changes that the options ask for, in a fixed order."""
    # IPP's conversion from HSV gives other pixels than OpenCV's own, and whether a thread uses IPP depends on what it
    # did before. The switch is the caller's: elsewhere IPP makes the same pixels, some of them faster.
    uses_ipp = cv2.ipp.useIPP()
    cv2.ipp.setUseIPP(False)
    try:
        if options.random_vertical_flip:
            for row in np.flatnonzero(draws.coins(VERTICAL_FLIP_DRAW)).tolist():
                images_NHWC[row] = images_NHWC[row, ::-1].copy()
        if options.rand_augment_operations:
            rand_augment(images_NHWC, draws, options)
        if options.brightness or options.contrast or options.saturation or options.hue:
            _jitter_colours(images_NHWC, draws, options)
        if options.random_erasing:
            _erase(images_NHWC, draws, options)
    finally:
        cv2.ipp.setUseIPP(uses_ipp)


def _jitter_colours(images_NHWC: np.ndarray, draws: Draws, options: AugmentOptions) -> None:
    """Random factors in a random order."""
    factors = []
    for name, _, draw in _JITTERS:
        limit, middle = getattr(options, name), 0.0 if name == "hue" else 1.0
        factors.append(draws.uniform(draw, middle - limit, middle + limit).tolist() if limit else None)
    for row, order in enumerate(draws.below(ORDER_DRAW, len(_ORDERS)).tolist()):
        image_HWC = images_NHWC[row]
        for number in _ORDERS[order]:
            if (of_rows := factors[number]) is not None:
                image_HWC = _JITTERS[number][1](image_HWC, of_rows[row])
        images_NHWC[row] = image_HWC


def _erase(images_NHWC: np.ndarray, draws: Draws, options: AugmentOptions) -> None:
    """Noise in a rectangle of some images."""
    height, width, num_channels = images_NHWC.shape[1:]
    pixels_N = draws.uniform(ERASE_AREA_DRAW, *_ERASED_AREA) * (height * width)
    aspect_N = draws.log_uniform(ERASE_ASPECT_DRAW, _ERASED_MAX_ASPECT)
    heights_N = np.clip(np.rint(np.sqrt(pixels_N / aspect_N)), 1, height).astype(np.int64)
    widths_N = np.clip(np.rint(np.sqrt(pixels_N * aspect_N)), 1, width).astype(np.int64)
    top_N = draws.below(ERASE_ROW_DRAW, height - heights_N + 1)
    left_N = draws.below(ERASE_COLUMN_DRAW, width - widths_N + 1)
    noises_N = draws.bits(ERASE_NOISE_DRAW)
    for row in np.flatnonzero(draws.uniform(ERASE_DRAW) < options.random_erasing).tolist():
        top, left, erased_height, erased_width = (int(each[row]) for each in (top_N, left_N, heights_N, widths_N))
        num_values = erased_height * erased_width * num_channels
        words = extend_mix64(noises_N[row], np.arange(-(-num_values // 8))).astype("<u8")
        noise_HWC = words.view(np.uint8)[:num_values].reshape(erased_height, erased_width, num_channels)
        images_NHWC[row, top : top + erased_height, left : left + erased_width] = noise_HWC


def augment(
    image_HWC: np.ndarray,
    options: AugmentOptions,
    *,
    seed: int,
    epoch: int,
    sample_id: int,
    occurrence: int = 0,
) -> np.ndarray:
    """A changed copy; `occurrence` distinguishes repeats of a sample within one epoch. Nothing is mixed with it."""
    draws = Draws(seed, epoch, np.array([sample_id]), np.array([occurrence]))
    height, width = image_HWC.shape[:2]
    changed_HWC = cut_window(image_HWC, draw_windows(draws, options, (height, width)), 0)
    change_pixels(changed_HWC[None], draws, options)
    return changed_HWC


def centre_of(image_HWC: np.ndarray, size: int) -> np.ndarray:
    """What evaluation takes of a stored image; 0 for all of it."""
    height, width = image_HWC.shape[:2]
    size_HW = AugmentOptions(size=size).size_of((height, width))
    return cut_window(image_HWC, centre_windows(1, (height, width), size_HW), 0)
