"""Prints results: a table for people; with --json the machine's document alone on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from shardmill.jobs.summary_rows import Rows
from shardmill.words import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.cli_options import Common
    from shardmill.dataset.verify import VerifyReport
    from shardmill.jobs.run_files import StageRecord


def stage_title(record: StageRecord) -> str:
    """The title of a single stage's result; for a skipped stage, the rows show its earlier result."""
    if record.status == "skipped" and record.stage == "evaluate":
        return "evaluate: not recomputed; these are the metrics recorded by the training"
    # Whether it is done or was skipped, and in how many seconds, is on stderr already.
    return record.stage


def outcome_words(record: StageRecord) -> str:
    """How a stage has ended, for its line on stderr."""
    if record.status != "skipped":
        return record.status
    registered = (record.sections.get("promotion") or {}).get("registered")
    if registered is None:
        return "skipped, its result already exists"
    # The registry was asked, and may have been told.
    return f"already current, {f'registered as {registered}' if registered else 'and not registered'}"


def verify_rows(report: VerifyReport) -> Rows:
    """One row for each rule: whether it holds, and what was found."""
    return [("FAILED" if check.problem else "ok", check.rule, check.problem or check.detail) for check in report.checks]


def verify_document(report: VerifyReport) -> dict[str, Any]:
    """The document that `verify --json` prints."""
    return {
        "uri": report.uri,
        "version": report.version,
        "deep": report.deep,
        "ok": not report.problems,
        "checks": [
            {"rule": each.rule, "ok": not each.problem, "detail": each.detail, "problem": each.problem}
            for each in report.checks
        ],
    }


def flat_rows(value: dict[str, Any], prefix: str = "") -> Rows:
    """A document as rows of dotted names."""
    rows: Rows = []
    for name, item in value.items():
        if isinstance(item, dict):
            rows += flat_rows(item, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", "" if item is None else str(item)))
    return rows


def plain(value: Any) -> Any:
    """A value of ours as JSON can hold it."""
    from pydantic import TypeAdapter

    return TypeAdapter(type(value)).dump_python(value, mode="json")


def print_result(common: Common, machine: Any, rows: Iterable[tuple[str, ...]], title: str = "") -> None:
    """People get a table on stdout; with --json it goes to stderr, and stdout has the machine's document alone."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if common.json:
        sys.stdout.write(json.dumps(machine, indent=2) + "\n")
        sys.stdout.flush()
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
