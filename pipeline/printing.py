"""The one place where results are printed: a table for people, or the machine's document alone with --json."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from shardmill.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.cli_options import Common


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    counts = summary["dataset"]["counts"]
    train, promotion = summary["train"], summary["promotion"]
    evaluation = summary["evaluation"] or {}
    return [
        ("images", f"{counts['accepted']:,} accepted, {counts['rejected']:,} rejected of {counts['listed']:,} listed"),
        ("dataset", f"{summary['dataset']['uri']}@{summary['dataset']['version']}"),
        (
            "training",
            f"{train['strategy']}, {train['world_size']} rank(s), {train['epochs']} epochs, {train['steps']} steps",
        ),
        (
            "evaluation",
            f"{evaluation['split']} accuracy {evaluation['accuracy']:.4f}" if evaluation else "no split for it",
        ),
        ("model", f"{promotion['decision']}: {promotion['reason']}"),
        ("report", summary["report"]["path"]),
    ]


def flat_rows(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, item in value.items():
        if isinstance(item, dict):
            rows += flat_rows(item, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", "" if item is None else str(item)))
    return rows


def plain(value: Any) -> Any:
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
    rows = list(rows)
    if not stream.isatty() or not title:
        # Not for a person's screen: one line a row, for grep and cut; nothing wrapped.
        lines = ["\t".join(map(printable, row)) for row in rows]
        stream.write("".join(f"{line}\n" for line in ([title] if title else []) + lines))
        return
    table = Table(title=title, title_justify="left", show_header=False)
    for _ in rows[0] if rows else ():
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(file=stream).print(table)
