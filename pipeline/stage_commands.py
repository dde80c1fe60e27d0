"""Single stages as commands and Airflow tasks: they take what earlier stages of the same run id have left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.config import existing_path, load_for_dataset, load_for_models, require
from pipeline.preflight import refuse_what_cannot_work
from pipeline.running import SUMMARY_SECTIONS, WHOLE_PIPELINE, Run, open_run, verify_record
from shardmill.dataset.versions import split_version
from shardmill.errors import UsageError
from shardmill.jobs.run_files import StageRecord, read_run_state, read_stage_record, write_stage_record, write_summary

if TYPE_CHECKING:
    from pipeline.cli_options import Common
    from shardmill.dataset.verify import VerifyReport
    from train.changes import Again
    from train.published.export import ExportOutcome


def etl_stage(source_or_config: str, common: Common, *, replace_source: bool) -> StageRecord:
    """Images to a committed dataset version."""
    from etl.config import EtlTree
    from etl.job import build_dataset
    from etl.job import stage_record as record_of_build

    with open_run(source_or_config, common) as run:
        require(run.tree, "source", "dataset")
        refuse_what_cannot_work(run.tree, common.workdir, ("etl",))
        tree = run.tree.part(EtlTree)
        run.stage(
            "etl",
            lambda: build_dataset(tree, run_id=run.id, observer=run.progress, replace_source=replace_source),
            lambda outcome: record_of_build(outcome, tree),
        )
        return run.record.ended[-1]


def train_stage(dataset_or_config: str, common: Common, again: Again) -> StageRecord:
    """Train on the version that this run's ETL committed, or that the argument names."""
    from shardmill.dataset.open import open_dataset
    from train.launching.attach import attached
    from train.training import train_in_run, train_record
    from train.tree import TrainTree

    config = load_for_dataset(dataset_or_config, common.overrides, common.workdir).train
    with attached(config), _open_dataset_run(dataset_or_config, common) as run:
        refuse_what_cannot_work(run.tree, common.workdir, ("train",))
        tree, pin = run.tree.part(TrainTree), open_dataset(_dataset_of_run(run)).pin
        run.stage("train", lambda: train_in_run(tree, run.record, run.progress, pin, again), train_record)
        return run.record.ended[-1]


def export_stage(dataset_or_config: str, common: Common) -> StageRecord:
    """Export the finished training."""
    from train.published.export import export_record

    with _open_dataset_run(dataset_or_config, common) as run:
        run.stage("export", lambda: _export_of_run(run), export_record)
        return run.record.ended[-1]


def evaluate_stage(dataset_or_config: str, common: Common) -> StageRecord:
    """Exact figures of the export. Training has them for its own dataset version; for another one they are computed."""
    from train.published.evaluation import evaluate_on, evaluation_record

    with _open_dataset_run(dataset_or_config, common) as run:
        found = _export_of_run(run)
        run.stage(
            "evaluate",
            lambda: evaluate_on(found.models_uri, found.export, run.tree.dataset.uri, is_new=not found.skipped),
            evaluation_record,
        )
        return run.record.ended[-1]


def gate_stage(dataset_or_config: str, common: Common) -> StageRecord:
    """What `promote` would decide now; nothing is promoted."""
    from train.published.candidate import gate_record, judge_export

    with _open_dataset_run(dataset_or_config, common) as run:
        found = _export_of_run(run)
        run.stage("gate", lambda: judge_export(found.models_uri, found.export, run.tree.gate), gate_record)
        return run.record.ended[-1]


def verify_stage(dataset_or_config: str, common: Common, *, deep: bool) -> VerifyReport:
    """Check a dataset. With a config file, the check is a stage of the run; a bare dataset leaves no run record."""
    from shardmill.dataset.open import open_dataset
    from shardmill.dataset.verify import verify_dataset

    if not dataset_or_config.endswith(".toml"):
        return verify_dataset(open_dataset(existing_path(dataset_or_config)), deep=deep)
    with open_run(dataset_or_config, common) as run:
        require(run.tree, "dataset")
        uri = _dataset_of_run(run)
        return run.stage(
            "verify",
            lambda: verify_dataset(open_dataset(uri), deep=deep, on_shard=run.progress.shard_verified),
            verify_record,
        )


def promote_stage(
    models_or_config: str, common: Common, *, rollback: bool, require: bool, replace_current: bool
) -> StageRecord:
    """Through the gate (a config's export, or the newest one of a models URI), by name (`MODELS@N`), or back."""
    from train.published.candidate import promote_export, promotion_record
    from train.published.decision import Promotion
    from train.published.exported import newest_export, require_exports
    from train.published.promote import choose_export, roll_back

    uri, number = split_version(models_or_config)
    named = {
        "@N": number is not None,
        "--rollback": rollback,
        "--require, --replace-current": require or replace_current,
    }
    if sum(named.values()) > 1:
        raise UsageError(
            f"{' and '.join(name for name, is_given in named.items() if is_given)} exclude each other",
            "expected the gate with its options, one export by its number, or the one before",
        )

    def promote(run: Run) -> Promotion:
        models_uri = run.tree.models.uri
        if not uri.endswith(".toml"):
            # A folder of images, say: whatever is asked for, it is not in there.
            require_exports(models_uri)
        if rollback:
            return roll_back(models_uri, run.id)
        if number is not None:
            return choose_export(models_uri, number, run.id)
        candidate = _export_of_run(run).export if uri.endswith(".toml") else newest_export(models_uri)
        flags = {"require": require, "replace_current": replace_current}
        return promote_export(models_uri, candidate, run.tree.gate, run.id, **flags)

    with open_run(models_or_config, common, load=load_for_models) as run:
        run.stage("promote", lambda: promote(run), promotion_record)
        return run.record.ended[-1]


def report_again(common: Common) -> StageRecord:
    """Write report.html of an earlier run; how that run ended stays as it is."""
    from pipeline.report.write import report_record, write_report

    workdir, run_id = common.workdir, common.run_id
    state = read_run_state(workdir, run_id, WHOLE_PIPELINE)
    record = report_record(write_report(workdir, run_id, write_summary(workdir, run_id, state, SUMMARY_SECTIONS)))
    write_stage_record(workdir, run_id, record)
    write_summary(workdir, run_id, state, SUMMARY_SECTIONS)
    return record


@contextmanager
def _open_dataset_run(dataset_or_config: str, common: Common) -> Iterator[Run]:
    """The argument is a dataset or a config file: a folder of images says nothing about what these commands need."""
    with open_run(dataset_or_config, common, load=load_for_dataset) as run:
        require(run.tree, "dataset")
        yield run


def _export_of_run(run: Run) -> ExportOutcome:
    """The export that an earlier stage of this run made; without one, that of the finished training of this config."""
    from shardmill.dataset.open import open_dataset
    from shardmill.stores import open_store
    from train.published.export import ExportOutcome, export_training
    from train.published.exported import read_export
    from train.training import finished_training
    from train.tree import TrainTree

    earlier = read_stage_record(run.record.workdir, run.id, "export")
    if earlier is not None and earlier.status != "failed":
        models_uri = open_store(run.tree.models.uri).uri
        return ExportOutcome(read_export(models_uri, earlier.sections["export"]["number"]), models_uri, skipped=True)
    trained = finished_training(run.tree.part(TrainTree), open_dataset(_dataset_of_run(run)).pin)
    return export_training(trained.models_uri, run.tree.train, trained.result, run.id)


def _dataset_of_run(run: Run) -> str:
    """DATASET@N as it was asked for, or as this run's ETL committed it; without either, what the config names."""
    if split_version(run.tree.dataset.uri)[1] is not None:
        return run.tree.dataset.uri
    earlier = read_stage_record(run.record.workdir, run.id, "etl")
    if earlier is None or earlier.status == "failed":
        return run.tree.dataset.uri
    dataset = earlier.sections["dataset"]
    return f"{dataset['uri']}@{dataset['version']}"
