"""The scalars of a run for TensorBoard: losses and times of every step, figures of every epoch.

Written in the driver, where no framework is imported: TensorBoard's own messages (tensorboard/compat/proto/event.proto)
in the frames of a TFRecord file.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from shardmill.formats.tfrecord import frame
from shardmill.jobs.line_log import GrowingFile, Outage, Warn, warn_on_stderr
from shardmill.jobs.observer import FieldValue
from shardmill.storage import Store
from train.observer import GlobalStep
from train.scalars import Scalars, of_event, of_step


def is_installed() -> bool:
    """Whether the package is there: it comes with TensorFlow."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardLog:
    """A sink of `train.run_log.RunLog`. Every attempt of a run has a file of its own in the run's folder."""

    def __init__(self, store: Store, folder: str, warn: Warn = warn_on_stderr) -> None:
        self._store = store
        self._folder = folder
        self._warn = warn
        self._num_files = 0
        self._outage = Outage(warn)
        self._file: GrowingFile | None = None

    def step(self, step: GlobalStep) -> None:
        scalars = of_step(step)
        if self._file is None:
            self._open(scalars.at)
        self._write(scalars)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "restarted":
            # What follows repeats the steps since the last checkpoint.
            self.close()
            self._file = None
        elif scalars := of_event(name, fields):
            self._write(scalars)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, global_step: int) -> None:
        attempt = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{self._num_files}"
        path = f"{self._folder}/events.out.tfevents.{attempt}"
        with self._outage.told(f"{path} lacks the scalars until it can be made"):
            self._file = GrowingFile(self._store, path, warn=self._warn)
        if self._file is None:
            return
        self._num_files += 1
        log = _messages("event").SessionLog
        self._append(file_version="brain.Event:2")
        # TensorBoard drops what an earlier attempt wrote of this step and later ones.
        self._append(step=global_step, session_log=log(status=log.START))

    def _write(self, scalars: Scalars) -> None:
        summary = _messages("summary").Summary
        values = [summary.Value(tag=tag, simple_value=value) for tag, value in scalars.values.items()]
        self._append(step=scalars.at, summary=summary(value=values))

    def _append(self, **fields: Any) -> None:
        if self._file is not None:
            event = _messages("event").Event(wall_time=time.time(), **fields)
            self._file.append(frame(event.SerializeToString()))


def _messages(name: str) -> Any:
    """A module of message classes, which exist only when it runs."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}_pb2")
