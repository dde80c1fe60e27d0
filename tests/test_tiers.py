"""The tests' own tools: tiers, the order of files, quick starts, and mutants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from scripts import test_for
from scripts.mutate import EQUIVALENTS, PROMISES, ROOT, choose, mutants_of
from tests.lab.costs import BUDGET, folder_of, read_costs, slowness_of
from tests.lab.tiers import CURRENT

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
    end = time.process_time() + 0.6
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
    (folder / "conftest.py").write_text("from tests.lab import costs\n\ncosts._FAR = 0.5\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.lab.tiers", "-p", "tests.lab.costs", "-vv", *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SHARDMILL_FULL": ""},
        capture_output=True,
        text=True,
        timeout=300,
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


def test_what_runs_with_the_newest_of_everything_is_there():
    for test in (test for tests in CURRENT.values() for test in tests):
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        if name:
            assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("command", COMMANDS)
def test_budgets_are_what_the_tests_cost_and_little_more(command: str):
    sums: defaultdict[str, float] = defaultdict(float)
    for file, costs in read_costs().items():
        seconds = sum(costs.get(tier, 0.0) for tier in COMMANDS[command])
        sums[folder_of(file)] += seconds
        assert command == "drill" or seconds < MAX_FILE_SECONDS, f"{file} takes {seconds:.0f} s: split it"
    for folder, budget in BUDGET[command].items():
        assert budget <= max(5, 1.6 * sums[folder]), f"{folder} takes {sums[folder]:.0f} s: its budget can shrink"


def test_a_slow_machine_is_told_from_a_file_that_has_grown():
    recorded = {f"{number}.py": {"fast": 2.0, "test": 1.0, "drill": 50.0} for number in range(5)}
    files = {file: {"fast": 2.0, "test": 1.0} for file in recorded}
    assert slowness_of(files, recorded) == 1
    assert slowness_of({**files, "0.py": {"fast": 90.0}, "new.py": {"fast": 90.0}}, recorded) == 1
    assert slowness_of({file: {"fast": 4.0, "test": 2.0} for file in recorded}, recorded) == 2
    assert slowness_of({file: {"fast": 1.0, "test": 0.5} for file in recorded}, recorded) == 1
    assert slowness_of({"new.py": {"fast": 90.0}}, recorded) == 1


@pytest.mark.drill
@pytest.mark.parametrize("seconds", [0.2, 3.0], ids=["others-are-at-work", "others-have-ended"])
def test_a_process_that_dies_costs_one_test_and_the_run_continues_to_its_end(tmp_path, seconds):
    for number in range(12):
        (tmp_path / f"test_{number:02}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    died = tmp_path / "died"
    # Late, so that the process has many finished files behind it.
    (tmp_path / "test_10.py").write_text(
        "import os, pathlib, signal, time\n"
        f"def test_one(): time.sleep({seconds})\n"
        "def test_two():\n"
        f"    died = pathlib.Path({str(died)!r})\n"
        "    if not died.exists():\n"
        "        died.touch()\n"
        # Not os.abort(): pytest's handler of that signal then reads the stacks of threads at work.
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = (*(sys.executable, "-m", "pytest", "-p", "tests.scheduling", "-n2"), "--dist=loadscope", "-q", ".")
    # Its own temporary folder: at its end it would delete what earlier runs have left in the one of all, for minutes.
    options = ("--no-loadscope-reorder", f"--basetemp={tmp_path / 'temporary'}")
    with subprocess.Popen(
        (*command, *options), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            # It says where it waits.
            process.send_signal(signal.SIGABRT)
            output, _ = process.communicate()
    # Its test is run again, and passes.
    assert "1 failed, 24 passed" in output, output
    assert process.returncode == 1


IMPORTER = """
try:
    import {name} as found
except ImportError as error:
    found = error.name
"""


@pytest.mark.starts("program")
@pytest.mark.parametrize("name", ["sklearn", "matplotlib"])
def test_keras_alone_does_not_find_what_it_imports_for_wrappers_and_plots(tmp_path: Path, name: str):
    for package in ("keras", "other", name):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for package in ("keras", "other"):
        (tmp_path / package / "plots.py").write_text(IMPORTER.format(name=name))
    code = "import keras.plots, other.plots; print(keras.plots.found, other.plots.found)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    hidden, found = done.stdout.split(" ", 1)
    assert hidden == name and found.startswith("<module")


TINY = b'''"""A module."""


def clip(values: list[int], low: int = 0, *, strict: bool = False) -> list[int]:
    """Not less than `low`."""
    found = []
    for value in values:
        if value < low and not strict:
            found.append(low)
        elif value == low or strict:
            raise ValueError(f"{low + 1}")
        assert value > 1
    return sorted(zip(found, values, strict=True))
'''
CHANGES = {
    "def clip(values: list[int], low: int = 1, *, strict: bool = False) -> list[int]:",
    "def clip(values: list[int], low: int = -1, *, strict: bool = False) -> list[int]:",
    "def clip(values: list[int], low: int = 0, *, strict: bool = True) -> list[int]:",
    "if value <= low and not strict:", "if value < low or not strict:", "if not (value < low and (not strict)):",
    "pass", "elif value != low or strict:", "elif value == low and strict:", "elif not (value == low or strict):",
    "return list(zip(found, values, strict=True))", "return sorted(zip(found, values, strict=False))",
    "return sorted(zip(found, values, **{}))", "return sorted(zip(values, found, strict=True))",
}  # fmt: skip


def test_every_change_is_of_one_place_and_none_of_texts_asserts_and_types():
    found = mutants_of(TINY)
    assert {mutant.became for mutant in found} == CHANGES
    assert {mutant.was for mutant in found if mutant.became == "pass"} == {
        "found.append(low)", 'raise ValueError(f"{low + 1}")'
    }  # fmt: skip
    for mutant in found:
        before, after = TINY.decode().splitlines(), mutant.text.decode().splitlines()
        changed = [number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
        assert changed == [mutant.line - 1]


def test_a_choice_depends_on_the_seed_and_not_on_other_lines():
    found = choose(mutants_of(TINY), 4, seed=1)
    assert found == choose(mutants_of(TINY), 4, seed=1) != choose(mutants_of(TINY), 4, seed=2)
    assert len({mutant.line for mutant in found}) == 4
    moved = choose(mutants_of(b"import os\n\n" + TINY), 4, seed=1)
    assert [(each.was, each.became) for each in moved] == [(each.was, each.became) for each in found]


def test_equivalent_mutants_are_mutants_and_have_a_reason():
    listed = tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8"))
    for file, mutants in listed.items():
        known = {(each.was, each.became) for each in mutants_of((ROOT / file).read_bytes())}
        assert not [each for each in mutants if (each["was"], each["became"]) not in known or not each["reason"]], file


@pytest.mark.parametrize("file", PROMISES)
def test_every_promise_has_a_test_of_its_name(file: str):
    assert test_for.named_tests(ROOT / file)


TREE = {
    "shardmill/mix.py": "", "shardmill/plan.py": "from shardmill.mix import mix64",
    "shardmill/formats.py": 'FORMATS = {"one": Entry("shardmill.one:ONE"), "two": Entry("shardmill.two:TWO")}',
    "shardmill/reader.py": "def read():\n    from shardmill.formats import FORMATS", "shardmill/one.py": "",
    "shardmill/two.py": "import shardmill.mix", "tests/conftest.py": "from tests.server import server, other",
    "tests/server.py": "", "tests/models.py": "", "tests/shardmill/test_mix.py": "import shardmill.mix",
    "tests/test_plan.py": "from shardmill import plan",
    "tests/test_models.py": '"""Not shardmill.mix."""\nMODEL = "tests.models:linear"',
    "tests/test_server.py": "def test_it(server):\n    pass",
    "tests/test_reads_one.py": 'from shardmill.reader import read\nread("one")',
    "tests/test_all_formats.py": "from shardmill.formats import FORMATS",
}  # fmt: skip
COSTS = {"tests/shardmill/test_mix.py": {"fast": 9.0}, "tests/test_plan.py": {"fast": 1.0, "test": 2.0},
         "tests/test_all_formats.py": {"fast": 2.0}}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        # Its own test first, then the cheapest; one that was never measured is not cheap.
        ("shardmill/mix.py", ["test_mix", "test_all_formats", "test_plan"]),
        ("shardmill/one.py", ["test_all_formats", "test_reads_one"]),
        ("shardmill/two.py", ["test_all_formats"]),
        ("tests/models.py", ["test_models"]),
        ("tests/server.py", ["test_server"]),
    ],
)
def test_a_test_sees_what_it_imports_names_and_takes_as_a_fixture(file, tests, tmp_path, monkeypatch):
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    monkeypatch.setattr(test_for, "ROOT", tmp_path)
    monkeypatch.setattr(test_for, "COSTS", tmp_path / "costs.json")
    caches = (test_for.files, test_for.named_by, test_for.distances, test_for._costs)
    for each in caches:
        each.cache_clear()
    assert [test.stem for test in test_for.tests_for([tmp_path / file])] == tests
    for each in caches:
        each.cache_clear()


@pytest.mark.exhaustive
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("file", PROMISES)
def test_no_mutant_survives_that_is_not_listed(file: str):
    program = [sys.executable, str(Path("scripts") / "mutate.py"), file]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
