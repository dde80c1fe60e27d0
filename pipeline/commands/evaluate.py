"""The command `evaluate`: exact figures of the exported model."""

from __future__ import annotations

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.commands.stage import export_of_run, open_dataset_run, print_stage


@command()
def evaluate(context: typer.Context, dataset: DatasetArgument) -> None:
    from train.published.evaluation import evaluate_on, evaluation_record

    common: Common = context.obj
    with open_dataset_run(dataset, common) as run:
        found = export_of_run(run)
        # Training has the figures for its own dataset version; for another one they are computed.
        run.stage(
            "evaluate",
            lambda: evaluate_on(found.models_uri, found.export, run.tree.dataset.uri, is_new=not found.skipped),
            evaluation_record,
        )
    print_stage(common, run)
