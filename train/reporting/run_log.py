"""The sinks of a run that receive every global step and every event of its training."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from shardmill.jobs.line_log import GrowingFile, LineLog, Outage, Warn, open_lines, read_lines, replace_lines
from shardmill.jobs.observer import FieldValue, Observer
from shardmill.jobs.redact import redacted_text, warn_on_stderr
from shardmill.storage import Store
from train.contracts.values import BEFORE_CHECKPOINT, OUTPUT
from train.reporting.observer import STEP_SECONDS, GlobalStep, TrainObserver

PROGRESS_SECONDS = 1.0


class Sink(TrainObserver, Protocol):
    """A `TrainObserver` with an end."""

    def close(self) -> None:
        """Close the sink; nothing follows."""
        ...


class StepsLog:
    """`steps.jsonl`: every step once and in order, however often the training was killed and resumed in one run."""

    def __init__(self, store: Store, path: str, warn: Warn = warn_on_stderr) -> None:
        self._store = store
        self._path = path
        self._warn = warn
        self._log: LineLog | None = None
        self._waiting: dict[tuple[int, int], dict[str, Any]] = {}
        """Lines whose log does not exist yet: the store refuses it."""
        self._outage = Outage(warn)
        self._last = (-1, -1)

    def step(self, step: GlobalStep) -> None:
        """One line; the first one of an attempt also drops what an earlier one wrote of this step and later ones."""
        place = (step.epoch, step.step)
        if place <= self._last:
            # The training has lost a rank and resumes from its last checkpoint.
            self._waiting = {each: line for each, line in self._waiting.items() if each < place}
            if self._log is not None:
                self._log.close()
                self._log = None
        self._last = place
        ids = list(step.sample_ids)
        self._waiting[place] = {"epoch": step.epoch, "step": step.step, "loss_hex": step.loss_hex, "sample_ids": ids}
        if self._outage.may_call():
            self._write(f"{self._path} cannot be written; it will be retried")

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        # A resume from that checkpoint does not repeat these steps.
        if name == BEFORE_CHECKPOINT and self._log is not None:
            self._log.flush()

    def close(self) -> None:
        if self._waiting:
            self._outage.forget()
            self._write(f"{self._path} misses all steps of this attempt")
        if self._log is not None:
            self._log.close()

    def _write(self, if_refused: str) -> None:
        if self._log is None:
            with self._outage.reported(if_refused):
                self._log = self._begin(next(iter(self._waiting)))
        if self._log is not None:
            for line in self._waiting.values():
                self._log.append(line)
            self._waiting = {}

    def _begin(self, place: tuple[int, int]) -> LineLog:
        """The log with the steps before `place` alone. Raises StorageError."""
        kept = [line for line in read_lines(self._store, self._path) if _position(line) < place]
        replace_lines(self._store, self._path, kept)
        return LineLog(self._store, self._path, warn=self._warn)


class RunLog:
    """The `TrainObserver` of a stage: all goes to the sinks; events, named `train.*`, and a step about once a second
    are passed to the stage's observer, with the sums of all steps so far, which come once more at the end.
    """

    def __init__(self, observer: Observer, sinks: Sequence[Sink] = ()) -> None:
        self._observer = observer
        self._sinks = tuple(sinks)
        self._next_progress = 0.0
        self._num_steps = 0
        self._seconds = dict.fromkeys(STEP_SECONDS, 0.0)

    def add(self, *sinks: Sink) -> None:
        """Add sinks, which receive everything from now on."""
        self._sinks += sinks

    def step(self, step: GlobalStep) -> None:
        for sink in self._sinks:
            sink.step(step)
        self._num_steps += 1
        for part in STEP_SECONDS:
            self._seconds[part] += sum(each.seconds.get(part, 0.0) for each in step.reports) / len(step.reports)
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_SECONDS
            loss = float.fromhex(step.loss_hex)
            fields = {"epoch": step.epoch, "step": step.step, "num_steps": step.num_steps, "loss": loss}
            self._observer.event("train.progress", {**fields, **self._sums})

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        for sink in self._sinks:
            sink.event(name, fields)
        # What ranks print is for the run's file of it alone; that a checkpoint is near is for files to be flushed.
        if name not in (OUTPUT, BEFORE_CHECKPOINT):
            self._observer.event(f"train.{name}", fields)

    def close(self) -> None:
        with ExitStack() as all_of_them:
            # Whatever one of them raises: the others are closed, too.
            for sink in reversed(self._sinks):
                all_of_them.callback(sink.close)
            if self._num_steps:
                self._observer.event("train.steps", {"rank": 0, **self._sums})

    @property
    def _sums(self) -> dict[str, int | float]:
        """Mean seconds of the ranks."""
        seconds = {f"seconds_{part}": round(seconds, 3) for part, seconds in self._seconds.items()}
        return {"steps": self._num_steps, **seconds}


def _position(line: bytes) -> tuple[int, int]:
    value: dict[str, Any] = json.loads(line)
    return (value["epoch"], value["step"])


class RanksLog:
    """A sink of `RunLog`. All attempts of a run add to one file; it is there once a rank has printed."""

    def __init__(self, store: Store, path: str, warn: Warn = warn_on_stderr) -> None:
        self._store = store
        self._path = path
        self._warn = warn
        self._outage = Outage(warn)
        self._file: GrowingFile | None = None

    def step(self, step: GlobalStep) -> None:
        return

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == OUTPUT:
            if self._file is None and self._outage.may_call():
                with self._outage.reported(f"{self._path} cannot be written"):
                    self._file = open_lines(self._store, self._path, warn=self._warn)
            if self._file is not None:
                lines = redacted_text(str(fields["text"])).splitlines()
                self._file.append("".join(f"rank {fields['rank']}: {line}\n" for line in lines).encode())
        elif name == BEFORE_CHECKPOINT and self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
