"""Ends the command line with an exit code and, on failure, one line on stderr (and JSON on stdout)."""

from __future__ import annotations

import difflib
import errno
import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import typer

from shardmill.child_process import adopt_orphans
from shardmill.errors import ShardmillError, StorageError, UsageError
from shardmill.jobs.json_log import start_json_log
from shardmill.jobs.process import (
    Terminated,
    end_with_script,
    error_line,
    log_to_stderr,
    print_error,
    private_temporary_folder,
    raise_on_signals,
    report_error,
    start_in_utf8,
)
from shardmill.jobs.redact import redacted


def run_app(app: typer.Typer) -> NoReturn:
    """Run the command line and end the process: 0, or the error's exit code after its one line on stderr."""
    raise_on_signals()
    end_with_script()
    log_to_stderr(others="--debug" in sys.argv)
    # Imports make no garbage, but so many objects that looking for it took a tenth of a command's start.
    gc.set_threshold(50_000)
    try:
        start_in_utf8()
        start_json_log()
        with private_temporary_folder():
            code = app(standalone_mode=False)
            sys.stdout.flush()  # a full disk behind a redirect may show only now
        if code == 130:
            # typer silently turns Ctrl-C into this code.
            raise KeyboardInterrupt
    except BaseException as error:  # the outermost frame: whatever happens becomes one line and an exit code
        code = _end(error)
    _flush_or_drop()
    if code in (130, Terminated.exit_code):
        # Threads that still wait for Spark or a rank would keep the interpreter; what must be undone was undone above.
        end_children()
        os._exit(code)
    sys.exit(code if isinstance(code, int) else 0)


def end_with_failure(
    error: BaseException, *, is_json: bool, is_debug: bool, run_id: str | None = None, committed: str = ""
) -> int:
    """Say why the command ends, to a machine by the document of a failure. Returns the exit code."""
    error = _as_storage_error(error)
    code = report_error(error, debug=is_debug, committed=committed)
    if is_json:
        is_ours = isinstance(error, ShardmillError)
        _print_failure(
            {
                "code": code,
                "kind": type(error).__name__,
                "message": error_line(error, committed),
                "detail": redacted(error.detail) if is_ours else {},
            },
            run_id,
        )
    return code


def _print_failure(failure: dict[str, Any], run_id: str | None) -> None:
    """The object that `--json` promises when there is no result."""
    document = {"error": failure, "run_id": run_id}
    with suppress(OSError):  # stdout may be what failed
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        sys.stdout.flush()


def _as_storage_error(error: BaseException) -> BaseException:
    """A full disk that no store has reported is most often behind stdout."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "this command's output"
        return StorageError(f"no space to write {where}: {error.strerror}", fix="free space, then run it again")
    return error


def _flush_or_drop() -> None:
    """Write out what was printed. What cannot be written is dropped: Python would fail on it again while it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stderr.flush()


def end_children(patience_seconds: float = 5.0) -> None:
    """End what this process started and did not end: a JVM that was still starting does not notice that we are gone.

    Children of children as well: once the script that starts the JVM is killed, no other process refers to them. And
    what these start meanwhile.
    """
    adopt_orphans()
    for number, seconds in ((signal.SIGTERM, patience_seconds), (signal.SIGKILL, 1.0)):
        deadline, told = time.monotonic() + seconds, set[int]()
        while found := set(filter(_is_alive, _descendants("self"))):
            for pid in found - told:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= found
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)


def _descendants(process: str) -> set[int]:
    """Each thread's own children, as Linux lists them, and their children."""
    found: set[int] = set()
    for listing in Path("/proc", process, "task").glob("*/children"):
        with suppress(OSError):
            found |= set(map(int, listing.read_text().split()))
    return found.union(*(_descendants(str(pid)) for pid in found))


def _is_alive(pid: int) -> bool:
    # A child of ours is a zombie until it is waited for.
    with suppress(OSError):
        os.waitpid(pid, os.WNOHANG)
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _end(error: BaseException) -> int:
    is_json = "--json" in sys.argv
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, typer.Abort):
        error = KeyboardInterrupt()
    # Only errors of the argument parser have it; typer exports no class for all of them.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return end_with_failure(error, is_json=is_json, is_debug="--debug" in sys.argv)
    message = " ".join(format_message().rstrip(".").split())
    if not message:
        # `shardmill` alone: typer has printed the help.
        return 0
    line = f"{message}; {_hint_at_config_key(error) or f'see `{_command_of(error)} --help`'}"
    if is_json:
        _print_failure({"code": 2, "kind": UsageError.__name__, "message": line, "detail": {}}, None)
    return print_error(2, line)


def _command_of(error: BaseException) -> str:
    """Return the command whose arguments the parser rejected, as users type it."""
    names, context = [], getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(["shardmill", *reversed(names)])


def _hint_at_config_key(error: BaseException) -> str:
    """For an unknown option that is named like a config key: how the key is set."""
    option = str(getattr(error, "option_name", "") or "")
    if type(error).__name__ != "NoSuchOption" or not option.startswith("--"):
        return ""
    from pipeline.choices import config_keys
    from pipeline.tree import PipelineTree

    keys = [key for key, _ in config_keys(PipelineTree)]
    if "train" in sys.argv[1:2]:
        # Of keys with one name, that of the command's own section.
        keys.sort(key=lambda key: not key.startswith("train."))
    word = option.lstrip("-").replace("-", "_").replace(".", "_")
    by_name = {name: key for key in reversed(keys) for name in (key.rpartition(".")[2], key.replace(".", "_"))}
    near = difflib.get_close_matches(word, by_name, n=1, cutoff=0.8)
    return f"config keys are set like this: --set {by_name[near[0]]}={_value_after(option)}" if near else ""


def _value_after(option: str) -> str:
    for number, word in enumerate(sys.argv):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        following = sys.argv[number + 1 : number + 2]
        if word == option and following and not following[0].startswith("-"):
            return following[0]
    return "VALUE"
