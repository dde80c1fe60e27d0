"""Shows progress of a run on stderr: bars on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardmill.jobs.observer import WARNING, FieldValue, Observer
from shardmill.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_LINE_SECONDS = 5.0
# Events to show on the terminal; the rest is only in `events.jsonl`.
SENTENCES = {
    "etl.listed": "etl: inputs listed: {listed:,}; named like images: {images:,}; work units: {units:,}",
    "etl.inferred": "etl: {num_classes} classes ({classes}); splits {splits}; stored as {image}; dataset {dataset}",
    "etl.changes": (
        "etl: rows reused from the latest version: {unchanged:,}; removed: {removed:,}; inputs to process: "
        "{to_process:,}"
    ),
    "etl.comparing": "etl: of these, inputs with another size or time, compared by content: {inputs:,}",
    "etl.rebased": "etl: another writer has committed version {version}; appending to it",
    "etl.units_kept": "etl: work units reused from an interrupted run: {kept:,}; remaining: {missing:,}",
    "train.verdict": "train: {sentence}",
    "train.resumed": "train: resuming at epoch {epoch}, step {step}",
    "train.checkpoint_discarded": "train: skipping the checkpoint {path}: {reason}",
    "train.training_discarded": "train: skipping the training {path}: {reason}",
    "train.unfinished": "train: a training on version {version} is unfinished; this run trains version {trains}. "
    "To finish it: `shardmill train CONFIG --set dataset.uri={dataset}`",
    "train.continues": "train: continuing from {epochs_done} finished epochs to {epochs}: {note}",
    "train.first_recipe": (
        "train: resuming {training_dir}, which began with train.recipe_version = 1; use --fresh to train with the "
        "current version"
    ),
    "train.other_world_size": (
        "train: the existing result was computed on {world_size} ranks and is valid for {num_workers} too; use "
        "--fresh to train again"
    ),
    "train.building": "train: checking that {model} builds for images of {images} and {labels}",
    "train.plan": "train: {short}",
    "train.profile": "train: recording a profile in {path}; steps: {steps}",
    "train.early_stop": "train: stopping early after epoch {epoch}",
}


class RunProgress:
    """The observer of a run's stages. Use it as a context manager around them."""

    def __init__(self, record: Observer, num_epochs: int) -> None:
        self._record = record
        self._num_epochs = num_epochs
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._marks: dict[str, list[tuple[float, int]]] = {}
        self._begun: set[str] = set()
        self._next_line = 0.0
        self._next_count = 0.0

    def __enter__(self) -> RunProgress:
        if sys.stderr.isatty():
            self._bars = _make_bars()
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, line: str) -> None:
        """One line for the person."""
        line = printable(line)
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stderr.write(f"{line}\n")

    def finish(self, line: str) -> None:
        """Remove the bar of a finished activity and print one line."""
        self._clear()
        self.say(line)

    def _clear(self) -> None:
        """Take the bar away: there is one at a time."""
        if self._bars is not None:
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._tasks.clear()

    def shard_verified(self, num_done: int, num_shards: int) -> None:
        """One more shard of a version was checked."""
        self.event("verify.progress", {"num_done": num_done, "num_shards": num_shards})

    def images_compared(self, num_done: int, num_images: int) -> None:
        """Show how many stored images were read for a comparison."""
        self._advance("inspect", num_done, num_images, "images")

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """Show a stage's event; frequent progress moves the bars, other events are recorded."""
        numbers = {key: value for key, value in fields.items() if isinstance(value, int | float)}
        match name:
            case "list.progress":
                self._count("etl, listing", int(numbers["num_listed"]), "inputs")
            case "etl.progress":
                self._advance("etl", int(numbers["num_done"]), int(numbers["num_images"]), "images")
            case "verify.progress":
                self._advance("verify", int(numbers["num_done"]), int(numbers["num_shards"]), "shards")
            case "train.progress":
                label = f"train, epoch {self._epoch(numbers)}"
                unit = f"steps, loss {numbers['loss']:.4f}"
                self._advance(label, int(numbers["step"]) + 1, int(numbers["num_steps"]), unit)
            case _:
                self._record.event(name, fields)
                if name == "train.epoch" and fields.get("rank", 0) == 0:
                    self.finish(_epoch_line(self._epoch(numbers), numbers))
                elif name in SENTENCES and fields.get("rank", 0) == 0:
                    shown = {"epoch": self._epoch(numbers), "step": int(numbers.get("step", 0)) + 1}
                    self.say(_sentence(name, {**fields, **shown}))
                elif WARNING in fields:
                    self.say(f"{name.partition('.')[0]}: WARNING: {fields[WARNING]}")

    def _epoch(self, numbers: Mapping[str, int | float]) -> str:
        """People count from 1, all others from 0."""
        return f"{int(numbers.get('epoch', 0)) + 1}/{self._num_epochs}"

    def _count(self, label: str, num_done: int, unit: str) -> None:
        """Progress towards an end that is not known."""
        if self._bars is not None:
            if label not in self._tasks:
                self._clear()
                self._tasks[label] = self._bars.add_task(label, total=None, unit=unit)
            self._bars.update(self._tasks[label], completed=num_done)
        elif time.monotonic() >= self._next_count:
            # A short listing needs no line: the first one comes after the first few seconds.
            if self._next_count:
                self.say(f"{label}: {num_done:,} {unit}")
            self._next_count = time.monotonic() + PLAIN_LINE_SECONDS

    def _advance(self, label: str, num_done: int, num_total: int, unit: str) -> None:
        if self._bars is not None:
            if label not in self._tasks:
                self._clear()
                self._tasks[label] = self._bars.add_task(label, total=num_total, completed=num_done, unit=unit)
            self._bars.update(self._tasks[label], completed=num_done, total=num_total, unit=unit)
            return
        now = time.monotonic()
        # What was done before this process looked (kept units, resumed steps) says nothing about its rate, and neither
        # does the time until the first piece of work is done, when Spark was starting. So the second mark counts.
        marks = self._marks.setdefault(label, [])
        if not marks or (len(marks) == 1 and num_done > marks[0][1]):
            marks.append((now, num_done))
        started, done_before = marks[-1]
        # If the beginning was printed, the end is printed too.
        ends = num_done == num_total and label in self._begun
        if now < self._next_line and not ends:
            return
        if num_done < num_total:
            self._begun.add(label)
        else:
            self._begun.discard(label)
        self._next_line = now + PLAIN_LINE_SECONDS
        rate = (num_done - done_before) / (now - started) if num_done > done_before and now > started else 0.0
        left = "" if ends else f", {(num_total - num_done) / max(rate, 1e-9):,.0f} s left"
        pace = f", {rate:,.0f} a second{left}" if rate else ""
        self.say(f"{label}: {num_done:,} of {num_total:,} {unit}{pace}")


def _sentence(name: str, fields: Mapping[str, FieldValue]) -> str:
    try:
        return SENTENCES[name].format(**fields)
    except (LookupError, ValueError):  # of another version, say: no reason to end the work that it is about
        return f"{name}: " + ", ".join(f"{key} {value}" for key, value in fields.items())


def _epoch_line(epoch: str, numbers: Mapping[str, int | float]) -> str:
    parts = [_figures("train_", numbers), _figures("validation_", numbers)]
    validation = f"; validation {parts[1]}" if parts[1] else ""
    return f"train: epoch {epoch} in {numbers['seconds']:.1f} s: {parts[0]}{validation}"


def _figures(split: str, numbers: Mapping[str, int | float]) -> str:
    """Every figure of a split that an event holds; which ones, depends on the labels."""
    names = [name for name in numbers if name.startswith(split)]
    return ", ".join(f"{name.removeprefix(split).replace('_', ' ')} {numbers[name]:.4f}" for name in names)


def _make_bars() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        RateColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )
