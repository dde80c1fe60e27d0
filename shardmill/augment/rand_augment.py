"""RandAugment (arXiv:1909.13719): random operations of one strength on each image, as torchvision has them.

Shape legend: N rows, H height, W width, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import cv2
import numpy as np

from shardmill.augment import colours
from shardmill.augment.draws import OPERATION_DRAW, SIGN_DRAW, Draws
from shardmill.augment.options import AugmentOptions

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
    lambda image_HWC, strength, sign: colours.change_brightness(image_HWC, 1 + 0.9 * strength * sign),
    lambda image_HWC, strength, sign: colours.change_saturation(image_HWC, 1 + 0.9 * strength * sign),
    lambda image_HWC, strength, sign: colours.change_contrast(image_HWC, 1 + 0.9 * strength * sign),
    lambda image_HWC, strength, sign: colours.change_sharpness(image_HWC, 1 + 0.9 * strength * sign),
    lambda image_HWC, strength, sign: colours.posterize(image_HWC, 8 - round(4 * strength)),
    lambda image_HWC, strength, sign: colours.solarize(image_HWC, 255 * (1 - strength)),
    lambda image_HWC, strength, sign: colours.stretch_contrast(image_HWC),
    lambda image_HWC, strength, sign: colours.equalize(image_HWC),
)
"""Their numbers are drawn: an operation is only ever added by a new option."""
