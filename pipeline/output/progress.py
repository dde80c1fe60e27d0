"""Shows progress of a run on stderr: which event of a stage is a line for people, and which one moves the bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from pipeline.output.screen import PlainLines, Screen, open_screen
from shardmill.jobs.observer import WARNING, FieldValue, Observer, SilentObserver
from shardmill.jobs.progress_lines import Bar
from shardmill.printable import printable

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
        """Show a stage's event; frequent progress moves the bars, other events are recorded."""
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
                self._record.event(name, fields)
                if name == "train.epoch" and fields.get("rank", 0) == 0:
                    self.finish(_epoch_line(self._epoch(numbers), numbers))
                elif name in SENTENCES and fields.get("rank", 0) == 0:
                    shown = {"epoch": self._epoch(numbers), "step": int(numbers.get("step", 0)) + 1}
                    self._say_of(*_sentence(name, {**fields, **shown}).split(": ", 1))
                elif WARNING in fields:
                    self._say_of(name.partition(".")[0], f"WARNING: {fields[WARNING]}")

    def _say_of(self, stage: str, words: str) -> None:
        self.say(f"{self._builder if stage == 'etl' else stage}: {words}")

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
    parts = [_figures("train_", numbers), _figures("validation_", numbers)]
    validation = f"; validation {parts[1]}" if parts[1] else ""
    return f"train: epoch {epoch} in {numbers['seconds']:.1f} s: {parts[0]}{validation}"


def _figures(split: str, numbers: Mapping[str, int | float]) -> str:
    """Every figure of a split that an event holds; which ones, depends on the labels."""
    names = [name for name in numbers if name.startswith(split)]
    return ", ".join(f"{name.removeprefix(split).replace('_', ' ')} {numbers[name]:.4f}" for name in names)
