"""What makes each Python process that tests start begin sooner; this folder is on the PYTHONPATH of all of them."""

from __future__ import annotations

import compileall
import os
import sys
from pathlib import Path

import pytest

from tests.quick_start import sitecustomize

__all__ = ["FOLDER", "pytest_sessionstart", "sitecustomize"]

FOLDER = str(Path(__file__).parent)
_ROOT = Path(__file__).parents[2]
_OURS = ("shardmill", "etl", "train", "pipeline", "airflow_dags", "tests")

os.environ["PYTHONPATH"] = os.pathsep.join(
    [*(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", FOLDER)), FOLDER]
)
if FOLDER not in sys.path:
    # What starts here gets this process's own path.
    sys.path.append(FOLDER)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile our modules once: without bytecode (PYTHONDONTWRITEBYTECODE) each process would compile them again."""
    if sys.dont_write_bytecode and not hasattr(session.config, "workerinput"):
        for package in _OURS:
            compileall.compile_dir(_ROOT / package, quiet=2)
