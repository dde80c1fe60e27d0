"""Exact figures of an export on any dataset: its classes are matched by name.

Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shardmill.dataset.dataset import Dataset
from shardmill.errors import UsageError
from shardmill.values import Batch
from train.evaluation.evaluate import evaluate_predictions
from train.labels import LabelSpec
from train.published.exported import ExportedModel
from train.values import Evaluation


def evaluate_export(
    model: ExportedModel, dataset: Dataset, split: str, batches: Iterable[Batch], among: Sequence[str] = ()
) -> Evaluation:
    """Exact figures of an export on the batches of a dataset's split, whose images have its size.

    A class of the dataset that the export does not know gets probability 0. `among` limits its answers to these
    classes. Raises UsageError for labels of another kind, and images of another size.
    """
    record, manifest = model.export.record, dataset.manifest
    labels = LabelSpec.of(manifest)
    if (labels.kind, labels.vector_size) != (record.label_kind, record.vector_size):
        raise UsageError(
            f"export {model.export.number} was trained on {record.labels}",
            f"the dataset {dataset.pin.uri}@{dataset.pin.version} has {labels}",
        )
    if record.normalize.image_shape_HWC != manifest.normalize.image_shape_HWC:
        raise UsageError(
            f"export {model.export.number} takes images of {record.normalize.image_shape_HWC}",
            f"the dataset {dataset.pin.uri}@{dataset.pin.version} holds {manifest.normalize.image_shape_HWC}",
        )
    answers = model.predict
    if not labels.are_numbers:
        answers = by_name(model.predict, record.class_names, labels.class_names, among)
    return evaluate_predictions(answers, batches, split, labels)


def by_name(
    predict: Callable[[np.ndarray], np.ndarray],
    names: Sequence[str],
    wanted_names: Sequence[str],
    among: Sequence[str] = (),
) -> Callable[[np.ndarray], np.ndarray]:
    """`predict` with its columns in the order of `wanted_names`; those not in `names`, or not in `among`, are 0."""
    given = {name: column for column, name in enumerate(names) if not among or name in among}
    # A wanted class without a column takes the column of zeros that is appended behind the last one.
    columns_K = [given.get(name, len(names)) for name in wanted_names]
    if columns_K == list(range(len(names))):
        return predict

    def predict_wanted(images_NHWC: np.ndarray) -> np.ndarray:
        probabilities_NK = predict(images_NHWC)
        zero_N1 = np.zeros((len(probabilities_NK), 1), probabilities_NK.dtype)
        return np.concatenate([probabilities_NK, zero_N1], axis=1)[:, columns_K]

    return predict_wanted
