"""What a run keeps of its training: `steps.jsonl`, one line for each global step, and the events beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from shardmill.jobs.line_log import LineLog, read_lines
from shardmill.jobs.observer import FieldValue, Observer
from shardmill.storage import Store
from train.observer import GlobalStep

PROGRESS_SECONDS = 1.0


class StepsLog:
    """Every step once and in order, however often the training was killed and went on in the same run."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self._log: LineLog | None = None

    def append(self, step: GlobalStep) -> None:
        """One line; the first one also drops what an earlier attempt wrote of this step and later ones."""
        if self._log is None:
            kept = [line for line in read_lines(self._store, self._path) if _position(line) < (step.epoch, step.step)]
            self._store.put(self._path, b"".join(kept))
            self._log = LineLog(self._store, self._path)
        self._log.append(
            {"epoch": step.epoch, "step": step.step, "loss_hex": step.loss_hex, "sample_ids": list(step.sample_ids)}
        )

    def close(self) -> None:
        """Nothing is left to write after this."""
        if self._log is not None:
            self._log.close()


class RunLog:
    """The `TrainObserver` of a stage: passes events on, named `train.*`, and a step about once a second."""

    def __init__(self, observer: Observer, steps: StepsLog | None = None) -> None:
        self._observer = observer
        self._steps = steps
        self._next_progress = 0.0

    def step(self, step: GlobalStep) -> None:
        if self._steps is not None:
            self._steps.append(step)
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_SECONDS
            loss = float.fromhex(step.loss_hex)
            fields = {"epoch": step.epoch, "step": step.step, "num_steps": step.num_steps, "loss": loss}
            self._observer.event("train.progress", fields)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._observer.event(f"train.{name}", fields)

    def close(self) -> None:
        """Nothing comes after this."""
        if self._steps is not None:
            self._steps.close()


def _position(line: bytes) -> tuple[int, int]:
    value: dict[str, Any] = json.loads(line)
    return (value["epoch"], value["step"])
