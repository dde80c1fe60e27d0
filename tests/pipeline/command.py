"""The command line as a process, the way scripts and people meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.quick_start import FOLDER

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent.parent
SUMMARY_SCHEMA = json.loads((ROOT / "docs" / "summary.schema.json").read_text())
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{FOLDER}"}


def shardmill(
    *arguments: str | Path, cwd: Path, timeout: float = 150, preexec: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `shardmill ...` in `cwd` to its end."""
    return subprocess.run(
        [str(BIN / "shardmill"), *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=preexec,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a failure ends with."""
    return done.stderr.rstrip("\n").splitlines()[-1]
