"""Runs a single stage as a command, with the results of earlier stages of the same run id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.cli_options import Common
from pipeline.config import after_etl, load_for_dataset, require
from pipeline.output.printing import print_result, stage_title
from pipeline.running import Run, dataset_of_run, open_run
from shardmill.errors import ShardmillError
from shardmill.jobs.run_files import StageRecord, read_stage_record
from shardmill.jobs.summary_rows import stage_rows

if TYPE_CHECKING:
    from pipeline.tree import PipelineTree
    from train.published.export import ExportOutcome


def print_stage(common: Common, run: Run) -> None:
    """Print the result of the stage that ended last."""
    print_record(common, run.record.ended[-1])


def print_record(common: Common, record: StageRecord) -> None:
    machine = {"run_id": common.run_id, **record.model_dump(mode="json", exclude={"detail"})}
    print_result(common, machine, stage_rows(record), title=stage_title(record))


def load_before_run(dataset_or_config: str, common: Common) -> PipelineTree:
    """For a command that must know its config before it opens its run. An error is recorded as `open_run` does it."""
    try:
        return load_for_dataset(dataset_or_config, common.overrides, common.workdir)
    except ShardmillError as error:
        found = error

    def fail(*_: object) -> PipelineTree:
        raise found

    with open_run(dataset_or_config, common, load=fail) as run:
        return run.tree


@contextmanager
def open_dataset_run(dataset_or_config: str, common: Common, tree: PipelineTree | None = None) -> Iterator[Run]:
    """The argument is a dataset or a config file: a folder of images says nothing about what these commands need.

    `tree`: that of `load_before_run`.
    """
    load = load_for_dataset if tree is None else lambda *_: tree
    with open_run(dataset_or_config, common, load=load) as run, after_etl(dataset_or_config):
        require(run.tree, "dataset")
        yield run


def export_of_run(run: Run) -> ExportOutcome:
    """The export that an earlier stage of this run made; without one, that of the finished training of this config."""
    from shardmill.dataset.dataset import open_dataset
    from shardmill.stores import open_store
    from train.published.export import ExportOutcome, export_training
    from train.published.exported import read_export
    from train.training import finished_training
    from train.tree import TrainTree

    earlier = read_stage_record(run.record.workdir, run.id, "export")
    if earlier is not None and earlier.status != "failed":
        models_uri = open_store(run.tree.models.uri).uri
        return ExportOutcome(read_export(models_uri, earlier.sections["export"]["number"]), models_uri, skipped=True)
    trained = finished_training(run.tree.part(TrainTree), open_dataset(dataset_of_run(run)).pin)
    return export_training(trained.models_uri, run.tree.train, trained.result, run.id)
