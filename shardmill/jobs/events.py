"""What a run leaves to be read later: structured events, and one small record for each stage that it went through.

A stage may run in a process of its own (`spark-submit etl/job.py`, an Airflow task). Each leaves
`<workdir>/runs/<run_id>/<stage>.json`; `summary.json` is what those records say together, so that a scheduler can
tell why a stage failed without trusting an exit code that Spark may have replaced.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardmill.errors import IntegrityError, ShardmillError, UsageError
from shardmill.jobs.redact import redacted, redacted_text
from shardmill.jobs.signals import why_ended
from shardmill.sealed import seal, unseal
from shardmill.storage import Store, as_storage_error, check_relative_path, join_uri
from shardmill.stores import open_store

STAGES = ("etl", "verify", "train", "export", "evaluate", "gate", "promote", "report")
"""In the order of the story; `summary.json` takes a section from the last stage that decided it."""

SUMMARY_SECTIONS = ("dataset", "etl", "train", "evaluation", "export", "promotion")


class StageRecord(BaseModel):
    """How one stage of one run ended, and what it adds to the summary."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    stage: str
    """One of STAGES."""
    status: Literal["done", "skipped", "failed"] = "done"
    """`skipped`: its result existed already for the same inputs."""
    exit_code: int = 0
    """The command line's exit code; 0 unless failed."""
    error: str = ""
    """The one line that a person was shown; empty unless failed."""
    seconds: float = 0.0
    """Wall time of the stage."""
    sections: dict[str, Any] = Field(default_factory=dict)
    """Sections of `summary.json` that this stage decides, by name: `dataset`, `etl`, `train`, ..."""
    detail: dict[str, Any] = Field(default_factory=dict)
    """More than the summary holds: curves, the confusion matrix; read by the report."""


def new_run_id() -> str:
    """A name that no other run has: the time in UTC, and a random suffix. Sorts by start."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def run_folder(run_id: str) -> str:
    """Where a run's record is, relative to the work directory. Raises UsageError for a name that is a path."""
    check_relative_path(run_id)
    if "/" in run_id or run_id.startswith("."):
        raise UsageError(f"run id {run_id!r}", "expected a plain name without '/' or a leading dot")
    return f"runs/{run_id}"


def write_stage_record(
    workdir: str | Path, run_id: str, stage: str, record: StageRecord, *, is_last: bool = True
) -> None:
    """Leave `<workdir>/runs/<run_id>/<stage>.json`, in place of an earlier attempt's, and renew `summary.json`.

    `is_last` says that nothing follows in this process: a run that goes on, or is killed, is not summed up as `ok`.
    """
    body = seal(redacted_record(record).model_dump_json(indent=2).encode())
    open_store(workdir).put(f"{run_folder(run_id)}/{stage}.json", body)
    ended = is_last or record.status == "failed"
    write_summary(workdir, run_id, record.exit_code if ended else None, record.error)


def write_summary(workdir: str | Path, run_id: str, exit_code: int | None, error: str = "") -> dict[str, Any]:
    """Merge all stage records into `summary.json` and return it; `exit_code` None means that the run still goes on.

    Every key of SUMMARY_SECTIONS is there, null where no stage has decided it.
    """
    # The way a run ends must be told even if an earlier stage's record was damaged since.
    records = read_stage_records(workdir, run_id, whole_only=True)
    summary: dict[str, Any] = {
        "run_id": run_id,
        "status": "running" if exit_code is None else "failed" if exit_code else "ok",
        "exit_code": exit_code,
        "error": redacted_text(error) or None,
        "stages": {record.stage: {"status": record.status, "seconds": record.seconds} for record in records},
        **dict.fromkeys(SUMMARY_SECTIONS),
    }
    for record in records:
        for name, section in record.sections.items():
            if section is not None:
                summary[name] = {**(summary.get(name) or {}), **section}
    body = json.dumps(summary, indent=2).encode() + b"\n"
    open_store(workdir).put(f"{run_folder(run_id)}/summary.json", body)
    return summary


def latest_run(workdir: str | Path) -> str:
    """The run below `workdir` that told something last. Raises UsageError if there is none."""
    found = [file for file in open_store(workdir).list("runs") if file.path.endswith("/events.jsonl")]
    if not found:
        raise UsageError(f"no run below {workdir}", "expected one that left its record there", "check --workdir")
    return max(found, key=lambda file: (file.mtime_ns, file.path)).path.split("/")[1]


def how_run_ended(workdir: str | Path, run_id: str) -> tuple[int | None, str]:
    """A run's exit code (None while it goes on) and line of error, as its summary says, or else its stages.

    Raises UsageError where there is no such run.
    """
    records = read_stage_records(workdir, run_id)
    try:
        summary = json.loads(open_store(workdir).read(f"{run_folder(run_id)}/summary.json"))
        return summary["exit_code"], summary["error"] or ""
    except FileNotFoundError:
        if not records:
            raise UsageError(
                f"no run {run_id!r} below {workdir}", "expected one that left its record there", "check --run-id"
            ) from None
    except (ValueError, KeyError, TypeError):
        # A damaged summary says nothing that the stages do not say.
        pass
    failed = next((record for record in records if record.status == "failed"), None)
    return (failed.exit_code, failed.error) if failed else (0, "")


def read_stage_records(workdir: str | Path, run_id: str, *, whole_only: bool = False) -> tuple[StageRecord, ...]:
    """The records that a run has so far, in the order of the story.

    Raises IntegrityError for a damaged one, or leaves it out with `whole_only`.
    """
    found: list[StageRecord | None] = []
    for stage in STAGES:
        try:
            found.append(read_stage_record(workdir, run_id, stage))
        except IntegrityError:
            if not whole_only:
                raise
    return tuple(record for record in found if record is not None)


def redacted_record(record: StageRecord) -> StageRecord:
    """The record as it may be written or printed: without secrets."""
    return record.model_copy(update=redacted(record.model_dump(include={"error", "sections", "detail"})))


def failed_stage(stage: str, error: BaseException, seconds: float = 0.0) -> StageRecord:
    """The record of a stage that ended with `error`, or because this process was asked to end."""
    error = why_ended(error)
    line = f"{type(error).__name__}: {error}"
    if isinstance(error, ShardmillError) or hasattr(error, "exit_code"):
        line = str(error)
    elif isinstance(error, KeyboardInterrupt):
        line = "interrupted by Ctrl-C"
    return StageRecord(stage=stage, status="failed", exit_code=exit_code_of(error), error=line, seconds=seconds)


def with_warnings(record: StageRecord, messages: Sequence[str]) -> StageRecord:
    """The record, and in its section `warnings` what the stage warned of."""
    if not messages:
        return record
    return record.model_copy(update={"sections": {**record.sections, "warnings": {record.stage: list(messages)}}})


def exit_code_of(error: BaseException) -> int:
    """What the command line exits with: the error's own code, 130 for Ctrl-C, 1 for an unexpected error."""
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


def read_stage_record(workdir: str | Path, run_id: str, stage: str) -> StageRecord | None:
    """What `write_stage_record` left, or None. Raises IntegrityError if it was altered."""
    path = f"{run_folder(run_id)}/{stage}.json"
    try:
        data = open_store(workdir).read(path)
    except FileNotFoundError:
        return None
    where, again = join_uri(workdir, path), "delete it: its stage then runs again, or finds its result"
    try:
        return StageRecord.model_validate_json(unseal(data, where))
    except IntegrityError as error:
        raise IntegrityError(error.what, error.expected, again) from None
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise IntegrityError(f"{where} is not a stage record: {message}", "", again) from None


class LineLog:
    """A growing file of JSON lines. Local: each line is there at once. Elsewhere: the object is rewritten now and then.

    A store has no append; rewriting costs time that grows with the file, so its rate is held to a share of it.
    """

    REWRITE_SHARE = 0.05

    def __init__(self, store: Store, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._path = check_relative_path(path)
        self._clock = clock
        self._next_rewrite = 0.0
        self._file: IO[bytes] | None = None
        self._lines: list[bytes] = []
        if store.local_root is not None:
            target = store.local_root / path
            with as_storage_error(target):
                self._file = _open_to_append(target)
        else:
            self._lines = read_lines(store, path)

    def append(self, value: Mapping[str, Any]) -> None:
        """Add one line."""
        line = json.dumps(value).encode() + b"\n"
        if self._file is not None:
            with as_storage_error(self._path, len(line)):
                self._file.write(line)
            return
        self._lines.append(line)
        if self._clock() >= self._next_rewrite:
            self._rewrite()

    def close(self) -> None:
        """Nothing is left to write after this."""
        if self._file is not None:
            self._file.close()
        elif self._lines:
            self._rewrite()

    def _rewrite(self) -> None:
        started = self._clock()
        self._store.put(self._path, b"".join(self._lines))
        ended = self._clock()
        self._next_rewrite = ended + max(1.0, (ended - started) / self.REWRITE_SHARE)


def _open_to_append(target: Path) -> IO[bytes]:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered and in append mode: a line is whole for every reader, whatever then happens to this process.
    return open(target, "ab", buffering=0)


def read_lines(store: Store, path: str) -> list[bytes]:
    """The whole lines of a line log, each with its end; a last line that a kill cut short is left out."""
    try:
        data = store.read(path)
    except FileNotFoundError:
        return []
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
