"""One run's record while it is made: every stage leaves its outcome, good or bad, before anything else happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from shardmill.jobs.events import (
    LineLog,
    StageRecord,
    failed_stage,
    new_run_id,
    redacted_record,
    run_folder,
    with_warnings,
    write_stage_record,
    write_summary,
)
from shardmill.jobs.observer import FieldValue
from shardmill.jobs.redact import redacted
from shardmill.storage import join_uri
from shardmill.stores import open_store


class RunRecord:
    """`<workdir>/runs/<run_id>/`: `summary.json`, `events.jsonl`, `config.toml`, and one file for each stage."""

    def __init__(self, workdir: str, run_id: str = "", *, is_single_stage: bool = True) -> None:
        self.workdir = workdir
        self.run_id = run_id or new_run_id()
        self.store = open_store(workdir)
        self.folder = run_folder(self.run_id)
        self.uri = join_uri(self.store.uri, self.folder)
        self._is_single_stage = is_single_stage
        self._events = LineLog(self.store, f"{self.folder}/events.jsonl")
        self._warnings: list[str] = []
        self._failed: StageRecord | None = None

    def open(self, config_toml: str) -> None:
        """The run goes on from here: keep its config, and say so in the summary."""
        self.store.put(f"{self.folder}/config.toml", config_toml.encode())
        write_summary(self.workdir, self.run_id, None)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """One line of `events.jsonl`."""
        self._events.append({"time": round(time.time(), 3), "event": name, **redacted(dict(fields))})

    def warn(self, message: str) -> None:
        """Keep a warning of the stage that is under way, for the summary and the report."""
        self._warnings.append(message)

    def stage(self, name: str, work: Callable[[], StageRecord]) -> StageRecord:
        """Do one stage and record how it ended; its error is raised on."""
        self.event("stage.started", {"stage": name})
        started = time.monotonic()
        try:
            record = work()
        except BaseException as error:  # recorded and raised on: also Ctrl-C and SIGTERM belong into the summary
            self._end(failed_stage(name, error, time.monotonic() - started))
            raise
        record = redacted_record(record.model_copy(update={"seconds": time.monotonic() - started}))
        self._end(record)
        return record

    def close(self, error: BaseException | None = None) -> dict[str, Any]:
        """The last word: the summary as it stays. A stage that has failed without raising fails the run, too."""
        end = failed_stage("run", error) if error is not None else self._failed or StageRecord(stage="run")
        summary = write_summary(self.workdir, self.run_id, end.exit_code, end.error)
        self.event("run.ended", {"exit_code": end.exit_code})
        self._events.close()
        return summary

    def report_failure(self, error: Exception, say: Callable[[str], None]) -> None:
        """Write the report of a run that ends with `error`, as far as it came, and say where it is."""
        from pipeline.report import write_report

        end = failed_stage("run", error)
        try:
            path = write_report(
                self.workdir, self.run_id, write_summary(self.workdir, self.run_id, end.exit_code, end.error)
            )
            record = StageRecord(stage="report", sections={"report": {"path": path}})
            write_stage_record(self.workdir, self.run_id, "report", record, is_last=False)
        except Exception as problem:  # the run's own error is the one that counts
            self.event("report.warning", {"message": f"no report could be written: {problem}"})
        else:
            say(f"report: {path}")

    def _end(self, record: StageRecord) -> None:
        record = with_warnings(record, self._warnings)
        self._warnings = []
        self._failed = record if record.status == "failed" else self._failed
        write_stage_record(self.workdir, self.run_id, record.stage, record, is_last=self._is_single_stage)
        fields = {"stage": record.stage, "status": record.status, "seconds": round(record.seconds, 3)}
        self.event("stage.ended", fields)
