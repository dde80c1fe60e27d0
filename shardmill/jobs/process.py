"""This shardmill process: requests to end it, its temporary folder, the import path of its children, and its end,
together with its parent if they belong together, and always with one line and an exit code.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shardmill.child_process import die_with_parent
from shardmill.errors import ShardmillError, TrainingError, UsageError
from shardmill.jobs.redact import redacted_text, warn_on_stderr
from shardmill.registry import install_hint
from shardmill.words import printable

PREFIX = "shardmill-scratch-"
# Younger folders without an owner may be about to get one.
STALE_SECONDS = 60.0
# Python's own name for "do not put the working directory, or the script's folder, first on the path": people have an
# `etl.py` or a `train.py` of their own, which in a task or a rank must neither hide our package nor be hidden by it
# (shardmill/registry.py finds a user's module on purpose).
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
# Python takes the encoding of file names from the locale, unless it starts in its UTF-8 mode. In another encoding a
# name is a text that no record, report or terminal can hold; or, in Latin-1, another text, and so another sample.
UTF8_MODE = {"PYTHONUTF8": "1"}

# Who started several processes as one job asks each of them to end, and maybe their group too.
ONE_REQUEST_SECONDS = 2.0

_received: list[Terminated] = []


class Terminated(BaseException):
    """SIGTERM: a scheduler wants this process to end."""

    exit_code = 143
    cause = "terminated by SIGTERM"

    def __init__(self, how_far: str = "") -> None:
        """`how_far` the work came, and what is kept of it; empty if it was ended at once."""
        self.how_far = how_far
        super().__init__("; ".join(filter(None, (self.cause, how_far))))


class Interrupted(Terminated, KeyboardInterrupt):
    """Ctrl-C: a person wants it."""

    exit_code = 130
    cause = "interrupted by Ctrl-C"


def start_in_utf8() -> None:
    """Replace this process by itself in Python's UTF-8 mode, unless it is in UTF-8 already; what it starts inherits it.

    Raises UsageError if Python does not take the mode. A stream that PYTHONIOENCODING gives an encoding of its own
    escapes what that cannot hold.
    """
    if sys.getfilesystemencoding() != "utf-8":
        if os.environ.get("PYTHONUTF8") == "1":
            raise UsageError(
                f"Python decodes file names as {sys.getfilesystemencoding()}, although PYTHONUTF8 = 1",
                "expected UTF-8",
                "set a locale such as LC_ALL=C.UTF-8, and call Python without -E, -I and -X utf8=0",
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **UTF8_MODE})
    for stream in (sys.stdout, sys.stderr):
        # A test's or a notebook's stream has its own ways.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


@dataclass(slots=True)
class StopRequest:
    """Whether a signal has come while work was done that ends itself in good order."""

    patience_seconds: float
    is_made: bool = False

    def make(self) -> None:
        """Request the end: from now on the work has `patience_seconds`."""
        self.is_made = True
        # A timer of the kernel, and no thread: a handler must not wait for a lock that the interrupted code may hold.
        signal.setitimer(signal.ITIMER_REAL, self.patience_seconds)


_stop_requests: list[StopRequest] = []


@dataclass(slots=True)
class _Signals:
    """Signals to one process of a job that something else has started."""

    merged_seconds: float = 0.0
    """After the first one, others are the same; 0: each stands for itself."""
    first_seconds: float | None = None

    def adds_nothing(self) -> bool:
        """Note one. -> whether it only repeats what has been asked for."""
        now = time.monotonic()
        if not self.merged_seconds:
            return False
        if self.first_seconds is None:
            self.first_seconds = now
            # Then another process of the job has passed its own on before ours came.
            return bool(_stop_requests) and _stop_requests[-1].is_made
        return now - self.first_seconds < self.merged_seconds


_signals = _Signals()


@contextmanager
def stopping_in_order(patience_seconds: float) -> Iterator[StopRequest]:
    """Inside, the first signal only makes the request, which the work looks at; it then ends by raising `Terminated`.

    A second signal, or `patience_seconds` after the first, ends the work at once, as outside.
    """
    request = StopRequest(patience_seconds)
    _stop_requests.append(request)
    try:
        yield request
    finally:
        _stop_requests.remove(request)
        if request.is_made:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if request.is_made:
        raise asked_to_end("the current operation was finished")


def asked_to_end(how_far: str = "") -> Terminated:
    """What ends this process after the first signal that it got, as SIGTERM if another process of the job got one."""
    return type(_received[0])(how_far) if _received else Terminated(how_far)


@contextmanager
def one_of_a_job() -> Iterator[None]:
    """Inside, signals that come within ONE_REQUEST_SECONDS are one request; others come by `request_stop`."""
    _signals.merged_seconds = ONE_REQUEST_SECONDS
    try:
        yield
    finally:
        _signals.merged_seconds = 0.0


def request_stop() -> None:
    """Another process of the job was asked to end: as SIGTERM here, unless this one was asked already. Any thread."""
    if _received:
        return
    if not _stop_requests:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    _received.append(Terminated())
    _stop_requests[-1].make()


def stop_in_order() -> None:
    """End the block inside `stopping_in_order` as after a SIGTERM; no signal has arrived, and the process continues."""
    _stop_requests[-1].make()


def was_signalled() -> bool:
    """Whether this process was asked to end, even if it continued."""
    return bool(_received)


def raise_on_signals() -> None:
    """Let SIGTERM and Ctrl-C unwind the stack, so that nothing is left half-done; `cause_of_end` knows of both."""

    def end(signal_number: int, frame: FrameType | None) -> None:
        _received.append(Interrupted() if signal_number == signal.SIGINT else Terminated())
        request = _stop_requests[-1] if _stop_requests else None
        if signal_number != signal.SIGALRM and _signals.adds_nothing():
            return
        if request is None or request.is_made:
            raise _received[0]
        request.make()

    if threading.current_thread() is threading.main_thread():
        _received.clear()
        _signals.first_seconds = None
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGALRM, end)
        # A process that was started with Ctrl-C ignored (in the background, by nohup) continues to ignore it.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, end)


def cause_of_end(error: BaseException) -> BaseException:
    """The first signal that asked this process to end, if there was one; else `error`.

    A signal to a whole process group ends Spark's JVM before us. What then fails in our own clean-up (a connection that
    is refused) does not say why this process ends.
    """
    # One that says how far the work came before it ended is the better answer.
    return _received[0] if _received and not isinstance(error, Terminated) else error


def python_path() -> str:
    """Everything that this process can import, as the PYTHONPATH of a process of the same machine."""
    # An empty entry means the working directory. Spark's Python workers find a ZIP of --py-files by its name alone.
    return os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))


class Scratch:
    """A private folder, below the temporary one unless another is given. Its owner holds a lock on it, which the kernel
    frees with the process.

    TensorFlow, Spark and others leave files in the temporary folder if a process is killed, and ranks always are; the
    next owner of such a folder removes theirs. A lock and not a process id: containers that share a temporary folder
    do not share their ids.
    """

    def __init__(self, parent: str = "") -> None:
        """`parent`: where it lies; empty for the temporary folder."""
        remove_stale(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or None))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._removing = threading.Lock()

    def remove(self) -> None:
        """Remove the folder with all that is in it; on return it is gone, also if another thread removes it."""
        # A caller that did not wait could end the process, and with it the thread that is still removing.
        with self._removing:
            if self._descriptor >= 0:
                shutil.rmtree(self.path, ignore_errors=True)
                os.close(self._descriptor)
                self._descriptor = -1


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable for this process and what it starts inside, and put the old value back."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def private_temporary_folder() -> Iterator[Path]:
    """Use a private temporary folder for this process and its children."""
    scratch = Scratch()
    before, tempfile.tempdir = tempfile.tempdir, str(scratch.path)
    try:
        with environment_variable("TMPDIR", str(scratch.path)):
            yield scratch.path
    finally:
        tempfile.tempdir = before
        scratch.remove()


@contextmanager
def scratch_folder(parent: str) -> Iterator[Path]:
    """A `Scratch` for as long as the work inside lasts."""
    scratch = Scratch(parent)
    try:
        yield scratch.path
    finally:
        scratch.remove()


def remove_stale(parent: str = "") -> None:
    """Folders of ours below `parent`, or below the temporary folder, whose owner was killed."""
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            status = folder.lstat()
            is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_mine or time.time() - status.st_mtime < STALE_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Its owner lives.
            pass
        finally:
            os.close(descriptor)


_CONTINUE = "run the same command again{but}: it resumes after the last complete work unit or checkpoint"
# Commands that have nothing to resume.
_READING = ("config", "doctor", "drift", "gate", "inspect", "lineage", "mislabels", "plan", "verify")
# Python calls the handlers of signals that came together by their numbers. If a whole group is signalled, SIGTERM comes
# first in truth: after it this one asks for nothing more, before it the SIGTERM would be a second request.
_PARENT_IS_GONE = signal.SIGRTMIN


def start_of_process(process: int) -> str:
    """Boot id and start time of a running process of this host, which a later process with the same PID does not have;
    empty if it does not run."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Behind the name, which may hold anything: the state, and 18 fields further the start in ticks since the boot.
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{boot} {fields[18]}"


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


class _OnStderr(logging.Handler):
    """What the library itself logs, as the other warnings of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        warn_on_stderr(record.getMessage())


_on_stderr = _OnStderr(logging.WARNING)


def log_to_stderr(*, others: bool) -> None:
    """What this library logs is a warning as those of a command. `others`: whether other libraries log as well: some
    log tracebacks of what they raise (py4j, if Spark's JVM ends first), of which people get one line.
    """
    logging.getLogger("shardmill").addHandler(_on_stderr)
    if not others:
        logging.getLogger().addHandler(logging.NullHandler())


def exit_code_of(error: BaseException) -> int:
    """The command line's exit code: the error's own, 130 for Ctrl-C, 1 for an unexpected error."""
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


def report_error(error: BaseException, *, debug: bool, committed: str = "") -> int:
    """Say on stderr why this process ends, `ERROR <code>: ...` as the last line; returns the exit code. `committed`:
    the version that it has committed.
    """
    error = cause_of_end(error)
    if debug:
        sys.stderr.write(redacted_text("".join(traceback.format_exception(error))))
    # The end of a failed rank's output explains its error; a refusal says all in its line.
    elif isinstance(error, TrainingError):
        for note in getattr(error, "__notes__", ()):
            sys.stderr.write(f"{redacted_text(note)}\n")
    return print_error(exit_code_of(error), error_line(error, committed))


def error_line(error: BaseException, committed: str = "") -> str:
    """Why a command ends, in one line for people."""
    error = cause_of_end(error)
    if isinstance(error, (KeyboardInterrupt, Terminated)):
        ended = error if isinstance(error, Terminated) else Interrupted()
        kept = [part for part in (ended.how_far, committed and f"{committed} is committed") if part]
        line = f"{ended.cause}; {_how_to_go_on('; '.join(kept) or 'what is finished is kept')}"
    elif isinstance(error, ShardmillError):
        line = str(error)
    elif isinstance(error, ModuleNotFoundError) and (hiding := _hiding_file(error)):
        line = f"{error}; {hiding} has the name of a package; rename it, or remove its folder from PYTHONPATH"
    elif isinstance(error, ImportError):
        line = f"{error}; a package of an extra may be missing; {install_hint('all')}"
    else:
        line = f"{type(error).__name__}: {error}; unexpected error; --debug shows where"
    return redacted_text(printable(" ".join(line.split())))


def _how_to_go_on(how_far: str) -> str:
    command, is_stored = sys.argv[1:2], any(each.partition("=")[0] == "--out" for each in sys.argv)
    if command and (command[0] in _READING or (command[0] == "predict" and not is_stored)):
        return "nothing was changed; run the same command again"
    # A fresh training is another one each time, but for a run that is named.
    return f"{how_far}; {_CONTINUE.format(but=', without --fresh' if '--fresh' in sys.argv else '')}"


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
