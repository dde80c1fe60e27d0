"""Runs a `spark-submit` entry as a process: its arguments, its run record, and its exit."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from shardmill.jobs.config import is_under_spark_submit
from shardmill.jobs.ending import end_with_parent, end_with_script, quiet_libraries, report_error
from shardmill.jobs.observer import FieldValue, Observer, is_progress
from shardmill.jobs.process import Terminated, private_temporary_folder, raise_on_signals, start_in_utf8
from shardmill.jobs.redact import redacted
from shardmill.jobs.run_record import RunRecord, recording
from shardmill.jobs.workdir import DEFAULT_WORKDIR
from shardmill.printable import printable

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
    job: Callable[[RunRecord, Observer], None], workdir: str, run_id: str, *, sections: Sequence[str], debug: bool
) -> int:
    """Run the stages of `job(record, observer)`, print each one's record as a line of JSON; returns the exit code.

    `sections`: what the job adds to the run's summary. Errors end as one line on stderr.
    """
    raise_on_signals()
    if is_under_spark_submit():
        # A driver that trains in its own process would not notice the end of Spark's JVM, and would continue alone.
        end_with_parent()
    else:
        end_with_script()
    if not debug:
        quiet_libraries()
    record: RunRecord | None = None
    try:
        start_in_utf8()
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
