"""The command `run`: the whole pipeline."""

from __future__ import annotations

import typer

from pipeline.cli_options import AllowChange, Common, Fresh, ReplaceSource, SourceArgument, command


@command()
def run(
    context: typer.Context, source_or_config: SourceArgument, replace_source: ReplaceSource = False,
    fresh: Fresh = False, allow_change: AllowChange = [],  # noqa: B006  typer copies it
) -> None:  # fmt: skip
    from pipeline.output.printing import print_result
    from pipeline.run import run_pipeline
    from shardmill.jobs.summary_rows import summary_rows
    from train.planning.changes import Again

    common: Common = context.obj
    again = Again(fresh, tuple(allow_change))
    summary = run_pipeline(source_or_config, common, replace_source=replace_source, again=again)
    print_result(common, summary, summary_rows(summary), title=f"run {summary['run_id']}")
