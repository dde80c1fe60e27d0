"""Augmentation of a single image, for readers that do not read batches.

Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import numpy as np

from shardmill.augment.draws import Draws
from shardmill.augment.options import AugmentOptions
from shardmill.augment.pixels import change_pixels
from shardmill.augment.windows import centre_windows, cut_window, draw_windows


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
