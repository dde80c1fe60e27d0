"""What a run did, or one stage of it, as a value: its metrics, its dataset and model, and how it shows itself in a
notebook.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmill.errors import ShardmillError, UsageError
from shardmill.html import table, text
from shardmill.jobs.run_files import SUMMARY, read_stage_record, run_folder
from shardmill.jobs.summary_rows import summary_rows
from shardmill.result import Result, Rows, ShownList
from shardmill.storage import join_uri
from shardmill.stores import open_store

if TYPE_CHECKING:
    from shardmill.loader.dataset import LoadableDataset


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """One epoch of a training. What the labels or the splits do not have is None."""

    epoch: int
    """Counted from 0."""
    train_loss: float
    train_accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    learning_rate: float
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class RunResult(Result):
    """What `shardmill.run`, `train`, `export` or `evaluate` did, or what `report` reads again. It shows itself as a
    table in a notebook, and with `print`.
    """

    run_id: str
    folder: str
    """URI of the run's record, with the report and the log of events."""
    summary: Mapping[str, Any]
    """The whole `summary.json` (docs/summary.schema.json): every metric of every stage."""
    epochs: tuple[EpochMetrics, ...]
    """The training, epoch by epoch; of a training that was skipped, those that it had."""

    @property
    def dataset(self) -> LoadableDataset:
        """The dataset version that the run made or found, and trained on."""
        return version_of(self.summary)

    @property
    def accuracy(self) -> float | None:
        """On the split that no decision has seen (test, or else validation); None for numbers, and without a split."""
        return self._of("evaluation", "accuracy")

    @property
    def loss(self) -> float | None:
        """On the same split."""
        return self._of("evaluation", "loss")

    @property
    def best_epoch(self) -> EpochMetrics:
        """The epoch whose weights the training gives: compare settings by its validation metrics, not by the test's."""
        return next(each for each in self.epochs if each.epoch == self.summary["train"]["weights_epoch"])

    @property
    def export(self) -> str | None:
        """Folder of the exported model."""
        return self._of("export", "path")

    @property
    def decision(self) -> str | None:
        """`promoted` or `kept`; `summary["promotion"]["reason"]` says why."""
        return self._of("promotion", "decision")

    @property
    def report(self) -> str | None:
        """The report, an HTML file."""
        return self._of("report", "path")

    def _of(self, section: str, key: str) -> Any:
        return (self.summary.get(section) or {}).get(key)

    def shown_rows(self) -> Rows:
        return [("run", f"{self.run_id}: {self.summary['status']}"), *summary_rows(self.summary)]

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.4f}"
        return f"<run {self.run_id}: {self.summary['status']}{accuracy}>"

    def shown_lists(self) -> list[ShownList]:
        return []

    def _repr_html_(self) -> str:
        from shardmill.loader.pictures import thumbnails

        if not self.summary.get("dataset"):
            return f"<div>{table(self.shown_rows())}</div>"
        try:
            dataset = self.dataset
            images = thumbnails(dataset, dataset.show, num_samples=6)
        except (ShardmillError, OSError) as error:
            images = f"<p>the dataset cannot be opened: {text(error)}</p>"
        return f"<div>{table(self.shown_rows())}{images}</div>"


def run_result(workdir: str | os.PathLike[str], run_id: str) -> RunResult:
    """From the run's record, which has more than its command prints."""
    folder = os.fspath(workdir)
    store, record = open_store(folder), read_stage_record(folder, run_id, "train")
    return RunResult(
        run_id=run_id,
        folder=join_uri(store.uri, run_folder(run_id)),
        summary=json.loads(store.read(f"{run_folder(run_id)}/{SUMMARY}")),
        epochs=tuple(map(epoch_metrics, record.detail["history"])) if record is not None else (),
    )


def version_of(sections: Mapping[str, Any]) -> LoadableDataset:
    """The dataset version that the sections of a summary name. Raises UsageError if they name none."""
    from shardmill.loader.dataset import open_dataset

    if not sections.get("dataset"):
        raise UsageError(
            "this run names no dataset version", "expected a run that built or read one", "use its `train`"
        )
    return open_dataset(f"{sections['dataset']['uri']}@{sections['dataset']['version']}")


def epoch_metrics(record: Mapping[str, Any]) -> EpochMetrics:
    """An epoch of the history that a training's record holds."""
    validation = record["validation"] or {}
    return EpochMetrics(
        epoch=record["epoch"],
        train_loss=record["train_loss"],
        train_accuracy=record["train_accuracy"],
        validation_loss=validation.get("loss"),
        validation_accuracy=validation.get("accuracy"),
        learning_rate=record["learning_rate"],
        seconds=record["seconds"],
    )
