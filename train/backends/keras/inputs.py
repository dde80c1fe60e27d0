"""What a model's inputs are: pixels, standardized per channel or untouched; the same in training, export and serving.

Shape legend: N batch, H height, W width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest


@dataclass(frozen=True, slots=True)
class InputScale:
    """What is subtracted from the pixels of each channel, and what they are then divided by; on the 0..255 scale."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def input_scale(manifest: Manifest, is_standardized: bool) -> InputScale:
    """How a model's inputs arrive: standardized over the train split, or untouched without `train.standardize`."""
    if is_standardized:
        return InputScale(manifest.channel_mean, manifest.channel_std)
    num_channels = len(manifest.channel_mean)
    return InputScale((0.0,) * num_channels, (1.0,) * num_channels)


def standardize(images_NHWC: Any, scale: InputScale) -> Any:
    """uint8 images on the 0..255 scale -> float32 with mean 0 and deviation 1 per channel over the train split."""
    import tensorflow as tf

    return (tf.cast(images_NHWC, tf.float32) - tf.constant(scale.mean, tf.float32)) / tf.constant(scale.std, tf.float32)
