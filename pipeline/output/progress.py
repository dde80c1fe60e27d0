"""Shows progress of a run on stderr: which event of a stage is a line for people, and which one moves the bar.

It appears as bars of a terminal, as occasional lines, or where another process draws it (`Screen`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from shardmill.jobs.json_log import log_as_json, logs_json
from shardmill.jobs.observer import AS_JSON, VARIABLE, WARNING, Bar, FieldValue, Observer, SilentObserver, as_line
from shardmill.words import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


PLAIN_LINE_SECONDS = 5.0
# Two units that end together give no rate.
_MIN_TIMED_SECONDS = 0.5
RELAYED_SECONDS = 0.1
"""Between two states of a bar that another process draws."""


class Screen(Protocol):
    """Shows lines, and at most one bar below them."""

    def say(self, line: str) -> None: ...

    def advance(self, bar: Bar) -> None:
        """Show a bar, or move it."""
        ...

    def clear(self) -> None:
        """Take the bar away."""
        ...

    def close(self) -> None: ...


def open_screen() -> Screen:
    """The screen of this process's stderr."""
    if os.environ.get(VARIABLE) == AS_JSON and not logs_json():
        return RelayedBars()
    return TerminalBars() if sys.stderr.isatty() else PlainLines()


class TerminalBars:
    """A bar at the bottom of a terminal."""

    def __init__(self) -> None:
        self._bars = _make_bars()
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(self, bar: Bar) -> None:
        if bar.label not in self._tasks:
            self.clear()
            # What was done before (kept units, resumed steps) says nothing about the rate.
            done_before = {"completed": bar.num_done, "total": bar.num_total}
            self._tasks[bar.label] = self._bars.add_task(bar.label, **done_before, unit=bar.unit)
        self._bars.update(self._tasks[bar.label], completed=bar.num_done, total=bar.num_total, unit=bar.unit)

    def clear(self) -> None:
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()

    def close(self) -> None:
        self._bars.stop()


class RelayedBars:
    """Lines that the process which has started this one reads, and draws."""

    def __init__(self) -> None:
        self._shown = ""
        self._next = 0.0

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def advance(self, bar: Bar) -> None:
        now = time.monotonic()
        if bar.label == self._shown and bar.num_done != bar.num_total and now < self._next:
            return
        self._shown, self._next = bar.label, now + RELAYED_SECONDS
        self.say(as_line(bar))

    def clear(self) -> None:
        if self._shown:
            self._shown = ""
            self.say(as_line(Bar("", 0, None, "")))

    def close(self) -> None:
        self.clear()


class PlainLines:
    """A line every few seconds, for a log."""

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[float, int]]] = {}
        self._begun: set[str] = set()
        self._next_line = 0.0
        self._next_count = 0.0

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def advance(self, bar: Bar) -> None:
        if bar.num_total is None:
            self._count(bar)
        else:
            self._progress(bar, bar.num_total)

    def clear(self) -> None:
        """There is no bar."""

    def close(self) -> None:
        """Every line is written."""

    def _count(self, bar: Bar) -> None:
        if time.monotonic() >= self._next_count:
            # A short listing needs no line: the first one comes after the first few seconds.
            if self._next_count:
                self.say(f"{bar.label}: {bar.num_done:,} {bar.unit}")
            self._next_count = time.monotonic() + PLAIN_LINE_SECONDS

    def _progress(self, bar: Bar, num_total: int) -> None:
        now, num_done = time.monotonic(), bar.num_done
        # What was done before this process looked (kept units, resumed steps) says nothing about its rate, and neither
        # does the time until the first piece of work is done, when Spark was starting. So the second mark counts.
        marks = self._marks.setdefault(bar.label, [])
        if not marks or (len(marks) == 1 and num_done > marks[0][1]):
            marks.append((now, num_done))
        started, done_before = marks[-1]
        # If the beginning was printed, the end is printed too.
        ends = num_done == num_total and bar.label in self._begun
        if now < self._next_line and not ends:
            return
        if num_done < num_total:
            self._begun.add(bar.label)
        else:
            self._begun.discard(bar.label)
        self._next_line = now + PLAIN_LINE_SECONDS
        is_timed = now - started >= _MIN_TIMED_SECONDS
        rate = (num_done - done_before) / (now - started) if is_timed and num_done > done_before else 0.0
        left = "" if ends else f", {(num_total - num_done) / max(rate, 1e-9):,.0f} s left"
        pace = f", {pace_words(rate)}{left}" if rate else ""
        self.say(f"{bar.label}: {num_done:,} of {num_total:,} {bar.unit}{pace}")


def pace_words(rate: float) -> str:
    """`12 a second`, `1.5 a second`, or, of what takes longer than a second, `4 s each`."""
    if rate < 1:
        return f"{1 / rate:.2g} s each" if rate > 0.1 else f"{1 / rate:,.0f} s each"
    return f"{rate:,.0f} a second" if rate >= 10 else f"{rate:.2g} a second"


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
            return Text(pace_words(speed) if speed else "", style="progress.data.speed")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        RateColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )


# Events to show on the terminal; the rest is only in `events.jsonl`.
SENTENCES = {
    "etl.listed": "etl: inputs listed: {listed:,}; named like images: {images:,}; work units: {units:,}",
    "etl.inferred": "etl: {num_classes} classes ({classes}); splits {splits}; stored as {image}; dataset {dataset}",
    "etl.predicting": "predict: model {model}; images as it learned them, {image}; predictions {dataset}",
    "etl.corrected": "etl: labels changed by etl.corrections: {labels:,}",
    "etl.changes": (
        "etl: rows reused from the latest version: {unchanged:,}; removed: {removed:,}; inputs to process: "
        "{to_process:,}"
    ),
    "etl.comparing": "etl: of these, inputs with another size or time, compared by content: {inputs:,}",
    "etl.rebased": "etl: another writer has committed version {version}; appending to it",
    "etl.nothing_new": "etl: nothing new: version {version} stays the latest",
    "etl.units_kept": "etl: work units reused from an interrupted run: {kept:,}; remaining: {missing:,}",
    "train.verdict": "train: {sentence}",
    "train.resumed": "train: resuming at epoch {epoch}, step {step}",
    "train.checkpoint_discarded": "train: skipping the checkpoint {path}: {reason}",
    "train.training_discarded": "train: skipping the training {path}: {reason}",
    "train.unfinished": "train: a training on version {version} is unfinished; this run trains version {trains}. "
    "To finish it: `shardmill train CONFIG --set dataset.uri={dataset}`",
    "train.continues": "train: continuing from {epochs_done} finished epochs to {epochs}: {note}",
    "train.other_world_size": (
        "train: the existing result was computed on {world_size} ranks and is valid for {num_workers} too; use "
        "--fresh to train again"
    ),
    "train.other_strategy": (
        "train: the existing result was computed with train.strategy = {trained_by!r} and is valid for {strategy!r} "
        "too; use --fresh to train again"
    ),
    "train.building": "train: checking that {model} builds for images of {images} and {labels}",
    "train.plan": "train: {short}",
    "train.profile": "train: recording a profile in {path}; steps: {steps}",
    "train.stopping": "train: {reason}; stopping after this step, with a checkpoint (a second signal ends it at once)",
    "train.early_stop": "train: stopping early after epoch {epoch}",
}


class RunProgress:
    """The observer of a run's stages. Use it as a context manager around them.

    `builder`: the command that builds: a line of the ETL begins with its name.
    """

    def __init__(self, record: Observer, num_epochs: int, builder: str = "etl") -> None:
        self._record = record
        self._num_epochs = num_epochs
        self._builder = builder
        self._screen: Screen = PlainLines()

    def __enter__(self) -> RunProgress:
        self._screen = open_screen()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.close()

    def say(self, line: str) -> None:
        """One line for the person."""
        self._screen.say(printable(line))

    def finish(self, line: str) -> None:
        """Remove the bar of a finished activity and print one line."""
        self._screen.clear()
        self.say(line)

    def shard_verified(self, num_done: int, num_shards: int) -> None:
        """One more shard of a version was checked."""
        self.event("verify.progress", {"num_done": num_done, "num_shards": num_shards})

    def images_read(self, command: str, num_done: int, num_images: int) -> None:
        """Show how many stored images, or rows about them, a command has read."""
        self._advance(command, num_done, num_images, "images")

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """Record a stage's event, and show it; frequent progress moves the bars."""
        self._record.event(name, fields)
        numbers = {key: value for key, value in fields.items() if isinstance(value, int | float)}
        match name:
            case "list.progress":
                # Its end is not known.
                self._advance(f"{self._builder}, listing", int(numbers["num_listed"]), None, "inputs")
            case "etl.progress":
                self._advance(self._builder, int(numbers["num_done"]), int(numbers["num_images"]), "images")
            case "verify.progress":
                self._advance("verify", int(numbers["num_done"]), int(numbers["num_shards"]), "shards")
            case "train.progress":
                label = f"train, epoch {self._epoch(numbers)}"
                unit = f"steps, loss {numbers['loss']:.4f}"
                self._advance(label, int(numbers["step"]) + 1, int(numbers["num_steps"]), unit)
            case _:
                line = self._line_of(name, fields, numbers)
                if not log_as_json(name, fields, line) and line:
                    self.finish(line) if name == "train.epoch" else self.say(line)

    def _line_of(self, name: str, fields: Mapping[str, FieldValue], numbers: Mapping[str, int | float]) -> str:
        """The line that a terminal shows for an event; empty for one that is only recorded."""
        is_main = fields.get("rank", 0) == 0
        if name == "train.epoch" and is_main:
            return _epoch_line(self._epoch(numbers), numbers)
        if name in SENTENCES and is_main:
            shown = {"epoch": self._epoch(numbers), "step": int(numbers.get("step", 0)) + 1}
            return self._of_stage(*_sentence(name, {**fields, **shown}).split(": ", 1))
        if WARNING in fields:
            return self._of_stage(name.partition(".")[0], f"WARNING: {fields[WARNING]}")
        return ""

    def _of_stage(self, stage: str, words: str) -> str:
        return f"{self._builder if stage == 'etl' else stage}: {words}"

    def _epoch(self, numbers: Mapping[str, int | float]) -> str:
        """People count from 1, all others from 0."""
        return f"{int(numbers.get('epoch', 0)) + 1}/{self._num_epochs}"

    def _advance(self, label: str, num_done: int, num_total: int | None, unit: str) -> None:
        self._screen.advance(Bar(label, num_done, num_total, unit))


@contextmanager
def reading_bar(command: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of the stored images, or rows about them, that a command reads: it is told how many of how many."""
    with RunProgress(SilentObserver(), num_epochs=0) as progress:
        yield partial(progress.images_read, command)


def _sentence(name: str, fields: Mapping[str, FieldValue]) -> str:
    try:
        return SENTENCES[name].format(**fields)
    except (LookupError, ValueError):  # of another version, say: no reason to end the work that it is about
        return f"{name}: " + ", ".join(f"{key} {value}" for key, value in fields.items())


def _epoch_line(epoch: str, numbers: Mapping[str, int | float]) -> str:
    parts = [_metrics("train_", numbers), _metrics("validation_", numbers)]
    validation = f"; validation {parts[1]}" if parts[1] else ""
    return f"train: epoch {epoch} in {numbers['seconds']:.1f} s: {parts[0]}{validation}"


def _metrics(split: str, numbers: Mapping[str, int | float]) -> str:
    """Every metric of a split that an event holds; which ones, depends on the labels."""
    names = [name for name in numbers if name.startswith(split)]
    return ", ".join(f"{name.removeprefix(split).replace('_', ' ')} {numbers[name]:.4f}" for name in names)
