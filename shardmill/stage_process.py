"""One stage as a process of its own, under `spark-submit`: its record, its one line of error, its exit code."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType

from shardmill.errors import ShardmillError
from shardmill.events import (
    FieldValue,
    LineLog,
    Observer,
    StageRecord,
    exit_code_of,
    failed_stage,
    new_run_id,
    run_folder,
    write_stage_record,
)
from shardmill.storage import open_store

_LINE_EVERY_SECONDS = 5.0


class Terminated(BaseException):
    """SIGTERM: a scheduler wants this process to end."""

    exit_code = 143

    def __init__(self) -> None:
        super().__init__("terminated by SIGTERM")


def raise_on_sigterm() -> None:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that nothing is left half-done."""

    def terminate(signal_number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminate)


def run_stage_process(
    stage: str, work: Callable[[str, Observer], StageRecord], workdir: str, run_id: str = "", *, debug: bool = False
) -> int:
    """Run `work(run_id, observer)`, write its record (also of a failure), print it as JSON; returns the exit code."""
    raise_on_sigterm()
    run_id = run_id or new_run_id()
    started = time.monotonic()
    try:
        with_events = _FileObserver(workdir, run_id)
        record = work(run_id, with_events)
    except (Exception, KeyboardInterrupt, Terminated) as error:  # the outermost frame: every end gets its line and code
        record = failed_stage(stage, error, time.monotonic() - started)
        if debug:
            traceback.print_exc()
        elif not isinstance(error, ShardmillError):
            record = record.model_copy(update={"error": f"{record.error} (--debug shows where)"})
        sys.stderr.write(f"ERROR {exit_code_of(error)}: {record.error}\n")
    try:
        write_stage_record(workdir, run_id, stage, record)
    except ShardmillError as error:
        sys.stderr.write(f"ERROR {error.exit_code}: the run record was not written: {error}\n")
        return record.exit_code or error.exit_code
    sys.stdout.write(json.dumps({"run_id": run_id, **record.model_dump(mode="json", exclude={"detail"})}) + "\n")
    return record.exit_code


class _FileObserver:
    """Events to `events.jsonl`; now and then one as a line on stderr, for the scheduler's log."""

    def __init__(self, workdir: str, run_id: str) -> None:
        self._log = LineLog(open_store(workdir), f"{run_folder(run_id)}/events.jsonl")
        self._next_line = 0.0

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._log.append({"time": time.time(), "event": name, **fields})
        if not name.endswith(("progress", "step")) or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_SECONDS
            sys.stderr.write(" ".join([name, *(f"{key}={value}" for key, value in fields.items())]) + "\n")
