"""Prints results: a table for people; with --json the machine's document alone on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from shardmill.errors import ShardmillError
from shardmill.jobs.observer import VARIABLE
from shardmill.jobs.process import report_error
from shardmill.jobs.summary_rows import stage_rows, weights_words
from shardmill.words import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.cli_options import Common
    from shardmill.jobs.run_files import StageRecord
    from shardmill.result import Result


def stage_title(record: StageRecord) -> str:
    """The title of a single stage's result; for a skipped stage, the rows show its earlier result."""
    if record.status == "skipped" and record.stage == "evaluate":
        return "evaluate: not recomputed; these are the metrics recorded by the training"
    if record.status == "skipped" and record.stage in ("etl", "predict"):
        return f"{record.stage}: nothing is new; the latest version stays"
    # Whether it is done or was skipped, and in how many seconds, is on stderr already.
    return record.stage


def print_record(common: Common, record: StageRecord) -> None:
    """A single stage's result."""
    machine = {"run_id": common.run_id, **record.model_dump(mode="json", exclude={"detail"})}
    print_table(common, machine, stage_rows(record), title=stage_title(record))


def outcome_words(record: StageRecord) -> str:
    """How a stage has ended, for its line on stderr."""
    if record.status != "skipped":
        trained = record.sections.get("train")
        return f"{record.status}; {weights_words(trained)}" if trained else record.status
    registered = (record.sections.get("promotion") or {}).get("registered")
    if registered is None:
        return "skipped, its result already exists"
    # The registry was asked, and may have been told.
    return f"already current, {f'registered as {registered}' if registered else 'and not registered'}"


def print_result(common: Common, found: Result, title: str = "", more: Iterable[tuple[str, ...]] = ()) -> None:
    """What a command has found, `more` below it for people; then the command ends with its error, if it has one."""
    print_table(common, found.document() if common.json else None, [*found.table(), *more], title)
    try:
        found.raise_if_failed()
    except ShardmillError as error:
        end_after_output(common, error)


def end_after_output(common: Common, error: ShardmillError) -> NoReturn:
    """The table, or the document with --json, has been printed; an error's own document would be a second one."""
    raise typer.Exit(report_error(error, debug=common.debug)) from None


def print_table(common: Common, machine: Any, rows: Iterable[tuple[str, ...]], title: str = "") -> None:
    """People get a table on stdout; with --json it goes to stderr, and stdout has the machine's document alone.

    A caller in Python gets no table: it has the result as a value, which it may print.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if common.json:
        sys.stdout.write(json.dumps(machine, indent=2) + "\n")
        sys.stdout.flush()
        if VARIABLE in os.environ:
            return
    stream = sys.stderr if common.json else sys.stdout
    rows = [tuple(map(printable, row)) for row in rows]
    title = printable(title)
    if not stream.isatty() or not title:
        # Not a terminal: one line per row, for grep and cut; nothing wrapped.
        lines = ["\t".join(row) for row in rows]
        stream.write("".join(f"{line}\n" for line in ([title] if title else []) + lines))
        return
    table = Table(title=title, title_justify="left", show_header=False)
    for _ in rows[0] if rows else ():
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=stream).print(table)
