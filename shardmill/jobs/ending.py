"""Ends a process: together with its parent if they belong together, and always with one line and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from types import FrameType

from shardmill.errors import ShardmillError, TrainingError
from shardmill.jobs.process import Terminated, request_stop, why_ended
from shardmill.jobs.redact import redacted_text
from shardmill.parent_death import die_with_parent
from shardmill.printable import printable
from shardmill.registry import install_hint

_CONTINUE = "run the same command again{but}: it resumes after the last complete work unit or checkpoint"
# Commands that have nothing to resume.
_READING = ("config", "doctor", "drift", "gate", "inspect", "lineage", "mislabels", "plan", "verify")
# Python calls the handlers of signals that came together by their numbers. If a whole group is signalled, SIGTERM comes
# first in truth: after it this one asks for nothing more, before it the SIGTERM would be a second request.
_PARENT_IS_GONE = signal.SIGRTMIN


def end_with_parent() -> None:
    """When the process that has started this one is gone: end as after a SIGTERM, unless it came already."""
    parent = os.getppid()

    def end(signal_number: int, frame: FrameType | None) -> None:
        # The kernel tells as well of the thread that has started this process.
        if os.getppid() != parent:
            request_stop()

    signal.signal(_PARENT_IS_GONE, end)
    die_with_parent(parent, Terminated.exit_code, by=_PARENT_IS_GONE)


def end_with_script() -> None:
    """`end_with_parent` if that is a script, or what else runs this command in its foreground.

    In the background, below nohup or setsid, and as a job of an interactive shell a command continues: to the last one
    comes the hangup of its terminal.
    """
    is_ignored = signal.SIG_IGN in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP))
    if not is_ignored and os.getpgid(os.getppid()) == os.getpgrp():
        end_with_parent()


def quiet_libraries() -> None:
    """Libraries log tracebacks of what they raise as well (py4j, if Spark's JVM ends first); people get one line."""
    logging.getLogger().addHandler(logging.NullHandler())


def exit_code_of(error: BaseException) -> int:
    """The command line's exit code: the error's own, 130 for Ctrl-C, 1 for an unexpected error."""
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


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
        line = f"interrupted; {_how_to_go_on('no partial result is visible; ')}"
    elif isinstance(error, Terminated):
        line = f"{error}; {_how_to_go_on()}"
    elif isinstance(error, ShardmillError):
        line = str(error)
    elif isinstance(error, ModuleNotFoundError) and (hiding := _hiding_file(error)):
        line = f"{error}; {hiding} has the name of a package; rename it, or remove its folder from PYTHONPATH"
    elif isinstance(error, ImportError):
        line = f"{error}; a package of an extra may be missing; {install_hint('all')}"
    else:
        line = f"{type(error).__name__}: {error}; unexpected error; --debug shows where"
    return redacted_text(printable(" ".join(line.split())))


def _how_to_go_on(visible: str = "") -> str:
    command, is_stored = sys.argv[1:2], any(each.partition("=")[0] == "--out" for each in sys.argv)
    if command and (command[0] in _READING or (command[0] == "predict" and not is_stored)):
        return "nothing was changed; run the same command again"
    # A fresh training is another one each time, but for a run that is named.
    return visible + _CONTINUE.format(but=", without --fresh" if "--fresh" in sys.argv else "")


def _hiding_file(error: ModuleNotFoundError) -> str:
    """The file that was imported where a package was looked into; empty if that is not what went wrong."""
    name = (error.name or "").partition(".")
    found = sys.modules.get(name[0])
    is_hidden = bool(name[1]) and found is not None and not hasattr(found, "__path__")
    return str(getattr(found, "__file__", "") or "") if is_hidden else ""


def print_error(code: int, line: str) -> int:
    """Write one `ERROR` line, plainly: a console library would wrap it, and scripts read it. Returns the code."""
    sys.stderr.write(f"ERROR {code}: {printable(' '.join(redacted_text(line).split()))}\n")
    return code
