"""The command line, the way scripts and people meet it: called in pytest's own process, or as a process.

A process is forked from one that has imported what commands need: of a short command's second, the imports take 0.9.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from pipeline.cli import COMMANDS
from shardmill.applications import main
from tests.quick_start import FOLDER
from tests.quick_start.forked import Program, run_forked

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
SUMMARY_SCHEMA = json.loads((ROOT / "docs" / "summary.schema.json").read_text())
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{FOLDER}"}
# Works in the calling process: the engines of shardmill start others.
ENGINE_HERE = "tests.extending_entries:NEW_ENGINE"
BUILD_HERE = ("--set", f"etl.engine={ENGINE_HERE}")
_AT_FIRST = dict(ENVIRONMENT)
MODULES = (
    *(COMMANDS.entry(name).target.partition(":")[0] for name in COMMANDS), "cv2", "etl.job", "etl.commit",
    "etl.engines.local", "pyarrow.dataset", "shardmill.dataset.verify",
)  # fmt: skip
_TRAIN = {"evaluate", "export", "run", "train"}
_TRAINING = (*MODULES, "tensorflow", "train.rank.worker", "train.backends.keras.backend")


def in_process(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `shardmill ...` in `cwd` to its end, by the function that the command calls, in this process."""
    command = ["shardmill", *map(str, arguments)]
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with _like_a_new_process(command, cwd), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int), code
    said = [stream.buffer.getvalue().decode() for stream in (stdout, stderr)]  # pyright: ignore[reportAttributeAccessIssue]
    return subprocess.CompletedProcess(command, code, *said)


@contextmanager
def _like_a_new_process(command: Sequence[str], cwd: Path) -> Iterator[None]:
    """What a command changes of its process is changed back."""
    arguments, path, folder, environment = sys.argv, list(sys.path), os.getcwd(), dict(os.environ)
    modules, threshold = set(sys.modules), gc.get_threshold()
    handled = (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in handled]
    # A process that ignores hangups does not end with the process that has started it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.argv = list(command)
    os.chdir(cwd)
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv, sys.path[:] = arguments, path
        for name, value in environment.items():
            os.environ[name] = value
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{cwd}/"):
                del sys.modules[name]
        gc.set_threshold(*threshold)
        for number, handler in zip(handled, handlers, strict=True):
            signal.signal(number, handler)


def shardmill(
    *arguments: str | Path, cwd: Path, timeout: float = 300, preexec: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `shardmill ...` in `cwd` to its end, in a process of its own."""
    command = [str(BIN / "shardmill"), *map(str, arguments)]
    if preexec is None and ENVIRONMENT == _AT_FIRST:
        program = Program("shardmill.applications:main", command, str(cwd), ENVIRONMENT)
        return run_forked(_modules(command, cwd), program, timeout)
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, preexec_fn=preexec
    )


def start(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """A `shardmill ...` under way, in a session of its own, as if it was started from a terminal's shell."""
    command = [str(BIN / "shardmill"), *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=cwd, env=ENVIRONMENT, text=True, start_new_session=True, **streams)


def _modules(command: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """Of those that train, all but those of PyTorch import TensorFlow; no process may have both."""
    if not _TRAIN.intersection(command[1:2]):
        return MODULES
    texts = [*command, *(path.read_text() for path in (*cwd.glob("*.toml"), *cwd.glob("*.py")))]
    return MODULES if any("torch" in text for text in texts) else _TRAINING


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a failure ends with."""
    return done.stderr.rstrip("\n").splitlines()[-1]
