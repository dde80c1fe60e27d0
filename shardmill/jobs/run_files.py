"""The files of a run, `<workdir>/runs/<run_id>/`: one record for each stage, and their summary.

A stage may run in a process of its own (`spark-submit etl/job.py`, an Airflow task). Each leaves `<stage>.json`;
`summary.json` is what those records say together, so that a scheduler can find out why a stage failed without trusting
an exit code that Spark may have replaced.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from shardmill.checksummed import check_relative_path, verified_body, with_checksum
from shardmill.errors import IntegrityError, SecurityRefusal, ShardmillError, UsageError
from shardmill.jobs.process import cause_of_end, exit_code_of
from shardmill.jobs.redact import redacted, redacted_text
from shardmill.section import Section
from shardmill.storage import join_uri
from shardmill.stores import open_store
from shardmill.values import DatasetPin
from shardmill.version import __version__

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest


RUNS = "runs"
SUMMARY, EVENTS = "summary.json", "events.jsonl"
# What file systems take as a name.
_MAX_RUN_ID_BYTES = 255


class StageRecord(Section):
    """The outcome of one stage of one run, and its part of the summary."""

    stage: str
    """Names the record's file, and the stage in the summary."""
    status: Literal["done", "skipped", "failed"] = "done"
    """`skipped`: its result existed already for the same inputs."""
    exit_code: int = 0
    """The command line's exit code; 0 unless failed."""
    error: str = ""
    """The one line that was shown to the user; empty unless failed."""
    started: float = 0.0
    """When the stage began, in seconds since 1970; records are read in this order."""
    seconds: float = 0.0
    """Wall time of the stage."""
    retried_requests: int = 0
    """Requests to storage that were sent again; of ranks and tasks that were killed, nothing is known."""
    sections: dict[str, Any] = Field(default_factory=dict)
    """Sections of `summary.json` that this stage decides, by name: `dataset`, `etl`, `train`, ..."""
    detail: dict[str, Any] = Field(default_factory=dict)
    """More than the summary holds: curves, the confusion matrix; read by the report."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of a run, as its summary records it."""

    status: Literal["running", "partial", "ok", "failed"]
    """`partial`: all stages so far ended well, and the pipeline has others."""
    exit_code: int | None
    """Exit code; None while the run continues."""
    error: str = ""


RUNNING = RunState("running", None)
PARTIAL = RunState("partial", 0)


def new_run_id() -> str:
    """A name that no other run has: the time in UTC, and a random suffix. Sorts by start."""
    # 48 bits: of a thousand starts in one second two share them once in 10^9 times.
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(6)}"


def run_folder(run_id: str) -> str:
    """Return the folder of a run below the work directory. Raises UsageError for an id that is not a valid
    folder name.
    """
    try:
        check_relative_path(run_id)
        is_name = not run_id.startswith(".") and "/" not in run_id and len(run_id.encode()) <= _MAX_RUN_ID_BYTES
    except (SecurityRefusal, UnicodeEncodeError):
        is_name = False
    if not is_name:
        raise UsageError(
            f"run id {run_id!r}",
            f"expected a name of at most {_MAX_RUN_ID_BYTES} bytes without '/', backslash, leading dot or tilde",
            "give --run-id a name such as monday-1",
        )
    return f"{RUNS}/{run_id}"


def write_stage_record(workdir: str | Path, run_id: str, record: StageRecord) -> None:
    """Write `<workdir>/runs/<run_id>/<stage>.json`, replacing the record of an earlier attempt."""
    body = with_checksum(redacted_record(record).model_dump_json(indent=2).encode())
    open_store(workdir).put(f"{run_folder(run_id)}/{record.stage}.json", body)


def read_stage_record(workdir: str | Path, run_id: str, stage: str) -> StageRecord | None:
    """The record that `write_stage_record` wrote, or None. Raises IntegrityError if it was altered."""
    path = f"{run_folder(run_id)}/{stage}.json"
    try:
        data = open_store(workdir).read(path)
    except FileNotFoundError:
        return None
    where, again = join_uri(workdir, path), "delete it: its stage then runs again or reuses its result"
    try:
        return StageRecord.model_validate_json(verified_body(data, where, fix=again))
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise IntegrityError(f"{where} is not a stage record: {message}", "", again) from None


def read_stage_records(workdir: str | Path, run_id: str, *, skip_damaged: bool = False) -> tuple[StageRecord, ...]:
    """The records that a run has so far, in the order in which their stages started.

    Raises IntegrityError for a damaged one, or leaves it out with `skip_damaged`.
    """
    folder = run_folder(run_id)
    names = [file.path.removeprefix(f"{folder}/") for file in open_store(workdir).list(folder)]
    found: list[StageRecord] = []
    for name in sorted(names):
        if not name.endswith(".json") or name == SUMMARY:
            continue
        try:
            record = read_stage_record(workdir, run_id, name.removesuffix(".json"))
        except IntegrityError:
            if not skip_damaged:
                raise
        else:
            found += [record] if record is not None else []
    return tuple(sorted(found, key=lambda record: record.started))


def write_summary(workdir: str | Path, run_id: str, state: RunState, sections: Sequence[str] = ()) -> dict[str, Any]:
    """Merge all stage records into `summary.json` and return it.

    Where two stages decide the same key of a section, the one that started later wins. Each of `sections` is there,
    null if no stage has decided it.
    """
    # A summary must be written even if the record of an earlier stage was damaged since.
    records = read_stage_records(workdir, run_id, skip_damaged=True)
    summary: dict[str, Any] = {
        "run_id": run_id,
        "shardmill_version": __version__,
        "status": state.status,
        "exit_code": state.exit_code,
        "error": redacted_text(state.error) or None,
        "stages": {
            record.stage: record.model_dump(include={"status", "seconds", "retried_requests"}) for record in records
        },
        **dict.fromkeys(sections),
    }
    for record in records:
        for name, section in record.sections.items():
            if section is not None:
                summary[name] = {**(summary.get(name) or {}), **section}
    body = json.dumps(summary, indent=2).encode() + b"\n"
    open_store(workdir).put(f"{run_folder(run_id)}/{SUMMARY}", body)
    return summary


def latest_run(workdir: str | Path) -> str:
    """The run with a stage record below `workdir` that logged an event last. Raises UsageError if there is none."""
    files = list(open_store(workdir).list(RUNS))
    folder_of = {file.path: "/".join(file.path.split("/")[:2]) for file in files}
    records = (path for path in folder_of if path.endswith(".json") and path.count("/") == 2)
    with_stages = {folder_of[path] for path in records if not path.endswith(f"/{SUMMARY}")}
    # Or a part of it, for a run that continues or was killed.
    found = [file for file in files if f"/{EVENTS}" in file.path and folder_of[file.path] in with_stages]
    if not found:
        raise UsageError(f"no run below {workdir}", "expected a run with a record there", "check --workdir")
    return max(found, key=lambda file: (file.mtime_ns, file.path)).path.split("/")[1]


def state_after(records: Sequence[StageRecord], whole: frozenset[str]) -> RunState:
    """`ok` if all stages of `whole` have ended well; else `partial`, also if `whole` is empty: unknown."""
    ended_well = {record.stage for record in records if record.status != "failed"}
    return RunState("ok", 0) if whole and whole <= ended_well else PARTIAL


def read_run_state(workdir: str | Path, run_id: str, whole: frozenset[str] = frozenset()) -> RunState:
    """Return the progress of a run from its summary, or else its stage records. Raises UsageError if there is no run.

    `whole`: the stages after which a run is `ok`.
    """
    records = read_stage_records(workdir, run_id, skip_damaged=True)
    try:
        summary = json.loads(open_store(workdir).read(f"{run_folder(run_id)}/{SUMMARY}"))
        return RunState(summary["status"], summary["exit_code"], summary["error"] or "")
    except FileNotFoundError:
        if not records:
            raise UsageError(
                f"no run {run_id!r} under {workdir}", "expected a run with a record there", "check --run-id"
            ) from None
    except (ValueError, KeyError, TypeError):
        # A damaged summary says nothing that the stage records do not say.
        pass
    failed = next((record for record in records if record.status == "failed"), None)
    return RunState("failed", failed.exit_code, failed.error) if failed else state_after(records, whole)


def dataset_section(pin: DatasetPin, manifest: Manifest) -> dict[str, Any]:
    """The summary's section `dataset`, of the stage that made a version or worked on it."""
    return {
        "uri": pin.uri,
        "version": pin.version,
        "manifest_sha256": pin.manifest_sha256,
        "content_digest": manifest.content_digest,
        "layout_digest": manifest.layout_digest,
        "counts": manifest.counts.model_dump(mode="json"),
    }


def redacted_record(record: StageRecord) -> StageRecord:
    """The record as it may be written or printed: without secrets."""
    return record.model_copy(update=redacted(record.model_dump(include={"error", "sections", "detail"})))


def failed_stage(stage: str, error: BaseException) -> StageRecord:
    """The record of a stage that ended with `error`, or because this process was asked to end."""
    error = cause_of_end(error)
    line = f"{type(error).__name__}: {error}"
    detail = error.detail if isinstance(error, ShardmillError) else {}
    if isinstance(error, ShardmillError) or hasattr(error, "exit_code"):
        line = str(error)
    elif isinstance(error, KeyboardInterrupt):
        line = "interrupted by Ctrl-C"
    return StageRecord(stage=stage, status="failed", exit_code=exit_code_of(error), error=line, detail=detail)


DEFAULT_WORKDIR = "./shardmill-work"
