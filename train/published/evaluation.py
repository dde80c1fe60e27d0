"""The stage `evaluate`: exact figures of an export, as its training recorded them, or measured on another version."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from shardmill.dataset.open import open_dataset
from shardmill.dataset.versions import split_version
from shardmill.errors import UsageError
from shardmill.jobs.run_files import StageRecord
from shardmill.reader import read_split
from shardmill.stores import open_store
from train.evaluation.evaluate import evaluation_section, read_confusion
from train.published.exported import Export
from train.published.figures import evaluate_export
from train.published.load import load_exported
from train.trainings import read_result
from train.values import Evaluation

# Of the confusion matrix in a run's record: all of 50 classes, or the fullest of more.
MAX_CELLS_SHOWN = 2500


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Exact figures of an export; None if the dataset has no split to evaluate on."""

    evaluation: Evaluation | None
    skipped: bool
    """True if they were known before this run."""


def evaluate_on(models_uri: str, export: Export, dataset_uri: str, *, is_new: bool) -> Evaluated:
    """Figures on the version that `dataset_uri` names, else on that of the training, which has recorded them.

    `is_new`: the export was made in this run. Raises UsageError if another version has no split to evaluate on.
    """
    record = export.record
    uri, version = split_version(dataset_uri)
    version = version or record.dataset.version
    store = open_store(models_uri)
    result = read_result(store, record.training_dir)
    if result is not None and version == result.dataset.version:
        # The figures of a skipped export were recorded by an earlier run; those of a new one are news of this run.
        evaluation = result.evaluation
        if evaluation is not None:
            evaluation = replace(evaluation, confused=read_confusion(store, record.training_dir))
        return Evaluated(evaluation, skipped=not is_new)
    dataset = open_dataset(f"{uri}@{version}")
    split = dataset.manifest.evaluation_split
    if split is None:
        raise UsageError(
            f"{uri}@{version} has neither a test nor a validation split",
            "expected one to evaluate on",
            "raise etl.split_fractions.test and run the ETL again",
        )
    model = load_exported(models_uri, export.number)
    with read_split(dataset, split) as batches:
        return Evaluated(evaluate_export(model, dataset, split, batches), skipped=False)


def evaluation_record(found: Evaluated) -> StageRecord:
    """What an evaluation adds to a run's summary and report."""
    shown = found.evaluation
    if shown is not None and shown.confused is not None:
        shown = replace(shown, confused=shown.confused.most_frequent(MAX_CELLS_SHOWN))
    return StageRecord(
        stage="evaluate",
        status="skipped" if found.skipped else "done",
        sections={"evaluation": evaluation_section(found.evaluation)},
        detail={"evaluation": TypeAdapter(Evaluation | None).dump_python(shown, mode="json")},
    )
