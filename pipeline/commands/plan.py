"""The command `plan`: the choices and cost of a training, before anything trains."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.output.printing import print_result

WorldSize = Annotated[
    int | None, typer.Option(metavar="N", help="Number of ranks, instead of train.num_workers.", min=1)
]
Bandwidth = Annotated[
    float, typer.Option(metavar="GBIT", help="Network bandwidth between two ranks, in Gbit/s.", min=0.001)
]


@command("run_id")
def plan(
    context: typer.Context,
    dataset: DatasetArgument,
    world_size: WorldSize = None,
    bandwidth: Bandwidth = 10.0,
) -> None:
    from pipeline.config import after_etl, load_for_dataset
    from train.planning.estimate import estimate_training
    from train.tree import TrainTree

    common: Common = context.obj
    ranks = (f"train.num_workers={world_size}",) if world_size else ()
    tree = load_for_dataset(dataset, (*common.overrides, *ranks), common.workdir)
    sys.stderr.write("plan: loading the framework, building the model and measuring some steps\n")
    with after_etl(dataset):
        estimate = estimate_training(tree.part(TrainTree), bandwidth)
    print_result(common, estimate.document(), estimate.rows(), title="plan")
