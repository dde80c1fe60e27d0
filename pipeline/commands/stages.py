"""The commands that run stages: all of them, or a single one with the results of earlier stages of the same run id."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import AllowChange, Common, DatasetArgument, Fresh, ReplaceSource, SourceArgument, command
from pipeline.config import (
    absolute_uri,
    after_etl,
    existing_path,
    load_for_dataset,
    load_for_models,
    load_pipeline,
    require,
)
from pipeline.output.printing import print_record, print_table
from pipeline.preflight import refuse_what_cannot_work
from pipeline.running import SUMMARY_SECTIONS, WHOLE_PIPELINE, Run, dataset_of_run, open_run
from shardmill.dataset.versions import split_version
from shardmill.errors import ShardmillError, UsageError
from shardmill.jobs.redact import redacted_text
from shardmill.jobs.run_files import (
    latest_run,
    read_run_state,
    read_stage_record,
    run_folder,
    write_stage_record,
    write_summary,
)
from shardmill.jobs.summary_rows import summary_rows
from shardmill.stores import open_store

if TYPE_CHECKING:
    from pipeline.tree import PipelineTree
    from train.published.export import ExportOutcome
    from train.published.promote import Promotion


@command()
def run(
    context: typer.Context, source_or_config: SourceArgument, replace_source: ReplaceSource = False,
    fresh: Fresh = False, allow_change: AllowChange = [],  # noqa: B006  typer copies it
) -> None:  # fmt: skip
    from pipeline.run import run_pipeline
    from train.planning.resume import ResumePolicy

    common: Common = context.obj
    again = ResumePolicy(fresh, tuple(allow_change))
    summary = run_pipeline(source_or_config, common, replace_source=replace_source, again=again)
    print_table(common, summary, summary_rows(summary), title=f"run {summary['run_id']}")


@command()
def etl(
    context: typer.Context,
    source_or_config: SourceArgument,
    replace_source: ReplaceSource = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List and plan only: reads no image, writes nothing.")
    ] = False,
) -> None:
    from etl.config import EtlTree
    from etl.job import build_dataset, stage_record
    from pipeline.commands import dry_run as planning

    common: Common = context.obj
    if dry_run:
        found = planning.dry_run(source_or_config, common, replace_source=replace_source)
        print_table(common, found.document(), found.rows(), title="etl --dry-run")
        return
    with open_run(source_or_config, common) as run:
        require(run.tree, "source", "dataset")
        refuse_what_cannot_work(run.tree, common.workdir, ("etl",))
        tree = run.tree.part(EtlTree)
        run.stage(
            "etl",
            lambda: build_dataset(tree, run_id=run.id, observer=run.progress, replace_source=replace_source),
            lambda outcome: stage_record(outcome, tree),
        )
    print_stage(common, run)


@command()
def train(
    context: typer.Context, dataset: DatasetArgument, fresh: Fresh = False,
    allow_change: AllowChange = [],  # noqa: B006  typer copies it
) -> None:  # fmt: skip
    from shardmill.dataset.dataset import open_dataset
    from train.launching.attach import EndedWithJob, attached
    from train.planning.resume import ResumePolicy
    from train.stage_record import train_record
    from train.training import train_in_run
    from train.tree import TrainTree

    common: Common = context.obj
    again, loaded = ResumePolicy(fresh, tuple(allow_change)), load_before_run(dataset, common)
    try:
        with attached(loaded.train), open_dataset_run(dataset, common, loaded) as run:
            refuse_what_cannot_work(run.tree, common.workdir, ("train",))
            tree, pin = run.tree.part(TrainTree), open_dataset(dataset_of_run(run)).pin
            run.stage("train", lambda: train_in_run(tree, run.record, run.progress, pin, again), train_record)
        print_stage(common, run)
    except EndedWithJob as ended:
        # This process is another rank than 0 of an attached job: it exits as the job did, and rank 0 has told it all.
        raise typer.Exit(ended.code if isinstance(ended.code, int) else 0) from None


@command()
def export(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.export import export_record

    common: Common = context.obj
    with open_dataset_run(dataset, common) as run:
        run.stage("export", lambda: export_of_run(run), export_record)
    print_stage(common, run)


@command()
def evaluate(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.evaluation import evaluate_on, evaluation_record

    common: Common = context.obj
    with open_dataset_run(dataset, common) as run:
        found = export_of_run(run)
        # Training has the metrics for its own dataset version; for another one they are computed.
        run.stage(
            "evaluate",
            lambda: evaluate_on(found.models_uri, found.export, run.tree.dataset.uri, is_new=not found.skipped),
            evaluation_record,
        )
    print_stage(common, run)


@command()
def gate(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.gate import gate_record, judge_export

    common: Common = context.obj
    with open_dataset_run(dataset, common) as run:
        found = export_of_run(run)
        run.stage("gate", lambda: judge_export(found.models_uri, found.export, run.tree.gate), gate_record)
    print_stage(common, run)


@command()
def promote(
    context: typer.Context,
    models: Annotated[
        str, typer.Argument(metavar="MODELS[@N]", help="Models folder or URI, one export of it, or a TOML file.")
    ],
    rollback: Annotated[bool, typer.Option("--rollback", help="Make the previous model current again.")] = False,
    require_promotion: Annotated[bool, typer.Option("--require", help="Exit 9 if the gate is not passed.")] = False,
    replace_current: Annotated[
        bool, typer.Option("--replace-current", help="Promote even if no comparison is possible.")
    ] = False,
) -> None:
    from train.published.announce import announce
    from train.published.gate import promotion_record
    from train.reporting.mlflow_client import check_registry

    common: Common = context.obj
    uri, number = split_version(models)
    named = {
        "@N": number is not None,
        "--rollback": rollback,
        "--require, --replace-current": require_promotion or replace_current,
    }
    if sum(named.values()) > 1:
        raise UsageError(
            f"{' and '.join(name for name, is_given in named.items() if is_given)} exclude each other",
            "expected only one of them",
        )
    if models.startswith("models:/"):
        raise UsageError(
            f"promote {models}",
            "expected the models folder or URI: its promotions register models, not the reverse",
            f"`shardmill lineage {models}` names the export; promote that MODELS@N",
        )
    flags = {"require": require_promotion, "replace_current": replace_current}
    with open_run(models, common, load=load_for_models) as run:
        is_config, gate = uri.endswith(".toml"), run.tree.gate
        check_registry(gate.registry)
        run.stage(
            "promote",
            lambda: announce(
                _promoted(run, number, rollback=rollback, is_config=is_config, **flags), gate, run.progress
            ),
            promotion_record,
        )
    print_stage(common, run)


def _promoted(
    run: Run, number: int | None, *, rollback: bool, is_config: bool, require: bool, replace_current: bool
) -> Promotion:
    """Through the gate (a config's export, or the newest one of a models URI), by its number, or back."""
    from train.published.exported import newest_export, require_exports
    from train.published.gate import promote_export
    from train.published.promote import choose_export, roll_back

    models_uri = run.tree.models.uri
    if not is_config:
        # A folder of images, say: whatever is asked for, it is not in there.
        require_exports(models_uri)
    if rollback:
        return roll_back(models_uri, run.id)
    if number is not None:
        return choose_export(models_uri, number, run.id)
    candidate = export_of_run(run).export if is_config else newest_export(models_uri)
    return promote_export(
        models_uri, candidate, run.tree.gate, run.id, require=require, replace_current=replace_current
    )


@command()
def report(
    context: typer.Context,
    source_or_config: Annotated[
        str, typer.Argument(metavar="SOURCE_OR_CONFIG", help="A folder or TOML file (optional).")
    ] = "",
) -> None:
    from pipeline.report.write import report_record, write_report

    common: Common = context.obj
    uri = named_uri(source_or_config, common)
    chosen = common if common.is_run_named else replace(common, run_id=latest_run(common.workdir))
    workdir, run_id = chosen.workdir, chosen.run_id
    check_run_of(uri, workdir, run_id)
    # How that run ended stays as it is.
    state = read_run_state(workdir, run_id, WHOLE_PIPELINE)
    record = report_record(write_report(workdir, run_id, write_summary(workdir, run_id, state, SUMMARY_SECTIONS)))
    write_stage_record(workdir, run_id, record)
    write_summary(workdir, run_id, state, SUMMARY_SECTIONS)
    print_record(chosen, record)


def named_uri(source_or_config: str, common: Common) -> str:
    """What the run must have worked on: a source, a dataset or models, or a TOML file's dataset. Empty if nothing is
    named.
    """
    if source_or_config.endswith(".toml") or not source_or_config:
        tree = load_pipeline(source_or_config or None, common.overrides, common.workdir)
        return tree.dataset.uri if source_or_config else ""
    from etl.sources.names import is_pattern

    if not is_pattern(source_or_config):
        existing_path(source_or_config, "a source of images or a .toml file")
    return split_version(absolute_uri(source_or_config))[0]


def check_run_of(uri: str, workdir: str, run_id: str) -> None:
    """Raises UsageError if the run's recorded config does not name `uri`: its report would pass for that of another."""
    try:
        recorded = open_store(workdir).read(f"{run_folder(run_id)}/config.toml").decode()
    except FileNotFoundError:
        return
    # As the config was written: without secrets.
    written = re.escape(json.dumps(redacted_text(uri).rstrip("/"))[1:-1])
    if uri and not re.search(f'"{written}/?"', recorded):
        is_workdir = os.path.isdir(os.path.join(uri, "runs"))
        raise UsageError(
            f"run {run_id} below {workdir} did not work on {uri}",
            "expected its source, dataset or models, or its TOML file; or nothing, for the latest run",
            f"`shardmill report --workdir {uri}`" if is_workdir else "--run-id ID names another run of the workdir",
        )


def print_stage(common: Common, run: Run) -> None:
    """Print the result of the stage that ended last."""
    print_record(common, run.record.ended[-1])


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
    """The export that an earlier stage of this run made; without one, that of the finished training of this config: the
    run then keeps what that was, for its report."""
    from shardmill.dataset.dataset import open_dataset
    from shardmill.stores import open_store
    from train.published.export import ExportOutcome, export_training
    from train.published.exported import read_export
    from train.stage_record import train_record
    from train.training import finished_training
    from train.tree import TrainTree

    earlier = read_stage_record(run.record.workdir, run.id, "export")
    if earlier is not None and earlier.status != "failed":
        models_uri = open_store(run.tree.models.uri).uri
        return ExportOutcome(read_export(models_uri, earlier.sections["export"]["number"]), models_uri, skipped=True)
    trained = finished_training(run.tree.part(TrainTree), open_dataset(dataset_of_run(run)).pin)
    if read_stage_record(run.record.workdir, run.id, "train") is None:
        record = train_record(trained).model_copy(update={"started": time.time()})
        write_stage_record(run.record.workdir, run.id, record)
    return export_training(trained.models_uri, run.tree.train, trained.result, run.id)
