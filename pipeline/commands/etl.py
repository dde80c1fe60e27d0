"""The command `etl`: images to a committed dataset version."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli_options import Common, ReplaceSource, SourceArgument, command
from pipeline.commands.stage import print_stage
from pipeline.config import require
from pipeline.output.printing import print_result
from pipeline.preflight import refuse_what_cannot_work
from pipeline.running import open_run


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
    from etl.job import build_dataset
    from etl.outcome import stage_record
    from pipeline.commands import dry_run as planning

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
    print_stage(common, run)
