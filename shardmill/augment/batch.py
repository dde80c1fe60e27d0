"""The changes of a batch once its windows are decoded: first each image by itself, then rows with each other.

Shape legend: N rows, K classes, H height, W width, C channels.
"""

from __future__ import annotations

import numpy as np

from shardmill.augment.draws import Draws
from shardmill.augment.mixing import mix_rows, soft_labels
from shardmill.augment.options import AugmentOptions
from shardmill.augment.pixels import change_pixels


def change_batch(
    images_NHWC: np.ndarray, labels: np.ndarray, is_real_N: np.ndarray, draws: Draws, options: AugmentOptions,
    *, num_classes: int, rows_per_stream: int,
) -> np.ndarray:  # fmt: skip
    """Change the pixels in place. -> the labels: shares of classes, (N, K), if rows are mixed; else the same ones."""
    change_pixels(images_NHWC, draws, options)
    if not options.mixes:
        return labels
    labels_NK = soft_labels(labels, is_real_N, num_classes) if labels.ndim == 1 else labels.copy()
    mix_rows(images_NHWC, labels_NK, is_real_N, draws, options, rows_per_stream=rows_per_stream)
    return labels_NK
