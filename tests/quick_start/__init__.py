"""Makes every Python process that tests start begin faster; this folder is on the PYTHONPATH of all of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.quick_start import sitecustomize
from tests.quick_start.java import use_archived_classes

__all__ = ["FOLDER", "pytest_sessionstart", "sitecustomize"]

FOLDER = str(Path(__file__).parent)

os.environ["PYTHONPATH"] = os.pathsep.join(
    [*(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", FOLDER)), FOLDER]
)
if FOLDER not in sys.path:
    # What starts here gets this process's own path.
    sys.path.append(FOLDER)
# Without bytecode each process would compile what it imports from a copy of our tree, or from a new environment.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before other processes of tests start."""
    is_worker = hasattr(session.config, "workerinput")
    use_archived_classes(may_create=not is_worker and session.config.getoption("--tier") != "fast")
