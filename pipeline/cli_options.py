"""What all commands share: their common options, and how each way to end becomes an exit code and one line."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from pipeline.config import DEFAULT_WORKDIR
from shardmill.signals import Terminated, raise_on_signals
from shardmill.stage_process import tell_error, tell_line


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every command takes."""

    overrides: tuple[str, ...]
    workdir: str
    run_id: str
    json: bool
    debug: bool


Overrides = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one config key.")]
Workdir = Annotated[str, typer.Option(metavar="DIR", help="Where runs leave their records (and more with a folder).")]
RunId = Annotated[str, typer.Option(metavar="ID", help="Name this run, or continue the run of that name.")]
Json = Annotated[bool, typer.Option("--json", help="Machine output on stdout, human output on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]

COMMON_PARAMETERS = tuple(
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("overrides", [], Overrides),
        ("workdir", DEFAULT_WORKDIR, Workdir),
        ("run_id", "", RunId),
        ("json", False, Json),
        ("debug", False, Debug),
    )
)


def with_common(function: Callable[..., None]) -> Callable[..., None]:
    """The typer command of a function whose first parameter is `Common`: it gets the common options as well."""
    hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in list(inspect.signature(function).parameters.values())[1:]
    ]

    def command(**values: Any) -> None:
        names = [parameter.name for parameter in COMMON_PARAMETERS]
        common = {name: values.pop(name) for name in names}
        function(Common(overrides=tuple(common.pop("overrides")), **common), **values)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    parameters = [*(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), *COMMON_PARAMETERS]
    # typer reads both.
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def run_app(app: typer.Typer, prepare: Callable[[], None] = lambda: None) -> NoReturn:
    """Run the command line and end the process: 0, or the error's exit code after its one line on stderr."""
    raise_on_signals()
    if "--debug" not in sys.argv:
        # Libraries log tracebacks of what they raise as well (py4j on Ctrl-C); people get one line.
        logging.getLogger().addHandler(logging.NullHandler())
    try:
        prepare()
        code = app(standalone_mode=False)
        if code == 130:
            # typer turns Ctrl-C into this code without a word.
            raise KeyboardInterrupt
    except BaseException as error:  # the outermost frame: whatever happens becomes one line and an exit code
        code = _end(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (130, Terminated.exit_code):
        # Threads that still wait for Spark or a rank would keep the interpreter; what must be undone was undone above.
        end_children()
        os._exit(code)
    sys.exit(code if isinstance(code, int) else 0)


def end_children(patience_seconds: float = 5.0) -> None:
    """End what this process started and did not end: a JVM that was still starting does not notice that we are gone."""
    deadline = time.monotonic() + patience_seconds
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while _children() and time.monotonic() < deadline:
            time.sleep(0.05)


def _children() -> list[int]:
    # Each thread's own, as Linux tells them; a zombie counts until it is waited for.
    for listing in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError, ChildProcessError):
            for pid in map(int, listing.read_text().split()):
                os.waitpid(pid, os.WNOHANG)
    listings = Path("/proc/self/task").glob("*/children")
    return [int(pid) for listing in listings for pid in listing.read_text().split()]


def _end(error: BaseException) -> int:
    # The ClickException of the click that this typer brings along, or of click itself.
    usage_error = typer.BadParameter.__mro__[2]
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, typer.Abort):
        error = KeyboardInterrupt()
    if isinstance(error, usage_error):
        message = error.format_message().rstrip(".")  # pyright: ignore[reportAttributeAccessIssue]
        return tell_line(2, f"{' '.join(message.split())}; see `shardmill --help`")
    return tell_error(error, debug="--debug" in sys.argv)
