"""Single stages as commands and Airflow tasks: they take what earlier stages of the same run id have left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import (
    AllowChange,
    Common,
    DatasetArgument,
    Fresh,
    ReplaceSource,
    SourceArgument,
    command,
)
from pipeline.config import after_etl, existing_path, load_for_dataset, load_for_models, load_pipeline, require
from pipeline.preflight import refuse_what_cannot_work
from pipeline.printing import print_result, stage_rows, stage_title, verify_document, verify_rows
from pipeline.running import SUMMARY_SECTIONS, WHOLE_PIPELINE, Run, open_run, verify_record
from shardmill.dataset.versions import split_version
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.ending import report_error
from shardmill.jobs.run_files import (
    StageRecord,
    latest_run,
    read_run_state,
    read_stage_record,
    write_stage_record,
    write_summary,
)

if TYPE_CHECKING:
    from shardmill.dataset.verify import VerifyReport
    from train.published.decision import Promotion
    from train.published.export import ExportOutcome


@command()
def etl(
    context: typer.Context,
    source_or_config: SourceArgument,
    replace_source: ReplaceSource = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List and plan only: read no image, write nothing.")
    ] = False,
) -> None:
    from etl.config import EtlTree
    from etl.job import build_dataset, stage_record
    from pipeline import dry_run as planning

    common: Common = context.obj
    if dry_run:
        found = planning.dry_run(source_or_config, common, replace_source=replace_source)
        print_result(common, found.document(), found.rows(), title="etl --dry-run")
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
    _print_stage(common, run)


@command()
def verify(
    context: typer.Context,
    dataset: DatasetArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Re-read every byte of every shard.")] = False,
    version: Annotated[
        int, typer.Option("--dataset-version", min=0, help="Check this version of the dataset; 0: none in particular.")
    ] = 0,
) -> None:
    common: Common = context.obj
    report = _verified(dataset, common, version, deep=deep)
    print_result(common, verify_document(report), verify_rows(report), title=f"{report.uri}@{report.version}")
    try:
        report.raise_if_failed()
    except IntegrityError as error:
        # The table, or the document with --json, has been printed; an error's own document would be a second one.
        raise typer.Exit(report_error(error, debug=common.debug)) from None


@command()
def train(
    context: typer.Context, dataset: DatasetArgument, fresh: Fresh = False,
    allow_change: AllowChange = [],  # noqa: B006  typer copies it
) -> None:  # fmt: skip
    from shardmill.dataset.open import open_dataset
    from train.launching.attach import EndedWithJob, attached
    from train.planning.changes import Again
    from train.stage_record import train_record
    from train.training import train_in_run
    from train.tree import TrainTree

    common: Common = context.obj
    again, config = Again(fresh, tuple(allow_change)), load_for_dataset(dataset, common.overrides, common.workdir).train
    try:
        with attached(config), _open_dataset_run(dataset, common) as run:
            refuse_what_cannot_work(run.tree, common.workdir, ("train",))
            tree, pin = run.tree.part(TrainTree), open_dataset(_dataset_of_run(run)).pin
            run.stage("train", lambda: train_in_run(tree, run.record, run.progress, pin, again), train_record)
        _print_stage(common, run)
    except EndedWithJob as ended:
        # This process is another rank than 0 of an attached job: it exits as the job did, and rank 0 has told it all.
        raise typer.Exit(ended.code if isinstance(ended.code, int) else 0) from None


@command()
def export(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.export import export_record

    common: Common = context.obj
    with _open_dataset_run(dataset, common) as run:
        run.stage("export", lambda: _export_of_run(run), export_record)
    _print_stage(common, run)


@command()
def evaluate(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.evaluation import evaluate_on, evaluation_record

    common: Common = context.obj
    with _open_dataset_run(dataset, common) as run:
        found = _export_of_run(run)
        # Training has the figures for its own dataset version; for another one they are computed.
        run.stage(
            "evaluate",
            lambda: evaluate_on(found.models_uri, found.export, run.tree.dataset.uri, is_new=not found.skipped),
            evaluation_record,
        )
    _print_stage(common, run)


@command()
def gate(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.candidate import gate_record, judge_export

    common: Common = context.obj
    with _open_dataset_run(dataset, common) as run:
        found = _export_of_run(run)
        run.stage("gate", lambda: judge_export(found.models_uri, found.export, run.tree.gate), gate_record)
    _print_stage(common, run)


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
    from train.published.candidate import promotion_record

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
            "expected the gate with its options, one export by its number, or the one before",
        )
    flags = {"require": require_promotion, "replace_current": replace_current}
    with open_run(models, common, load=load_for_models) as run:
        is_config = uri.endswith(".toml")
        run.stage(
            "promote", lambda: _promoted(run, number, rollback=rollback, is_config=is_config, **flags), promotion_record
        )
    _print_stage(common, run)


@command()
def report(
    context: typer.Context,
    source_or_config: Annotated[
        str, typer.Argument(metavar="SOURCE_OR_CONFIG", help="A folder or TOML file; not needed.")
    ] = "",
) -> None:
    from pipeline.report.write import report_record, write_report

    common: Common = context.obj
    load_pipeline(source_or_config or None, common.overrides, common.workdir)
    chosen = common if common.is_run_named else replace(common, run_id=latest_run(common.workdir))
    workdir, run_id = chosen.workdir, chosen.run_id
    # How that run ended stays as it is.
    state = read_run_state(workdir, run_id, WHOLE_PIPELINE)
    record = report_record(write_report(workdir, run_id, write_summary(workdir, run_id, state, SUMMARY_SECTIONS)))
    write_stage_record(workdir, run_id, record)
    write_summary(workdir, run_id, state, SUMMARY_SECTIONS)
    _print_record(chosen, record)


def _print_stage(common: Common, run: Run) -> None:
    """What the stage did that ended last."""
    _print_record(common, run.record.ended[-1])


def _print_record(common: Common, record: StageRecord) -> None:
    machine = {"run_id": common.run_id, **record.model_dump(mode="json", exclude={"detail"})}
    print_result(common, machine, stage_rows(record), title=stage_title(record))


def _verified(dataset_or_config: str, common: Common, version: int, *, deep: bool) -> VerifyReport:
    """With a config file, the check is a stage of the run; a bare dataset leaves no run record."""
    from shardmill.dataset.open import open_dataset
    from shardmill.dataset.verify import verify_dataset

    def named(uri: str) -> str:
        return f"{split_version(uri)[0]}@{version}" if version else uri

    if not dataset_or_config.endswith(".toml"):
        return verify_dataset(open_dataset(named(existing_path(dataset_or_config))), deep=deep)
    with open_run(dataset_or_config, common) as run:
        require(run.tree, "dataset")
        # Not what an earlier attempt of this stage has checked: a later version may be there by now.
        uri = named(_dataset_of_run(run, ("etl",)))
        return run.stage(
            "verify",
            lambda: verify_dataset(open_dataset(uri), deep=deep, on_shard=run.progress.shard_verified),
            verify_record,
        )


def _promoted(
    run: Run, number: int | None, *, rollback: bool, is_config: bool, require: bool, replace_current: bool
) -> Promotion:
    """Through the gate (a config's export, or the newest one of a models URI), by its number, or back."""
    from train.published.candidate import promote_export
    from train.published.exported import newest_export, require_exports
    from train.published.promote import choose_export, roll_back

    models_uri = run.tree.models.uri
    if not is_config:
        # A folder of images, say: whatever is asked for, it is not in there.
        require_exports(models_uri)
    if rollback:
        return roll_back(models_uri, run.id)
    if number is not None:
        return choose_export(models_uri, number, run.id)
    candidate = _export_of_run(run).export if is_config else newest_export(models_uri)
    return promote_export(
        models_uri, candidate, run.tree.gate, run.id, require=require, replace_current=replace_current
    )


@contextmanager
def _open_dataset_run(dataset_or_config: str, common: Common) -> Iterator[Run]:
    """The argument is a dataset or a config file: a folder of images says nothing about what these commands need."""
    with open_run(dataset_or_config, common, load=load_for_dataset) as run, after_etl(dataset_or_config):
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


def _dataset_of_run(run: Run, stages: Sequence[str] = ("etl", "verify")) -> str:
    """DATASET@N as it was asked for, or as the last of `stages` in this run committed or checked it; without either,
    what the config names."""
    if split_version(run.tree.dataset.uri)[1] is not None:
        return run.tree.dataset.uri
    records = [read_stage_record(run.record.workdir, run.id, stage) for stage in stages]
    # An older shardmill's check does not say of which version it was.
    ended = [each for each in records if each is not None and each.status != "failed" and "dataset" in each.sections]
    if not ended:
        return run.tree.dataset.uri
    dataset = max(ended, key=lambda each: each.started).sections["dataset"]
    return f"{dataset['uri']}@{dataset['version']}"
