"""Batches as a `tf.data.Dataset`, ready for `keras.Model.fit`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.loader.batch import NAMES
from shardmill.typed_columns import BOX_LABELS, BOXES, MASK, NUM_SIDES

if TYPE_CHECKING:
    from shardmill.loader.batch import LoaderBatch
    from shardmill.loader.loader import Loader


@dataclass(frozen=True, slots=True)
class TfTypes:
    """What a batch has, known before there is one."""

    image_shape_HWC: tuple[int, int, int]
    label_shape: tuple[int, ...]
    is_class: bool
    """Whether a label is one class; else float32."""
    annotations: tuple[str, ...] = ()
    """Of `boxes` and `mask` those that are delivered beside the labels."""
    has_box_labels: bool = False

    def signature(self, num_rows: int | None) -> tuple[Any, Any, Any]:
        """TensorFlow's types of (images, labels, weights): static shapes, but for the number of boxes, and of rows if
        it is None.
        """
        import tensorflow as tf

        labels = tf.TensorSpec((num_rows, *self.label_shape), tf.int64 if self.is_class else tf.float32)
        found = {}
        if BOXES in self.annotations:
            found[BOXES] = tf.RaggedTensorSpec((num_rows, None, NUM_SIDES), tf.float32, ragged_rank=1)
            if self.has_box_labels:
                found[BOX_LABELS] = tf.RaggedTensorSpec((num_rows, None), tf.int64)
        if MASK in self.annotations:
            found[MASK] = tf.TensorSpec((num_rows, *self.image_shape_HWC[:2]), tf.uint8)
        return (
            tf.TensorSpec((num_rows, *self.image_shape_HWC), tf.uint8),
            {"labels": labels, **found} if found else labels,
            tf.TensorSpec((num_rows,), tf.float32),
        )

    def element(self, batch: LoaderBatch) -> tuple[Any, Any, Any]:
        """A batch in these types."""
        labels: Any = batch.labels
        if self.annotations:
            labels = {"labels": labels}
            if MASK in self.annotations:
                labels[MASK] = batch[MASK]
            if BOXES in self.annotations:
                labels |= _ragged(batch)
        return batch.images, labels, batch.weights


def as_tf_dataset(loader: Loader, types: TfTypes) -> Any:
    """(images, labels, weights) of static shapes, with a known number of steps; each iteration is the next epoch.

    `keras.Model.fit` takes the third element as sample weights, so padding does not count in the loss and in weighted
    metrics. In stored order, as evaluations read, one rank's last batch has no padding, for the metrics that have no
    weights. tf.data's tuning of `AUTOTUNE` is off for what is made of it; `with_options` can turn it on again.
    """
    import tensorflow as tf

    has_all_rows = len(loader.streams) == loader.spec.num_streams
    is_cut = not loader.spec.shuffle and loader.num_padding > 0 and has_all_rows and not loader.is_transformed

    def rows() -> Iterator[tuple[Any, Any, Any]]:
        for batch in loader:
            yield types.element(_without_padding(batch) if is_cut else batch)

    if loader.is_transformed:
        # Only a batch shows the types and shapes that a transform gives.
        [first] = loader.cached(1).batches
        signature = tf.nest.map_structure(_type_of, types.element(first))
    else:
        signature = types.signature(None if is_cut else len(loader.streams) * loader.spec.rows_per_stream)
    # There is nothing to tune here, and TensorFlow's tuner sleeps for 10, 20, 40, ... milliseconds, up to a minute, and
    # the end of an epoch often waits until it wakes up.
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    dataset = tf.data.Dataset.from_generator(rows, output_signature=signature).with_options(untuned)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(loader)))


def _without_padding(batch: LoaderBatch) -> LoaderBatch:
    """Its rows of weight 0, which have no boxes, are left out; of a batch of such rows alone, none is."""
    kept_N = np.flatnonzero(batch.weights)
    if not 0 < len(kept_N) < len(batch.weights):
        return batch
    extra = {name: values[kept_N] for name, values in batch.extra.items() if isinstance(values, np.ndarray)}
    if (boxes := batch.extra.get(BOXES)) is not None:
        offsets = np.concatenate([[0], np.cumsum(np.diff(boxes.offsets)[kept_N])])
        extra[BOXES] = replace(boxes, offsets=offsets)
    own = {name: getattr(batch, name)[kept_N] for name in NAMES}
    return replace(batch, **own, extra=extra)


def _ragged(batch: LoaderBatch) -> dict[str, Any]:
    """The boxes of each row, and their classes."""
    import tensorflow as tf

    boxes = batch[BOXES]
    of_rows = {BOXES: boxes.sides} | ({} if boxes.labels is None else {BOX_LABELS: boxes.labels})
    from_row_splits = tf.RaggedTensor.from_row_splits  # pyright: ignore[reportAttributeAccessIssue]
    return {name: from_row_splits(values, boxes.offsets) for name, values in of_rows.items()}


def _type_of(values: Any) -> Any:
    import tensorflow as tf

    if isinstance(values, tf.RaggedTensor):
        return tf.type_spec_from_value(values)
    values = np.asarray(values)
    return tf.TensorSpec(values.shape, values.dtype)
