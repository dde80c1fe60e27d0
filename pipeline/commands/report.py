"""The command `report`: writes the report page of a run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from pipeline.cli_options import Common, command
from pipeline.commands.stage import print_record
from pipeline.config import load_pipeline
from pipeline.running import SUMMARY_SECTIONS, WHOLE_PIPELINE
from shardmill.jobs.run_files import latest_run, read_run_state, write_stage_record, write_summary


@command()
def report(
    context: typer.Context,
    source_or_config: Annotated[
        str, typer.Argument(metavar="SOURCE_OR_CONFIG", help="A folder or TOML file (optional).")
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
    print_record(chosen, record)
