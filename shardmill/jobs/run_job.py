"""A `spark-submit` entry as a process: its run record, its one line of error, its exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from shardmill.errors import ShardmillError, TrainingError
from shardmill.jobs.observer import FieldValue, Observer, is_progress
from shardmill.jobs.process import Terminated, private_temporary_folder, raise_on_signals, why_ended
from shardmill.jobs.redact import redacted, redacted_text
from shardmill.jobs.run_files import exit_code_of
from shardmill.jobs.run_record import RunRecord, recording
from shardmill.printable import printable
from shardmill.registry import install_hint

_LINE_EVERY_SECONDS = 5.0
_CONTINUE = "run the same command again: it continues where it stopped"


def job_parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every `spark-submit` entry takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="override the file")
    parser.add_argument("--workdir", default="./shardmill-work", help="where the run record goes")
    parser.add_argument("--run-id", default="", help="names the run record")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def run_job(
    job: Callable[[RunRecord, Observer], None], workdir: str, run_id: str, *, sections: Sequence[str], debug: bool
) -> int:
    """Run the stages of `job(record, observer)`, print each one's record as a line of JSON; returns the exit code.

    `sections`: what the job adds to the run's summary. Errors end as one line on stderr.
    """
    raise_on_signals()
    record: RunRecord | None = None
    try:
        record = RunRecord(workdir, run_id, sections=sections)
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


def report_error(error: BaseException, *, debug: bool) -> int:
    """Say on stderr why this process ends, `ERROR <code>: ...` as the last line; returns the exit code."""
    error = why_ended(error)
    if debug:
        sys.stderr.write(redacted_text("".join(traceback.format_exception(error))))
    # The end of a failed rank's output explains its error; a refusal says all in its line.
    elif isinstance(error, TrainingError):
        for note in getattr(error, "__notes__", ()):
            sys.stderr.write(f"{redacted_text(note)}\n")
    return print_error(exit_code_of(error), error_line(error))


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


def print_error(code: int, line: str) -> int:
    """Write one `ERROR` line, plainly: a console library would wrap it, and scripts read it. Returns the code."""
    sys.stderr.write(f"ERROR {code}: {printable(' '.join(redacted_text(line).split()))}\n")
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
            shown = [f"{key}={value}" for key, value in redacted(dict(fields)).items()]
            sys.stderr.write(printable(" ".join([name, *shown])) + "\n")
