"""The tests' own rules: what a test may start, which command runs it, and that budgets only shrink."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.lab.costs import BUDGET, folder_of, read_costs

ROOT = Path(__file__).parents[1]
# Which tiers a command runs.
COMMANDS = {"test": ("fast", "test"), "drill": ("drill",)}
MAX_FILE_SECONDS = 75
TESTS = """
import subprocess, sys, time
import pytest

def start():
    subprocess.run([sys.executable, "-c", ""])

def test_nothing(): pass

def test_unnamed(): start()

def test_hidden():
    try:
        start()
    except BaseException:
        pass

@pytest.mark.starts("program")
def test_named(): start()

@pytest.mark.starts("ranks")
def test_wrongly_named(): start()

def test_dear():
    end = time.process_time() + 5.2
    while time.process_time() < end: pass

@pytest.mark.drill
def test_drill(): start()

@pytest.mark.exhaustive
def test_rest(): pass
"""


def run(folder: Path, *options: str) -> dict[str, str]:
    """The outcome of each of those tests that runs."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.lab.tiers", "-p", "tests.lab.costs", "-vv", *options]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("test_some.py::")]
    return {name.partition("::")[2].removeprefix("test_"): outcome for name, outcome, *_ in lines}


@pytest.mark.starts("program")
def test_a_test_starts_what_it_names_and_costs_what_its_tier_allows(tmp_path: Path):
    outcomes = run(tmp_path, "--tier", "test")
    # The last word on each: one that hides the refusal fails as it ends.
    assert outcomes == {
        "nothing": "PASSED", "unnamed": "FAILED", "hidden": "ERROR", "named": "PASSED", "wrongly_named": "FAILED",
        "dear": "FAILED",
    }  # fmt: skip


@pytest.mark.starts("program")
def test_a_drill_starts_what_it_likes(tmp_path: Path):
    assert run(tmp_path, "--tier", "drill") == {"drill": "PASSED"}


@pytest.mark.parametrize("command", COMMANDS)
def test_budgets_are_what_the_tests_cost_and_little_more(command: str):
    sums: defaultdict[str, float] = defaultdict(float)
    for file, costs in read_costs().items():
        seconds = sum(costs.get(tier, 0.0) for tier in COMMANDS[command])
        sums[folder_of(file)] += seconds
        assert command == "drill" or seconds < MAX_FILE_SECONDS, f"{file} takes {seconds:.0f} s: split it"
    for folder, budget in BUDGET[command].items():
        assert budget <= max(5, 1.6 * sums[folder]), f"{folder} takes {sums[folder]:.0f} s: its budget can shrink"
