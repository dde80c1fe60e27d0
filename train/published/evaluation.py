"""The stage `evaluate`: exact metrics of an export, as its training recorded them, or measured on another dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from shardmill.dataset.dataset import first_alike, open_pinned
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
from shardmill.values import DatasetPin
from train.contracts.values import Evaluation
from train.evaluation.evaluate import evaluation_section, read_confusion
from train.published.exported import Export
from train.published.figures import evaluate_export
from train.published.load import load_exported
from train.results import read_result

# Of the confusion matrix in a run's record: all of 50 classes, or the fullest of more.
MAX_CELLS_SHOWN = 2500


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Exact figures of an export; None if the dataset has no split to evaluate on."""

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
        # The figures of a skipped export were recorded by an earlier run; those of a new one are news of this run.
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
