"""Pixels as a model's inputs, inside TensorFlow's graph; the same in training, export and serving."""

from __future__ import annotations

from typing import Any

from train.backends.backend import InputScale


def standardize(images_NHWC: Any, scale: InputScale) -> Any:
    """uint8 images on the 0..255 scale -> float32 with mean 0 and deviation 1 per channel over the train split."""
    import tensorflow as tf

    return (tf.cast(images_NHWC, tf.float32) - tf.constant(scale.mean, tf.float32)) / tf.constant(scale.std, tf.float32)
