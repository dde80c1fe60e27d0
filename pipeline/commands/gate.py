"""The command `gate`: what `promote` would decide."""

from __future__ import annotations

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.commands.stage import export_of_run, open_dataset_run, print_stage


@command()
def gate(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.gate import gate_record, judge_export

    common: Common = context.obj
    with open_dataset_run(dataset, common) as run:
        found = export_of_run(run)
        run.stage("gate", lambda: judge_export(found.models_uri, found.export, run.tree.gate), gate_record)
    print_stage(common, run)
