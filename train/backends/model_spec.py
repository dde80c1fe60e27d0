"""What a backend builds a model for: images, labels and the weights of their classes, from a dataset and the config."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardmill.errors import UsageError
from shardmill.values import Batch
from train.labels import LabelSpec

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest
    from shardmill.formats.rows import RowSchema
    from train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class InputScale:
    """Value subtracted from the pixels of each channel, and then their divisor; on the 0..255 scale."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Input and output shape of a model; the same in training, export and serving."""

    image_shape_HWC: tuple[int, int, int]
    labels: LabelSpec
    scale: InputScale
    class_weights: tuple[float, ...] = ()
    """Loss weight of each class; empty if all are equal."""
    steps_per_epoch: int = 0
    """Number of steps per epoch; 0 if unknown."""
    mixes_labels: bool = False
    """Whether labels of classes come as shares, (N, K), because `train.augment` mixes rows."""


def model_spec(manifest: Manifest, config: TrainConfig) -> ModelSpec:
    """The images and labels of a dataset; pixels standardized over the train split, or untouched."""
    num_channels = len(manifest.channel_mean)
    scale = InputScale((0.0,) * num_channels, (1.0,) * num_channels)
    if config.standardize:
        scale = InputScale(manifest.channel_mean, manifest.channel_std)
    labels = LabelSpec.of(manifest)
    steps_per_epoch = -(-manifest.splits["train"].num_rows // config.global_batch_size)
    shape_HWC = config.augment.shape_of(manifest.normalize.image_shape_HWC)
    weights = class_weights(config, manifest)
    return ModelSpec(shape_HWC, labels, scale, weights, steps_per_epoch, config.augment.mixes)


def synthetic_batch(spec: ModelSpec, num_rows: int) -> Batch:
    """(num_rows, H, W, C) random bytes, with labels as the model learns them; for steps that are only measured."""
    rng = np.random.default_rng(0)
    images_NHWC = rng.integers(0, 256, (num_rows, *spec.image_shape_HWC), dtype=np.uint8)
    kind, num_outputs = spec.labels.kind, spec.labels.num_outputs
    shape = (num_rows,) if kind == "float" else (num_rows, num_outputs)
    labels = np.zeros(shape, np.float32)
    if kind == "class" and not spec.mixes_labels:
        labels = rng.integers(0, num_outputs, num_rows)
    return Batch(images_NHWC, labels, np.ones(num_rows, np.float32), np.arange(num_rows), 0, 0)


def class_weights(config: TrainConfig, manifest: Manifest) -> tuple[float, ...]:
    """One for each class; empty if all count alike. Raises UsageError for what the dataset does not have.

    `balanced`: N / (K * N_k) for class k with N_k of the N samples of the train split, as in King and Zeng, "Logistic
    Regression in Rare Events Data" (2001): all classes that have samples count alike together.
    """
    given, names = config.class_weights, manifest.row_schema.class_names
    if not given:
        return ()
    check_class_weights(config, manifest.row_schema)
    if given == "balanced":
        counts = manifest.splits["train"].class_counts
        # A class without a sample has no loss to weigh.
        return tuple(sum(counts) / (len(counts) * max(1, count)) for count in counts)
    return tuple(given.get(name, 1.0) for name in names)


def check_class_weights(config: TrainConfig, schema: RowSchema) -> None:
    """Raises UsageError for classes that the dataset does not have; a listing of the source tells them already."""
    given, names = config.class_weights, schema.class_names
    if not given:
        return
    if schema.label_kind != "class":
        raise UsageError(
            f"train.class_weights = {given!r}, but the labels are of kind {schema.label_kind!r}",
            "expected one class per image",
            "remove train.class_weights",
        )
    if given != "balanced" and (unknown := [name for name in given if name not in names]):
        near = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.4)
        raise UsageError(
            f"train.class_weights names {', '.join(map(repr, unknown))}",
            f"expected classes of the dataset: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}",
            f"did you mean {near[0]!r}?" if near else "remove it: a class without a weight has weight 1",
        )
