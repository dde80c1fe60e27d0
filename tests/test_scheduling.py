"""The tests' own scheduler: what one process that dies may cost a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.drill
@pytest.mark.parametrize("seconds", [0.2, 3.0], ids=["others-are-at-work", "others-have-ended"])
def test_a_process_that_dies_costs_one_test_and_the_run_continues_to_its_end(tmp_path, seconds):
    for number in range(12):
        (tmp_path / f"test_{number:02}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    died = tmp_path / "died"
    # Late, so that the process has many finished files behind it.
    (tmp_path / "test_10.py").write_text(
        "import os, pathlib, time\n"
        f"def test_one(): time.sleep({seconds})\n"
        "def test_two():\n"
        f"    died = pathlib.Path({str(died)!r})\n"
        "    if not died.exists():\n"
        "        died.touch()\n"
        "        os.abort()\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = (*(sys.executable, "-m", "pytest", "-p", "tests.scheduling", "-n2"), "--dist=loadscope", "-q", ".")
    ended = subprocess.run(
        (*command, "--no-loadscope-reorder"), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    # Its test is run again, and passes.
    assert "1 failed, 24 passed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 1
