"""Writes stderr as one JSON object a line, for log collectors, in processes with `SHARDMILL_LOG_FORMAT=json`.

Events keep their name and fields. Any other line that is written becomes a message, a warning or an error.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from shardmill.errors import ERROR_BY_EXIT_CODE, UsageError
from shardmill.jobs.observer import WARNING, FieldValue
from shardmill.jobs.redact import redacted

VARIABLE = "SHARDMILL_LOG_FORMAT"
FORMATS = ("text", "json")
_ERROR = re.compile(r"ERROR (?P<code>\d+): (?P<message>.*)")
_WARNING = re.compile(r"(?P<stage>[\w-]+: )?WARNING: (?P<message>.*)")


class JsonLog(io.TextIOBase):
    """A text stream; each line that is written to it is an object in a line of `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pending = ""
        self._lock = threading.RLock()
        self.run_id = ""
        """The run that this process works for, once it is known."""

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._pending = (self._pending + text).split("\n")
            for line in filter(str.strip, lines):
                self._append(*_of_line(line))
        return len(text)

    def event(self, name: str, fields: Mapping[str, FieldValue], message: str) -> None:
        """Append an event; `message`: the line that a terminal would show, or ""."""
        level = "warning" if WARNING in fields else "info"
        line = {"message": message} if message else {}
        self._append(level, {"event": name, **redacted(dict(fields)), **line})

    def _append(self, level: str, values: Mapping[str, Any]) -> None:
        run = {"run_id": self.run_id} if self.run_id else {}
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "level": level, **run, **{key: _as_json(values[key]) for key in values}})
        with self._lock:
            # One call for a line: other processes write to the same pipe.
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Never: bars and colours are for people."""
        return False


def _of_line(line: str) -> tuple[str, dict[str, Any]]:
    if found := _ERROR.fullmatch(line):
        code = int(found["code"])
        kind = {"kind": ERROR_BY_EXIT_CODE[code].__name__} if code in ERROR_BY_EXIT_CODE else {}
        return "error", {"message": found["message"], "exit_code": code, **kind}
    if found := _WARNING.fullmatch(line):
        return "warning", {"message": f"{found['stage'] or ''}{found['message']}"}
    return "info", {"message": line}


def _as_json(value: Any) -> Any:
    """JSON has no number for NaN and infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_logs: list[JsonLog] = []


def start_json_log() -> None:
    """From now on this process's stderr is JSON, if the environment says so. Raises UsageError for another format."""
    asked = os.environ.get(VARIABLE) or FORMATS[0]
    if asked not in FORMATS:
        raise UsageError(f"{VARIABLE} is {asked!r}", f"expected {' or '.join(FORMATS)}", "correct it, or unset it")
    if asked == "json" and not _logs:
        _logs.append(JsonLog(sys.stderr))
        sys.stderr = _logs[0]


def logs_json() -> bool:
    """Whether this process's stderr is JSON."""
    return bool(_logs)


def name_run(run_id: str) -> None:
    """All lines from now on belong to this run."""
    for log in _logs:
        log.run_id = run_id


def log_as_json(name: str, fields: Mapping[str, FieldValue], message: str = "") -> bool:
    """Write an event if stderr is JSON. -> whether it is; if not, the caller writes for people."""
    for log in _logs:
        log.event(name, fields, message)
    return logs_json()
