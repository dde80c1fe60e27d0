"""The command `export`: the trained model in a form that others can load."""

from __future__ import annotations

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.commands.stage import export_of_run, open_dataset_run, print_stage


@command()
def export(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.export import export_record

    common: Common = context.obj
    with open_dataset_run(dataset, common) as run:
        run.stage("export", lambda: export_of_run(run), export_record)
    print_stage(common, run)
