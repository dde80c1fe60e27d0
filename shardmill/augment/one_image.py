"""Augmentation of a single image, for readers that do not read batches.

Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import numpy as np

from shardmill.augment.draws import Draws
from shardmill.augment.options import AugmentOptions
from shardmill.augment.windows import cut_window, draw_windows


def augment(
    image_HWC: np.ndarray,
    options: AugmentOptions,
    *,
    seed: int,
    epoch: int,
    sample_id: int,
    occurrence: int = 0,
) -> np.ndarray:
    """A changed copy; `occurrence` distinguishes repeats of a sample within one epoch."""
    draws = Draws.of(seed, epoch, np.array([sample_id]), np.array([occurrence]))
    height, width = image_HWC.shape[:2]
    return cut_window(image_HWC, draw_windows(draws, options, (height, width)), 0)
