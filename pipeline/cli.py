"""The command line `shardmill`: it reads arguments and calls the stages."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import AllowChange, Command, Common, DatasetArgument, Fresh, command_without
from pipeline.dataset_commands import dataset_app
from pipeline.ending import run_app
from pipeline.plan_command import plan_app
from pipeline.printing import plain, print_result, stage_rows, stage_title, summary_rows, verify_document, verify_rows
from shardmill.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from shardmill.jobs.run_files import StageRecord

app = typer.Typer(
    help="Images to committed training shards with Spark; exact, resumable training on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show the config.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(dataset_app)
app.add_typer(plan_app)

Version = Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)]
Source = Annotated[str, typer.Argument(metavar="SOURCE_OR_CONFIG", help="Images of any source, or a TOML file.")]
ReplaceSource = Annotated[
    bool, typer.Option("--replace-source", help="The dataset's images may come from another source than before.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List and plan only: read no image, write nothing.")]


@app.callback(invoke_without_command=True)
def top(context: typer.Context, version: Version = False) -> None:
    """Options before a command: only --version."""
    if version:
        from importlib import metadata

        sys.stdout.write(f"shardmill {metadata.version('shardmill')}\n")
        raise typer.Exit


@app.command(cls=Command)
def run(
    context: typer.Context, source_or_config: Source, replace_source: ReplaceSource = False, fresh: Fresh = False,
    allow_change: AllowChange = [],  # noqa: B006  typer copies it
) -> None:  # fmt: skip
    """The whole pipeline: etl, verify, train, export, evaluate, promote, report."""
    from pipeline.run import run_pipeline
    from train.changes import Again

    common: Common = context.obj
    again = Again(fresh, tuple(allow_change))
    summary = run_pipeline(source_or_config, common, replace_source=replace_source, again=again)
    print_result(common, summary, summary_rows(summary), title=f"run {summary['run_id']}")


@app.command(cls=Command)
def etl(
    context: typer.Context,
    source_or_config: Source,
    replace_source: ReplaceSource = False,
    dry_run: DryRun = False,
) -> None:
    """Images to a committed dataset version."""
    common: Common = context.obj
    if dry_run:
        from pipeline import dry_run as planning

        found = planning.dry_run(source_or_config, common, replace_source=replace_source)
        print_result(common, found.document(), found.rows(), title="etl --dry-run")
        return
    from pipeline.stage_commands import etl_stage

    _print_stage(common, etl_stage(source_or_config, common, replace_source=replace_source))


@app.command(cls=command_without("run_id"))
def check_source(context: typer.Context, source_or_config: Source) -> None:
    """What `etl` would reject, and why: read and decode every image on this machine, write nothing."""
    from pipeline.source_check import check_document, check_rows, check_source_stage
    from shardmill.jobs.ending import report_error

    common: Common = context.obj
    found, error = check_source_stage(source_or_config, common)
    print_result(common, check_document(found), check_rows(found), title="check-source")
    if error is not None:
        # The table, or the document with --json, has been printed; an error's own document would be a second one.
        raise typer.Exit(report_error(error, debug=common.debug))


@app.command(cls=Command)
def verify(
    context: typer.Context,
    dataset: DatasetArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Re-read every byte of every shard.")] = False,
) -> None:
    """Check every rule of a dataset version, and print a table."""
    from pipeline.stage_commands import verify_stage
    from shardmill.jobs.ending import report_error

    common: Common = context.obj
    report = verify_stage(dataset, common, deep=deep)
    print_result(common, verify_document(report), verify_rows(report), title=f"{report.uri}@{report.version}")
    try:
        report.raise_if_failed()
    except IntegrityError as error:
        # The table, or the document with --json, has been printed; an error's own document would be a second one.
        raise typer.Exit(report_error(error, debug=common.debug)) from None


@app.command(cls=Command)
def train(
    context: typer.Context, dataset: DatasetArgument, fresh: Fresh = False,
    allow_change: AllowChange = [],  # noqa: B006  typer copies it
) -> None:  # fmt: skip
    """Train on the dataset's latest version, or continue an interrupted training."""
    from pipeline.attached import ended_with_its_job
    from pipeline.stage_commands import train_stage
    from train.changes import Again

    common: Common = context.obj
    with ended_with_its_job():
        _print_stage(common, train_stage(dataset, common, Again(fresh, tuple(allow_change))))


@app.command(cls=Command)
def export(context: typer.Context, dataset: DatasetArgument) -> None:
    """The trained model as a SavedModel and a .keras file, compared with the training model."""
    from pipeline.stage_commands import export_stage

    common: Common = context.obj
    _print_stage(common, export_stage(dataset, common))


@app.command(cls=Command)
def evaluate(context: typer.Context, dataset: DatasetArgument) -> None:
    """Exact figures of the trained model on the test split."""
    from pipeline.stage_commands import evaluate_stage

    common: Common = context.obj
    _print_stage(common, evaluate_stage(dataset, common))


@app.command(cls=Command)
def gate(context: typer.Context, dataset: DatasetArgument) -> None:
    """What `promote` would decide; promotes nothing (and exports first, if that was not done yet)."""
    from pipeline.stage_commands import gate_stage

    common: Common = context.obj
    _print_stage(common, gate_stage(dataset, common))


@app.command(cls=Command)
def promote(
    context: typer.Context,
    models: Annotated[
        str, typer.Argument(metavar="MODELS[@N]", help="Models folder or URI, one export of it, or a TOML file.")
    ],
    rollback: Annotated[bool, typer.Option("--rollback", help="Make the previous model current again.")] = False,
    require_promotion: Annotated[bool, typer.Option("--require", help="Exit 9 if the gate is not passed.")] = False,
    replace_current: Annotated[
        bool, typer.Option("--replace-current", help="Promote although the current model cannot be compared with.")
    ] = False,
) -> None:
    """Make the newest export the current model if it passes the gate; or export N, without the gate."""
    from pipeline.stage_commands import promote_stage

    common: Common = context.obj
    flags = {"rollback": rollback, "require": require_promotion, "replace_current": replace_current}
    _print_stage(common, promote_stage(models, common, **flags))


@app.command(cls=Command)
def report(
    context: typer.Context,
    source_or_config: Annotated[
        str, typer.Argument(metavar="SOURCE_OR_CONFIG", help="A folder or TOML file; not needed.")
    ] = "",
) -> None:
    """Write report.html again: of the run that --run-id names, or of the latest."""
    from pipeline.config import load_pipeline
    from pipeline.stage_commands import report_again
    from shardmill.jobs.run_files import latest_run

    common: Common = context.obj
    load_pipeline(source_or_config or None, common.overrides, common.workdir)
    chosen = common if common.is_run_named else replace(common, run_id=latest_run(common.workdir))
    _print_stage(chosen, report_again(chosen))


@app.command(cls=command_without("overrides", "workdir", "run_id"))
def predict(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Models folder or URI (its current model), or one export.")
    ],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(metavar="N", min=1, help="The N most probable classes of each.")] = 1,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
) -> None:
    """Label and probability of image files, through the ETL's own decoding. Exit 2 if every file is rejected."""
    from pipeline.predictions import check_any_predicted, prediction_csv, prediction_rows
    from shardmill.printable import printable
    from train.published.predict import exact_name, predict_images

    export = exact_name(model)
    sys.stderr.write(f"predict: export {printable(export)}; its framework loads now\n")
    predictions = predict_images(export, images, top)
    if as_csv:
        sys.stdout.write(prediction_csv(predictions))
    else:
        print_result(context.obj, [plain(each) for each in predictions], prediction_rows(predictions), title=export)
    check_any_predicted(predictions)


@app.command(cls=command_without("run_id"))
def doctor(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file to check as well.")] = "",
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Also start the training's ranks on the committed dataset, for one step.")
    ] = False,
) -> None:
    """Check this machine: versions, Java, compiler, config, storage, clocks, room, slots, devices, addresses, ports."""
    from pipeline.doctor import diagnose

    common: Common = context.obj
    findings = diagnose(config, common.overrides, common.workdir)
    if rehearse:
        from pipeline.rehearse import rehearsed

        findings.append(rehearsed(findings, config, common.overrides, common.workdir))
    rows = [(each.status, each.subject, each.found, each.fix) for each in findings]
    print_result(common, [plain(each) for each in findings], rows, title="doctor")
    if any(each.status == "fail" for each in findings):
        raise typer.Exit(2)


@app.command(cls=command_without("workdir", "run_id"))
def init(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it; must not exist.")] = "shardmill.toml",
) -> None:
    """Write a commented config file to start from."""
    from pipeline.config_file import commented_toml
    from pipeline.tree import PipelineTree
    from shardmill.jobs.config import load_tree

    common: Common = context.obj
    tree = load_tree(PipelineTree, None, common.overrides)
    uris = {"source.uri": tree.source.uri, "dataset.uri": tree.dataset.uri}
    todo = "".join(f"set {name}, " for name, uri in uris.items() if not uri)
    try:
        with open(file, "x", encoding="utf-8") as target:
            target.write(commented_toml(tree))
    except FileExistsError:
        raise UsageError(f"{file} exists already", "expected a new name", "shardmill init OTHER.toml") from None
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}", "expected a writable place") from None
    print_result(common, {"file": file}, [(f"wrote {file}; {todo}then: shardmill run {file}",)])


@config_app.command("show", cls=command_without("run_id"))
def config_show(
    context: typer.Context,
    source_or_config: Annotated[str, typer.Argument(metavar="SOURCE_OR_CONFIG", help="A folder or TOML file.")] = "",
) -> None:
    """Print the resolved config with every default, as TOML."""
    from pipeline.config import load_pipeline, without_secrets
    from pipeline.config_file import to_toml

    common: Common = context.obj
    tree = without_secrets(load_pipeline(source_or_config or None, common.overrides, common.workdir))
    if common.json:
        sys.stdout.write(json.dumps(tree.model_dump(mode="json"), indent=2) + "\n")
    else:
        sys.stdout.write(to_toml(tree, with_choices=True))


def main() -> None:
    """Entry point of the command `shardmill`."""
    run_app(app)


def _print_stage(common: Common, record: StageRecord) -> None:
    machine = {"run_id": common.run_id, **record.model_dump(mode="json", exclude={"detail"})}
    print_result(common, machine, stage_rows(record), title=stage_title(record))


if __name__ == "__main__":
    main()
