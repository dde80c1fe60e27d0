"""One stage as a process of its own, under `spark-submit`: its record, its one line of error, its exit code."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing

from shardmill.errors import ShardmillError, TrainingError
from shardmill.jobs.events import (
    LineLog,
    StageRecord,
    exit_code_of,
    failed_stage,
    new_run_id,
    redacted_record,
    run_folder,
    write_stage_record,
)
from shardmill.jobs.observer import FieldValue, Observer
from shardmill.jobs.redact import redacted, redacted_text
from shardmill.jobs.scratch import private_temporary_folder
from shardmill.jobs.signals import Terminated, raise_on_signals, why_ended
from shardmill.jobs.spark_jvm import spark_log
from shardmill.printable import printable
from shardmill.registry import install_hint
from shardmill.stores import open_store

_LINE_EVERY_SECONDS = 5.0
_CONTINUE = "run the same command again: it continues where it stopped"


def run_stage_process(
    stage: str,
    work: Callable[[str, Observer], StageRecord],
    workdir: str,
    run_id: str = "",
    *,
    is_last: bool = True,
    debug: bool = False,
) -> int:
    """Run `work(run_id, observer)`, write its record (also of a failure), print it as JSON; returns the exit code.

    `is_last` says that this process has no further stage, so that the run may be called `ok`.
    """
    raise_on_signals()
    run_id = run_id or new_run_id()
    started = time.monotonic()
    try:
        log = spark_log(open_store(workdir), f"{run_folder(run_id)}/spark.log")
        with private_temporary_folder(), log, closing(_FileObserver(workdir, run_id)) as observer:
            record = work(run_id, observer)
    except (Exception, KeyboardInterrupt, Terminated) as error:  # the outermost frame: every end gets its line and code
        record = failed_stage(stage, error, time.monotonic() - started)
        tell_error(error, debug=debug)
    try:
        write_stage_record(workdir, run_id, stage, record, is_last=is_last)
    except ShardmillError as error:
        return record.exit_code or tell_error(error, debug=debug)
    sys.stdout.write(
        json.dumps({"run_id": run_id, **redacted_record(record).model_dump(mode="json", exclude={"detail"})}) + "\n"
    )
    return record.exit_code


def tell_error(error: BaseException, *, debug: bool) -> int:
    """Say on stderr why this process ends, `ERROR <code>: ...` as the last line; returns the exit code."""
    error = why_ended(error)
    if debug:
        sys.stderr.write(redacted_text("".join(traceback.format_exception(error))))
    # What a failed rank said last is part of the story; a refusal says all in its line.
    elif isinstance(error, TrainingError):
        for note in getattr(error, "__notes__", ()):
            sys.stderr.write(f"{redacted_text(note)}\n")
    return tell_line(exit_code_of(error), error_line(error))


def error_line(error: BaseException) -> str:
    """Why a command ends, in one line for people."""
    error = why_ended(error)
    if isinstance(error, KeyboardInterrupt):
        line = f"interrupted; nothing half-done is visible; {_CONTINUE}"
    elif isinstance(error, Terminated):
        line = f"terminated by SIGTERM; nothing half-done is visible; {_CONTINUE}"
    elif isinstance(error, ShardmillError):
        line = str(error)
    elif isinstance(error, ImportError):
        line = f"{error}; a package of an extra may be missing; {install_hint('all')}"
    else:
        line = f"{type(error).__name__}: {error}; unexpected error; --debug shows where"
    return redacted_text(printable(" ".join(line.split())))


def tell_line(code: int, line: str) -> int:
    """Write one `ERROR` line, plainly: a console library would wrap it, and scripts read it. Returns the code."""
    sys.stderr.write(f"ERROR {code}: {printable(' '.join(redacted_text(line).split()))}\n")
    return code


class _FileObserver:
    """Events to `events.jsonl`; now and then one as a line on stderr, for the scheduler's log."""

    def __init__(self, workdir: str, run_id: str) -> None:
        self._log = LineLog(open_store(workdir), f"{run_folder(run_id)}/events.jsonl")
        self._next_line = 0.0

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        fields = redacted(dict(fields))
        self._log.append({"time": time.time(), "event": name, **fields})
        if not name.endswith(("progress", "step")) or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_SECONDS
            sys.stderr.write(printable(" ".join([name, *(f"{key}={value}" for key, value in fields.items())])) + "\n")

    def close(self) -> None:
        self._log.close()
