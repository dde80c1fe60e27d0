"""The command `plan`: the choices and cost of a training, before anything trains."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.output.printing import print_table
from shardmill.errors import UsageError
from shardmill.words import printable

if TYPE_CHECKING:
    from train.tree import TrainTree

WorldSize = Annotated[
    int | None, typer.Option(metavar="N", help="Number of ranks, instead of train.num_workers.", min=1)
]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Compare strategies by memory: that of a rank's device, such as 80GB.")
]


@command("run_id")
def plan(
    context: typer.Context,
    dataset: DatasetArgument,
    world_size: WorldSize = None,
    memory: Memory = "",
) -> None:
    from pipeline.config import after_etl, load_for_dataset
    from train.tree import TrainTree

    common: Common = context.obj
    memory_bytes = parse_bytes(memory) if memory else 0
    ranks = (f"train.num_workers={world_size}",) if world_size else ()
    tree = load_for_dataset(dataset, (*common.overrides, *ranks), common.workdir)
    with after_etl(dataset):
        if memory:
            _compare(tree.part(TrainTree), memory_bytes, common)
        else:
            _estimate(tree.part(TrainTree), common)


def _estimate(tree: TrainTree, common: Common) -> None:
    from train.planning.estimate import estimate_training

    sys.stderr.write("plan: loading the framework, building the model and measuring some steps\n")
    estimate = estimate_training(tree)
    print_table(common, estimate.document(), estimate.rows(), title="plan")


def _compare(tree: TrainTree, memory_bytes: int, common: Common) -> None:
    from train.planning.shard import plan_memory

    sys.stderr.write("plan: counting what a rank holds under each strategy\n")
    planned = plan_memory(tree, memory_bytes)
    print_table(common, planned.document(), planned.rows(), title=planned.title)
    (sys.stderr if common.json else sys.stdout).write(f"{printable(planned.decision)}\n")


def parse_bytes(text: str) -> int:
    """`80GB`, `1.5 GiB`, `512MB` or `1000 B`. Raises UsageError for anything else, also without a unit, and for 0."""
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?) *((?:[KMGT]I?)?B)", text.strip(), re.IGNORECASE)
    num_bytes = int(float(parsed[1]) * units[parsed[2].upper()]) if parsed else 0
    if num_bytes < 1:
        raise UsageError(
            f"--memory {text}", "expected a size in B, KB, MB, GB, TB, KiB, MiB, GiB or TiB", "give for example 80GB"
        )
    return num_bytes
