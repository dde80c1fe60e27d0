"""The command line as a process, the way scripts and people meet it.

It is forked from one that has imported what commands need: of a short command's second, the imports take 0.9.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.cli import COMMANDS
from tests.quick_start import FOLDER
from tests.quick_start.forked import Program, run_forked

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent.parent
SUMMARY_SCHEMA = json.loads((ROOT / "docs" / "summary.schema.json").read_text())
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{FOLDER}"}
_AT_FIRST = dict(ENVIRONMENT)
MODULES = (
    *(COMMANDS.entry(name).target.partition(":")[0] for name in COMMANDS),
    "cv2",
    "etl.job",
    "etl.commit",
    "etl.engines.local",
    "pyarrow.dataset",
    "shardmill.dataset.verify",
)
_TRAIN = {"evaluate", "export", "run", "train"}
_TRAINING = (*MODULES, "tensorflow", "train.rank.worker", "train.backends.keras.backend")


def shardmill(
    *arguments: str | Path, cwd: Path, timeout: float = 150, preexec: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `shardmill ...` in `cwd` to its end."""
    command = [str(BIN / "shardmill"), *map(str, arguments)]
    if preexec is None and ENVIRONMENT == _AT_FIRST:
        program = Program("shardmill.applications:main", command, str(cwd), ENVIRONMENT)
        return run_forked(_modules(command, cwd), program, timeout)
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, preexec_fn=preexec
    )


def _modules(command: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """Of those that train, all but those of PyTorch import TensorFlow; no process may have both."""
    if not _TRAIN.intersection(command[1:2]):
        return MODULES
    texts = [*command, *(path.read_text() for path in (*cwd.glob("*.toml"), *cwd.glob("*.py")))]
    return MODULES if any("torch" in text for text in texts) else _TRAINING


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a failure ends with."""
    return done.stderr.rstrip("\n").splitlines()[-1]
