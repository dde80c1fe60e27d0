"""Prints results: a table for people; with --json the machine's document alone on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from shardmill.printable import printable
from shardmill.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pipeline.cli_options import Common
    from shardmill.dataset.verify import VerifyReport
    from shardmill.jobs.run_files import StageRecord


Rows = list[tuple[str, ...]]
# Less is printed as 0.00.
_DRIFT_SHOWN = 0.005


def summary_rows(summary: dict[str, Any]) -> Rows:
    """A whole run: the sections of its summary that people need first."""
    evaluation = _evaluation_rows(summary) or [("evaluation", "no split for it")]
    report = [("report", summary["report"]["path"])] if summary.get("report") else []
    return [*_dataset_rows(summary), *_training_rows(summary), *evaluation, *_decision_rows(summary), *report]


def stage_title(record: StageRecord) -> str:
    """The title of a single stage's result; for a skipped stage, the rows show its earlier result."""
    if record.status != "skipped":
        # That it is done, and in how many seconds, is on stderr already.
        return record.stage
    if record.stage == "evaluate":
        return "evaluate: not recomputed; these are the metrics recorded by the training"
    return f"{record.stage}: skipped; its result already exists"


def stage_rows(record: StageRecord) -> Rows:
    """Prints the result of a single stage in readable form; `--json` prints all values."""
    sections = record.sections
    rows = [*_dataset_rows(sections), *_training_rows(sections), *_evaluation_rows(sections)]
    if sections.get("export"):
        export = sections["export"]
        rows += [
            ("export", export["path"]),
            ("differs by", f"{export['parity_max_abs_diff']:.2g} maximum difference from the training model"),
        ]
    rows += _decision_rows(sections)
    if sections.get("report"):
        rows.append(("report", sections["report"]["path"]))
    return rows


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


def _dataset_rows(sections: Mapping[str, Any]) -> Rows:
    dataset = sections.get("dataset")
    if not dataset:
        return []
    counts = dataset["counts"]
    in_order = sorted(counts["by_split"].items(), key=lambda split: ("train", "validation", "test").index(split[0]))
    splits = ", ".join(f"{name} {count:,}" for name, count in in_order)
    return [
        ("images", f"{counts['accepted']:,} accepted, {counts['rejected']:,} rejected of {counts['listed']:,} listed"),
        ("splits", splits),
        ("dataset", f"{dataset['uri']}@{dataset['version']}"),
        *_drift_rows(sections),
    ]


def _drift_rows(sections: Mapping[str, Any]) -> Rows:
    from shardmill.data_faults.drift import Drift

    if not sections.get("drift"):
        return []
    drift = Drift.model_validate(sections["drift"])
    moved = drift.words_above(_DRIFT_SHOWN) or "hardly any"
    return [("drift", f"from version {drift.against_version}: {moved}")]


def _training_rows(sections: Mapping[str, Any]) -> Rows:
    train = sections.get("train")
    if not train:
        return []
    size = (counted(train["world_size"], "rank"), counted(train["epochs"], "epoch"), counted(train["steps"], "step"))
    rows: Rows = [("training", ", ".join((train["strategy"], *size)))]
    if found := train.get("initialized"):
        fresh = "; ".join((*found["replaced"], *(f"{name}: not in the file" for name in found["missing"])))
        arrays = f"{found['num_loaded']:,} of {counted(found['num_weights'], 'array')} from {found['source']}"
        rows.append(("began with", f"{arrays}; fresh: {fresh}" if fresh else arrays))
    return rows


def _evaluation_rows(sections: Mapping[str, Any]) -> Rows:
    evaluation = sections.get("evaluation")
    if not evaluation:
        return []
    shown = ("accuracy", "mean_average_precision", "mean_absolute_error", "loss")
    known = [f"{name.replace('_', ' ')} {evaluation[name]:.4f}" for name in shown if evaluation.get(name) is not None]
    figures = f"{evaluation['split']} {', '.join(known)}"
    return [("evaluation", f"{figures}, on {counted(evaluation['num_samples'], 'sample')}")]


def _decision_rows(sections: Mapping[str, Any]) -> Rows:
    decided = sections.get("promotion") or sections.get("gate")
    if not decided:
        return []
    store = [("models", decided["models"])] if decided.get("models") else []
    return [*store, ("model", f"{decided['decision']}: {decided['reason']}")]


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
