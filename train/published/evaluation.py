"""The stage `evaluate`: exact metrics of an export, as its training recorded them, or measured on another dataset.

Classes are matched by name. Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from shardmill.dataset.dataset import Dataset, first_alike, open_pinned
from shardmill.dataset.manifest import parse_manifest
from shardmill.dataset.versions import (
    check_not_expired,
    latest_version,
    pin_of,
    read_manifest_bytes,
    split_version,
)
from shardmill.errors import UsageError
from shardmill.jobs.run_files import StageRecord
from shardmill.loader.reader import read_split
from shardmill.stores import open_store
from shardmill.values import Batch, DatasetPin
from train.contracts.values import Evaluation
from train.labels import LabelSpec
from train.metrics.evaluate import (
    SMALLEST_LOG_PROBABILITY,
    Scores,
    evaluate_batches,
    evaluation_section,
    read_confusion,
    scores_by,
)
from train.published.exported import Export, ExportedModel, load_exported
from train.results import read_result
from train.strategies.collective import SingleCollective

# Of the confusion matrix in a run's record: all of 50 classes, or the fullest of more.
MAX_CELLS_SHOWN = 2500


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Exact metrics of an export; None if the dataset has no split to evaluate on."""

    evaluation: Evaluation | None
    dataset: DatasetPin
    skipped: bool
    """True if they were known before this run."""


def evaluate_on(models_uri: str, export: Export, dataset_uri: str, *, is_new: bool) -> Evaluated:
    """Figures on the version that `dataset_uri` names, else on that of the training, which has recorded them.

    `is_new`: the export was made in this run. Raises UsageError if another version has no split to evaluate on.
    """
    record = export.record
    pin = _pin_to_evaluate(dataset_uri, record.dataset)
    store = open_store(models_uri)
    result = read_result(store, record.training_dir)
    # The training's rows, and not only its number: each dataset counts from 1, and so does one that is built anew.
    if result is not None and result.dataset in (pin, first_alike(pin)):
        # The metrics of a skipped export were recorded by an earlier run; those of a new one are news of this run.
        evaluation = result.evaluation
        if evaluation is not None:
            evaluation = replace(evaluation, confused=read_confusion(store, record.training_dir))
        return Evaluated(evaluation, pin, skipped=not is_new)
    check_not_expired(open_store(pin.uri), pin.version)
    dataset = open_pinned(pin)
    split = dataset.manifest.evaluation_split
    if split is None:
        raise UsageError(
            f"{pin.uri}@{pin.version} has neither a test nor a validation split",
            "expected a split to evaluate on",
            "raise etl.split_fractions.test and run the ETL again",
        )
    model = load_exported(models_uri, export.number)
    with read_split(dataset, split, augment=export.record.unchanged) as batches:
        return Evaluated(evaluate_export(model, dataset, split, batches), pin, skipped=False)


def _pin_to_evaluate(dataset_uri: str, trained_on: DatasetPin) -> DatasetPin:
    """The version that `dataset_uri` names. If it names none, that of the training; of a dataset that is another one,
    or was built anew since, the latest."""
    root, version = split_version(dataset_uri)
    store = open_store(root)
    if version is None:
        version = latest_version(store) or 1
        if store.uri == trained_on.uri and trained_on.version <= version:
            data = read_manifest_bytes(store, trained_on.version)
            if pin_of(store, trained_on.version, data) == trained_on:
                return trained_on
            # Raises if it is a damaged one instead of another one.
            parse_manifest(data, trained_on.version, store.uri)
    return pin_of(store, version, read_manifest_bytes(store, version))


def evaluation_record(found: Evaluated) -> StageRecord:
    """Return the evaluation's part of a run's summary and report."""
    shown = found.evaluation
    if shown is not None and shown.confused is not None:
        shown = replace(shown, confused=shown.confused.most_frequent(MAX_CELLS_SHOWN))
    return StageRecord(
        stage="evaluate",
        status="skipped" if found.skipped else "done",
        sections={"evaluation": evaluation_section(found.evaluation)},
        detail={
            "evaluation": TypeAdapter(Evaluation | None).dump_python(shown, mode="json"),
            "dataset": f"{found.dataset.uri}@{found.dataset.version}",
        },
    )


def evaluate_export(
    model: ExportedModel, dataset: Dataset, split: str, batches: Iterable[Batch], among: Sequence[str] = ()
) -> Evaluation:
    """Exact metrics of an export on the batches of a dataset's split, whose images have its size.

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
