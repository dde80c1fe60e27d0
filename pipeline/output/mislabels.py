"""The output of `shardmill mislabels`: rows for people, the document of --json, and the CSV that comes back as
`etl.corrections`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from pipeline.output.printing import Rows, plain
from shardmill.data_faults.mislabels import ClassFaults, Mislabels, SuspectLabel
from shardmill.dataset.dataset import Dataset
from shardmill.words import counted, to_cell

CSV_COLUMNS = (
    "source", "label", "given_label", "suggested_label", "probability", "score", "found_as", "split", "sample_id"
)  # fmt: skip
_NUM_SHOWN = 5


def document(found: Mislabels, predictions: Dataset) -> dict[str, Any]:
    """What `--json` prints."""
    made_by = predictions.manifest.predicted_by
    dataset = made_by.predicted if made_by is not None else None
    return {
        "predictions": plain(predictions.pin),
        "dataset": None if dataset is None else plain(dataset),
        "model": str(made_by),
        **plain(found),
    }


def rows(found: Mislabels, csv_file: str, html_file: str) -> Rows:
    """The counts with their first examples, then the classes with the most faults, and the files."""
    listed: Rows = [
        ("labels", f"{found.num_likely:,} of {found.num_judged:,} are likely wrong"),
        *(
            ("", f"{each.source} ({each.split}): {each.given_label}, {_how(each)} {each.suggested_label}")
            for each in found.suspects[:_NUM_SHOWN]
        ),
        ("mistakes", _mistakes(found)),
        *(
            (
                "",
                f"{each.source} ({each.split}): {each.given_label}, predicted {each.prediction} {each.probability:.4f}",
            )
            for each in found.mistakes[:_NUM_SHOWN]
        ),
        *((f"class {each.class_name}", _faults(each)) for each in found.classes[:_NUM_SHOWN]),
    ]
    if unjudged := found.num_images - found.num_judged:
        listed.append(("not judged", f"{counted(unjudged, 'image')} without a class, or of a class with few images"))
    fill_in = f"{csv_file}: fill in its column label, then set etl.corrections"
    return [*listed, *([("csv", fill_in)] if csv_file else []), *([("html", html_file)] if html_file else [])]


def _how(suspect: SuspectLabel) -> str:
    # `--limit` gives others, too.
    return "likely" if suspect.is_likely else "less likely"


def _mistakes(found: Mislabels) -> str:
    if not found.num_tested:
        return "unknown: any image may be one of the training; predict a dataset, and keep the version of the training"
    return f"the model is wrong in {found.num_mistaken:,} of {found.num_tested:,} that it was not trained on"


def _faults(each: ClassFaults) -> str:
    labels = f"{each.num_likely:,} of {each.num_images:,} labels likely wrong"
    labels += f" (most of {each.most_suggested})" if each.most_suggested else ""
    mistakes = f"{each.num_mistaken:,} of {each.num_tested:,} mistaken"
    return f"{labels}, {mistakes}" + (f" (most for {each.most_predicted})" if each.most_predicted else "")


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
        found_as = "likely mislabel" if each.is_likely else "suspect"
        names = map(to_cell, (each.given_label, each.suggested_label))
        yield to_cell(each.source), "", *names, each.probability, each.score, found_as, each.split, each.sample_id
    suspects = {each.sample_id for each in found.suspects}
    for each in found.mistakes:
        if each.sample_id not in suspects:
            names = map(to_cell, (each.given_label, each.prediction))
            yield to_cell(each.source), "", *names, each.probability, "", "mistake", each.split, each.sample_id
