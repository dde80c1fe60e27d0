"""Writes a run's `ranks.log`: the output of all rank processes on all hosts, each line with its rank."""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.jobs.line_log import GrowingFile, Outage, Warn, open_lines, warn_on_stderr
from shardmill.jobs.observer import FieldValue
from shardmill.jobs.redact import redacted_text
from shardmill.storage import Store
from train.contracts.values import BEFORE_CHECKPOINT, OUTPUT
from train.reporting.observer import GlobalStep


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
