"""Computes exact metrics of an export on any dataset; its classes are matched by name.

Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shardmill.dataset.dataset import Dataset
from shardmill.errors import UsageError
from shardmill.values import Batch
from train.contracts.values import Evaluation
from train.evaluation.evaluate import SMALLEST_LOG_PROBABILITY, Scores, evaluate_batches, scores_by
from train.labels import LabelSpec
from train.published.exported import ExportedModel
from train.strategies.collective import SingleCollective


def evaluate_export(
    model: ExportedModel, dataset: Dataset, split: str, batches: Iterable[Batch], among: Sequence[str] = ()
) -> Evaluation:
    """Exact figures of an export on the batches of a dataset's split, whose images have its size.

    It answers among all classes that it knows: one that the dataset does not have is a wrong answer. A class of the
    dataset that the export does not know gets a probability near 0. `among` limits its answers to these classes. Raises
    UsageError for labels of another kind, and images of another size.
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
            f"export {model.export.number} takes stored images of {record.normalize.image_shape_HWC}",
            f"the dataset {dataset.pin.uri}@{dataset.pin.version} holds {manifest.normalize.image_shape_HWC}",
        )
    scores = scores_by(model.served.outputs, labels.kind, model.served.outputs_are_logits)
    if not labels.are_numbers:
        # Of several classes an image, each is answered by itself.
        keeps_others = labels.kind == "class"
        scores = by_name(scores, record.class_names, labels.class_names, among, keeps_others=keeps_others)
    return evaluate_batches(scores, batches, split, labels, SingleCollective())


def by_name(
    scores: Scores,
    names: Sequence[str],
    wanted_names: Sequence[str],
    among: Sequence[str] = (),
    *,
    keeps_others: bool = False,
) -> Scores:
    """`scores` with the columns of `wanted_names`; a class not in `names`, or not in `among`, comes behind all others.

    `keeps_others`: behind these, the columns of the classes in `names` that are not wanted. Not normalized again: the
    loss of a sample is that of its class among all that the export knows.
    """
    given = {name: column for column, name in enumerate(names) if not among or name in among}
    # A wanted class without a column takes the column that is appended behind the last one.
    columns_K = [given.get(name, len(names)) for name in wanted_names]
    if keeps_others:
        columns_K += [column for name, column in given.items() if name not in wanted_names]
    if columns_K == list(range(len(names))):
        return scores

    def wanted_scores(images_NHWC: np.ndarray) -> np.ndarray:
        scores_NK = scores(images_NHWC)
        # Below the log-probabilities of a model that is surer than float32 can say.
        last_N1 = np.minimum(scores_NK.min(axis=1, keepdims=True) - 1.0, SMALLEST_LOG_PROBABILITY)
        return np.concatenate([scores_NK, last_N1], axis=1)[:, columns_K]

    return wanted_scores
