"""The command `mislabels`: likely wrong labels, confident mistakes, and the classes they are in, to be corrected."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import Common, command
from pipeline.output.printing import print_result
from shardmill.errors import UsageError
from shardmill.ids import format_sample_id
from shardmill.words import to_cell

if TYPE_CHECKING:
    from shardmill.data_quality.mislabels import ConfidentMistake, Mislabels, SuspectLabel
    from shardmill.dataset.dataset import Dataset
    from shardmill.values import DatasetPin

CSV_COLUMNS = (
    "source", "label", "given_label", "suggested_label", "probability", "score", "found_as", "split", "sample_id"
)  # fmt: skip


@command("overrides", "workdir", "run_id")
def mislabels(
    context: typer.Context,
    predictions: Annotated[
        str,
        typer.Argument(metavar="PREDICTIONS[@N]", help="Predictions of a dataset, made by `predict --layer`."),
    ],
    csv: Annotated[
        str,
        typer.Option(metavar="FILE", help="Write a CSV to fill in for etl.corrections; it must not exist."),
    ] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Write a page with the images.")] = "",
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of suspect labels; 0: those that are likely wrong.")
    ] = 0,
) -> None:
    from pipeline.config import existing_path
    from pipeline.output.progress import reading_bar
    from pipeline.report.mislabels import mislabels_page
    from shardmill.data_quality.mislabels import find_mislabels
    from shardmill.data_quality.predicted_rows import read_predicted_rows
    from shardmill.dataset.dataset import open_dataset, open_pinned

    common: Common = context.obj
    _check_files(csv, html)
    opened = open_dataset(existing_path(predictions))
    name = f"{opened.pin.uri}@{opened.pin.version}"
    images = open_pinned(_images_of(opened, name)) if html else None
    with reading_bar("mislabels") as on_progress:
        rows = read_predicted_rows(opened, on_progress)
    found, files = find_mislabels(rows, limit), list[tuple[str, ...]]()
    # The page first: it may fail, and a CSV that is there is not written again.
    if images is not None:
        with open(html, "w", encoding="utf-8") as file:
            file.write(mislabels_page(found, name, images))
        files.append(("html", html))
    if csv:
        write_csv(found, csv)
        files.insert(0, ("csv", f"{csv}: fill in its column label, then set etl.corrections"))
    print_result(common, found, name, files)


def _check_files(csv: str, html: str) -> None:
    """Before the work. Raises UsageError for a file that cannot be written, and for a CSV that somebody may have
    filled in.
    """
    if csv and os.path.exists(csv):
        raise UsageError(
            f"{csv} exists already", "expected a new name: somebody may have filled it in", "choose another"
        )
    if csv and html and os.path.abspath(csv) == os.path.abspath(html):
        raise UsageError(f"--csv and --html are both {csv}", "expected two files", "name another page")
    for file in filter(None, (csv, html)):
        if os.path.isdir(file):
            raise UsageError(f"cannot write {file}: it is a folder", "expected the name of a file")
        if not os.path.isdir(folder := os.path.dirname(file) or "."):
            raise UsageError(f"cannot write {file}: there is no folder {folder}", "expected an existing folder")


def _images_of(predictions: Dataset, name: str) -> DatasetPin:
    made_by = predictions.manifest.predicted_by
    if made_by is None or made_by.predicted is None:
        raise UsageError(
            f"{name} was not predicted from a dataset",
            "expected one for --html: the page shows its stored images",
            "leave --html out, or `shardmill predict MODELS DATASET --layer NAME --out DIR`",
        )
    return made_by.predicted


def write_csv(found: Mislabels, path: str) -> None:
    """A row for each suspect label, then for each other confident mistake; the column `label` is left to a person.

    Raises FileExistsError if the file is there.
    """
    with open(path, "x", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        writer.writerows(_csv_rows(found))


def _csv_rows(found: Mislabels) -> Iterator[tuple[str | float, ...]]:
    for each in found.suspects:
        yield _cells(each, each.suggested_label, each.score, "likely mislabel" if each.is_likely else "suspect")
    suspects = {each.sample_id for each in found.suspects}
    for each in found.mistakes:
        if each.sample_id not in suspects:
            yield _cells(each, each.prediction, "", "mistake")


def _cells(
    each: SuspectLabel | ConfidentMistake, answer: str, score: float | str, found_as: str
) -> tuple[str | float, ...]:
    names = map(to_cell, (each.given_label, answer))
    sample_id = format_sample_id(each.sample_id)
    return to_cell(each.source), "", *names, each.probability, score, found_as, each.split, sample_id
