"""The command `train`: the stage alone, on the dataset of its run."""

from __future__ import annotations

import typer

from pipeline.cli_options import AllowChange, Common, DatasetArgument, Fresh, command
from pipeline.commands.stage import load_before_run, open_dataset_run, print_stage
from pipeline.preflight import refuse_what_cannot_work
from pipeline.running import dataset_of_run


@command()
def train(
    context: typer.Context, dataset: DatasetArgument, fresh: Fresh = False,
    allow_change: AllowChange = [],  # noqa: B006  typer copies it
) -> None:  # fmt: skip
    from shardmill.dataset.dataset import open_dataset
    from train.launching.attach import EndedWithJob, attached
    from train.planning.changes import Again
    from train.stage_record import train_record
    from train.training import train_in_run
    from train.tree import TrainTree

    common: Common = context.obj
    again, loaded = Again(fresh, tuple(allow_change)), load_before_run(dataset, common)
    try:
        with attached(loaded.train), open_dataset_run(dataset, common, loaded) as run:
            refuse_what_cannot_work(run.tree, common.workdir, ("train",))
            tree, pin = run.tree.part(TrainTree), open_dataset(dataset_of_run(run)).pin
            run.stage("train", lambda: train_in_run(tree, run.record, run.progress, pin, again), train_record)
        print_stage(common, run)
    except EndedWithJob as ended:
        # This process is another rank than 0 of an attached job: it exits as the job did, and rank 0 has told it all.
        raise typer.Exit(ended.code if isinstance(ended.code, int) else 0) from None
