"""Random changes to one training image, each a pure function of (seed, epoch, sample id, occurrence).

So a batch keeps its pixels when the world size changes or a run resumes. The draws come from `shardmill.mix`
(splitmix64: Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195). Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import cv2
import numpy as np

from shardmill.mix import mix64
from shardmill.options import AugmentOptions

# Each draw has its own last word in the mix, so that switching one off changes no other.
ROW_DRAW, COLUMN_DRAW, FLIP_DRAW = 1, 2, 3


def augment(
    image_HWC: np.ndarray,
    options: AugmentOptions,
    *,
    seed: int,
    epoch: int,
    sample_id: int,
    occurrence: int = 0,
) -> np.ndarray:
    """A changed copy of the same shape; `occurrence` distinguishes repeats of a sample within one epoch."""
    key = (seed, epoch, sample_id, occurrence)
    changed_HWC = image_HWC
    padding = options.random_crop_padding
    if padding:
        height, width, num_channels = image_HWC.shape
        top = mix64(*key, ROW_DRAW) % (2 * padding + 1)
        left = mix64(*key, COLUMN_DRAW) % (2 * padding + 1)
        padded_HWC = cv2.copyMakeBorder(image_HWC, padding, padding, padding, padding, cv2.BORDER_REPLICATE)
        padded_HWC = padded_HWC.reshape(height + 2 * padding, width + 2 * padding, num_channels)
        changed_HWC = padded_HWC[top : top + height, left : left + width]
    if options.flips and mix64(*key, FLIP_DRAW) >> 63:
        changed_HWC = changed_HWC[:, ::-1]
    return np.array(changed_HWC, order="C")
