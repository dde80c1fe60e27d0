"""Runs a stage, records how it ended, and passes its value to the next stage.

`pipeline/run.py`, `etl/job.py` and `train/job.py` all run their stages through it; the two jobs, entries of
`spark-submit`, run as a process by `run_job`, with their arguments, their record and their exit.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from shardmill.dataset.leases import alone
from shardmill.dataset.versions import split_version
from shardmill.errors import CommitConflict, IntegrityError, ShardmillError
from shardmill.jobs.config import is_under_spark_submit
from shardmill.jobs.json_log import log_as_json, name_run, start_json_log
from shardmill.jobs.line_log import LineLog, spark_log
from shardmill.jobs.metric_exports import ExportedMetrics
from shardmill.jobs.observer import RETRIED, WARNING, FieldValue, Observer, is_progress
from shardmill.jobs.process import (
    Terminated,
    end_with_parent,
    end_with_script,
    log_to_stderr,
    private_temporary_folder,
    raise_on_signals,
    report_error,
    start_in_utf8,
)
from shardmill.jobs.redact import redacted, warn_on_stderr
from shardmill.jobs.run_files import (
    DEFAULT_WORKDIR,
    EVENTS,
    RUNNING,
    RunState,
    StageRecord,
    failed_stage,
    new_run_id,
    read_stage_record,
    read_stage_records,
    redacted_record,
    run_folder,
    state_after,
    write_stage_record,
    write_summary,
)
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from shardmill.stores.retries import num_retried
from shardmill.words import printable

Value = TypeVar("Value")
_RUN_LEASE_SECONDS = 30.0


class RunRecord:
    """`<workdir>/runs/<run_id>/` while a process adds to it. An Observer: its events are lines of `events.jsonl`."""

    def __init__(
        self,
        workdir: str,
        run_id: str = "",
        *,
        command: str = "",
        sections: Sequence[str] = (),
        whole: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`command`: which one runs. `sections`: those that the summary always has. `whole`: the stages after which a
        run is `ok`. `clock`: of the seconds that stages take.

        An application that does only a part of the pipeline names no stages: its runs end as `partial`.
        """
        self.workdir = workdir
        self.run_id = run_id or new_run_id()
        self.store = open_store(workdir)
        self.folder = run_folder(self.run_id)
        self.uri = join_uri(self.store.uri, self.folder)
        self.ended: list[StageRecord] = []
        """The stages that this process has run, in order."""
        self.summary: dict[str, Any] = {}
        """The summary as last written."""
        self._has_lost = False
        self._command = command
        self._sections = tuple(sections)
        self._whole = whole
        self._warnings: list[str] = []
        self._clock = clock
        self._aside_seconds = 0.0
        self._retried_before, self._retried_elsewhere = num_retried(), 0
        self._events = LineLog(self.store, f"{self.folder}/{EVENTS}", warn=self._warn)
        self._metrics = ExportedMetrics(self.run_id, self._warn)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """Append one line to `events.jsonl`, unless it is progress; a warning is also kept for the stage's record."""
        now = round(time.time(), 3)
        self._metrics.event(name, {"time": now, **fields})
        if is_progress(name):
            return
        self._events.append({"time": now, "event": name, **redacted(dict(fields))})
        self._events.flush()
        if WARNING in fields:
            self._warnings.append(str(fields[WARNING]))
        self._retried_elsewhere += int(fields.get(RETRIED) or 0)

    def name_dataset(self, uri: str) -> None:
        """What the metrics are of, also if the run ends before a stage has begun; nothing if `uri` is empty."""
        if uri := split_version(uri)[0]:
            # A store that cannot be opened is what the run will end with.
            with suppress(ShardmillError):
                uri = open_store(uri).uri
            self._metrics.name_dataset(uri)

    def stage(self, name: str, work: Callable[[], Value], record_of: Callable[[Value], StageRecord]) -> Value:
        """Do one stage, write its record, and return the value of `work`; an error is recorded and raised on.

        `record_of` says what the value adds to the summary; a record of status `failed` fails the run without raising.
        """
        self._tell("stage.started", {"stage": name})
        started, began = time.time(), self._clock()
        self._aside_seconds = 0.0
        self._retried_before, self._retried_elsewhere = num_retried(), 0
        try:
            value = work()
            record = record_of(value)
        except BaseException as error:  # also Ctrl-C and SIGTERM belong into the record
            # If the record cannot be written either, the stage's own error is still the one to report.
            with suppress(ShardmillError):
                self._end(failed_stage(name, error), started, self._clock() - began)
            raise
        self._end(record, started, self._clock() - began)
        return value

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time of the block from the seconds of the stage that calls it."""
        began = self._clock()
        try:
            yield
        finally:
            self._aside_seconds += self._clock() - began

    def summarize(self, state: RunState) -> dict[str, Any]:
        """Write `summary.json` from the stage records so far, and return it."""
        self.summary = write_summary(self.workdir, self.run_id, state, self._sections)
        return self.summary

    def close(self, error: BaseException | None = None) -> dict[str, Any]:
        """Write the summary that stays. A stage that failed without raising fails the run, too."""
        failed = failed_stage("run", error) if error is not None else self._failed()
        state = RunState("failed", failed.exit_code, failed.error) if failed else self.state_so_far()
        try:
            if not self._has_lost:
                self.summarize(state)
        except ShardmillError as refused:
            state = state if failed else RunState("failed", refused.exit_code)
            raise
        finally:
            fields = {"command": self._command, "status": state.status, "exit_code": state.exit_code}
            self._tell("run.ended", fields)
            self._metrics.close()
            self._events.close()
        return self.summary

    def state_so_far(self) -> RunState:
        """`ok` if every stage of the pipeline has ended well, in this process or an earlier one of the same run."""
        return state_after(read_stage_records(self.workdir, self.run_id, skip_damaged=True), self._whole)

    def _tell(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """An event of the record's own: no observer of the stages passes it on to the log."""
        self.event(name, fields)
        log_as_json(name, fields)

    def _warn(self, sentence: str) -> None:
        """Warn about problems that `events.jsonl` itself cannot record."""
        warn_on_stderr(sentence)
        self._warnings.append(sentence)

    def _is_done_by_newer(self, record: StageRecord) -> bool:
        """Whether an attempt at the same run that began later, which a scheduler started beside this one, has won."""
        try:
            found = read_stage_record(self.workdir, self.run_id, record.stage)
        except IntegrityError:  # damaged: it says nothing
            return False
        return found is not None and found.status != "failed" and found.started > record.started

    def _failed(self) -> StageRecord | None:
        return next((record for record in reversed(self.ended) if record.status == "failed"), None)

    def _end(self, record: StageRecord, started: float, seconds: float) -> None:
        sections = record.sections
        if self._warnings:
            sections = {**sections, "warnings": {record.stage: self._warnings}}
            self._warnings = []
        retried = num_retried() - self._retried_before + self._retried_elsewhere
        seconds -= self._aside_seconds
        update = {"started": started, "seconds": seconds, "retried_requests": retried, "sections": sections}
        record = redacted_record(record.model_copy(update=update))
        self.ended.append(record)
        self._has_lost = record.status == "failed" and self._is_done_by_newer(record)
        if not self._has_lost:
            write_stage_record(self.workdir, self.run_id, record)
            # A run that is killed between two stages must not be taken for one that ended.
            failed = self._failed()
            self.summarize(RunState("failed", failed.exit_code, failed.error) if failed else RUNNING)
        fields = {"stage": record.stage, "status": record.status, "seconds": round(record.seconds, 3)}
        self._tell("stage.ended", {**fields, "retries": retried})


@contextmanager
def recording(record: RunRecord) -> Iterator[RunRecord]:
    """Close the record with the outcome of the work inside; a JVM that is started there logs beside the record."""
    name_run(record.run_id)
    with alone_in_run(record.store, record.run_id):
        try:
            with spark_log(record.store, f"{record.folder}/spark.log"):
                yield record
        except BaseException as error:  # recorded and raised on: also Ctrl-C and SIGTERM belong into the summary
            with suppress(ShardmillError):
                record.close(error)
            raise
        record.close()


@contextmanager
def alone_in_run(store: Store, run_id: str) -> Iterator[None]:
    """Raises CommitConflict (exit 6) if another process adds to the same run: events of both would be mixed, and the
    summary would be that of the last one.

    A local lock ends with its process. Elsewhere a lease does, of `_RUN_LEASE_SECONDS`.
    """
    if store.local_root is None:
        place = open_store(join_uri(store.uri, f"running/{run_id}"))
        with alone(place, f"run {run_id}", ttl_seconds=_RUN_LEASE_SECONDS, on_wait=warn_on_stderr):
            yield
        return
    with open(store.local_root / run_folder(run_id) / EVENTS, "rb") as events:
        try:
            fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommitConflict(
                f"run {run_id!r} of {store.uri} is at work in another process",
                "expected one process at a time for a run id; nothing was changed",
                "wait for it, or give another --run-id",
            ) from None
        yield


_LINE_EVERY_SECONDS = 5.0


def job_parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every `spark-submit` entry takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="override the file")
    parser.add_argument("--workdir", default=DEFAULT_WORKDIR, help="folder of the run record")
    parser.add_argument("--run-id", default="", help="name of the run record")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def run_job(
    job: Callable[[RunRecord, Observer], None],
    workdir: str,
    run_id: str,
    *,
    command: str,
    sections: Sequence[str],
    debug: bool,
) -> int:
    """Run the stages of `job(record, observer)`, print each one's record as a line of JSON; returns the exit code.

    `command`: which one the job stands for. `sections`: what it adds to the run's summary. Errors end as one line on
    stderr.
    """
    raise_on_signals()
    if is_under_spark_submit():
        # A driver that trains in its own process would not notice the end of Spark's JVM, and would continue alone.
        end_with_parent()
    else:
        end_with_script()
    log_to_stderr(others=debug)
    record: RunRecord | None = None
    try:
        start_in_utf8()
        start_json_log()
        record = RunRecord(workdir, run_id, command=command, sections=sections)
        with private_temporary_folder(), recording(record):
            job(record, _JobObserver(record))
        code = 0
    except (Exception, KeyboardInterrupt, Terminated) as error:  # the outermost frame: every end gets its line and code
        code = report_error(error, debug=debug)
    if record is not None:
        for stage in record.ended:
            line = {"run_id": record.run_id, **stage.model_dump(mode="json", exclude={"detail", "started"})}
            sys.stdout.write(json.dumps(line) + "\n")
    return code


class _JobObserver:
    """Records events, and writes them as lines on stderr, for the scheduler's log; of progress, a line now and then."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._next_line = 0.0

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._record.event(name, fields)
        if not is_progress(name) or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_SECONDS
            if not log_as_json(name, fields):
                shown = [f"{key}={_quoted(value)}" for key, value in redacted(dict(fields)).items()]
                sys.stderr.write(printable(" ".join([name, *shown])) + "\n")


def _quoted(value: FieldValue) -> str:
    """As logfmt: a value with spaces, quotes or an equals sign is quoted."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or re.search(r"[\s\"=]", text) else text
