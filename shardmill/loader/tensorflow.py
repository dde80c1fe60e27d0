"""Batches as a `tf.data.Dataset`, ready for `keras.Model.fit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmill.loader.loader import Loader


def as_tf_dataset(
    loader: Loader, image_shape_HWC: tuple[int, int, int], label_shape: tuple[int, ...], *, is_class: bool
) -> Any:
    """(images, labels, weights) of static shapes, with a known number of steps; each iteration is the next epoch.

    `keras.Model.fit` takes the third element as sample weights, so padding does not count. tf.data's tuning of
    `AUTOTUNE` is off for what is made of it; `with_options` can turn it on again.
    """
    import numpy as np
    import tensorflow as tf

    num_rows = len(loader.streams) * loader.spec.rows_per_stream
    label_type = tf.int64 if is_class else tf.float32

    def rows() -> Iterator[tuple[Any, Any, Any]]:
        for batch in loader:
            yield batch.images, batch.labels, batch.weights

    signature = (
        tf.TensorSpec((num_rows, *image_shape_HWC), tf.uint8),
        tf.TensorSpec((num_rows, *label_shape), label_type),
        tf.TensorSpec((num_rows,), tf.float32),
    )
    if loader.is_transformed:
        # Only a batch shows the types and shapes that a transform gives.
        [first] = loader.cached(1).batches
        arrays = [np.asarray(each) for each in (first.images, first.labels, first.weights)]
        signature = tuple(tf.TensorSpec(each.shape, each.dtype) for each in arrays)
    # There is nothing to tune here, and TensorFlow's tuner sleeps for 10, 20, 40, ... milliseconds, up to a minute, and
    # the end of an epoch often waits until it wakes up.
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    dataset = tf.data.Dataset.from_generator(rows, output_signature=signature).with_options(untuned)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(loader)))
