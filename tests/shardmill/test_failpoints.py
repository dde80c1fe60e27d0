"""Failpoints: off by default, exact when on, and all of them documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.errors import UsageError
from shardmill.failpoints import FAILPOINTS, VARIABLE, failpoint

ROOT = Path(__file__).parents[2]


def passes(setting: str) -> int:
    """How often a process passes `decode`, of five times, until it dies."""
    environment = {**os.environ, VARIABLE: setting}
    command = [sys.executable, "-m", "tests.programs.pass_a_failpoint"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    return done.stdout.count(b"\n") if done.returncode == -9 else -1


@pytest.mark.starts("program")
def test_a_process_dies_at_the_named_pass(tmp_path: Path):
    assert [passes("decode"), passes("decode:3"), passes("decode:9"), passes("")] == [1, 3, -1, -1]
    once = f"decode@{tmp_path}/once"
    assert [passes(once), passes(once)] == [1, -1]


def test_a_misspelt_failpoint_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "gc_delet")
    with pytest.raises(UsageError, match="expected NAME"):
        failpoint("gc_delete")


def test_every_failpoint_is_documented():
    table = (ROOT / "docs" / "failpoints.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)) == FAILPOINTS
