"""Converts pixels to a model's inputs inside TensorFlow's graph; the same in training, export and serving."""

from __future__ import annotations

from typing import Any

from train.backends.backend import InputScale


def standardize(images_NHWC: Any, scale: InputScale) -> Any:
    """uint8 images on the 0..255 scale -> float32 with mean 0 and deviation 1 per channel over the train split.

    Their width is known when this is traced. Along whole rows of pixels, as in train/backends/torch/model.py.
    """
    import tensorflow as tf

    width = images_NHWC.shape[2]
    mean, std = (tf.constant(channels * width, tf.float32) for channels in (scale.mean, scale.std))
    rows = tf.reshape(tf.cast(images_NHWC, tf.float32), [-1, width * images_NHWC.shape[3]])
    return tf.reshape((rows - mean) / std, tf.shape(images_NHWC))
