"""Writes the scalars of a run for TensorBoard: losses and times of every step, metrics of every epoch.

Written in the driver, where no framework is imported and TensorBoard need not be installed: its messages
(tensorboard/compat/proto/event.proto, summary.proto) in the frames of a TFRecord file.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from shardmill.formats.tf_example import bytes_field, double_field, float_field, integer_field
from shardmill.formats.tfrecord import frame
from shardmill.jobs.line_log import GrowingFile, Outage
from shardmill.jobs.observer import FieldValue
from train.reporting.observer import GlobalStep, Scalars, of_event, of_step
from train.reporting.trackers.tracker import TrackedRun

# Fields of Event, of SessionLog (whose status 1 is a start), of Summary and of its values.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7
_STATUS, _START = 1, 1
_VALUE = 1
_TAG, _SIMPLE_VALUE = 1, 2


class TensorBoardTracker:
    """Every attempt at a run has a file of its own in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        self.run_id = ""
        self._store = run.store
        self._folder = f"{run.folder}/tensorboard"
        self._warn = run.warn
        self._num_files = 0
        self._outage = Outage(run.warn)
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

    def finish(self) -> None:
        return

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, global_step: int) -> None:
        attempt = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{self._num_files}"
        path = f"{self._folder}/events.out.tfevents.{attempt}"
        with self._outage.reported(f"{path} cannot be created yet; scalars are not written until then"):
            self._file = GrowingFile(self._store, path, warn=self._warn)
        if self._file is None:
            return
        self._num_files += 1
        self._append(bytes_field(_FILE_VERSION, b"brain.Event:2"))
        # TensorBoard drops what an earlier attempt wrote of this step and later ones.
        start = bytes_field(_SESSION_LOG, integer_field(_STATUS, _START))
        self._append(integer_field(_STEP, global_step) + start)

    def _write(self, scalars: Scalars) -> None:
        values = [
            bytes_field(_VALUE, bytes_field(_TAG, tag.encode()) + float_field(_SIMPLE_VALUE, value))
            for tag, value in scalars.values.items()
        ]
        self._append(integer_field(_STEP, scalars.at) + bytes_field(_SUMMARY, b"".join(values)))

    def _append(self, fields: bytes) -> None:
        if self._file is not None:
            self._file.append(frame(double_field(_WALL_TIME, time.time()) + fields))
