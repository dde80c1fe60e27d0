"""The processor time of each test, held against `tests/budget.toml` (a plugin of pytest).

It counts this process, children that have ended and all that descend from it now. `tests/costs.json` keeps what each
file took in the last run that was told to `--write-costs`: the longest start first, and `make test-for` says what it
will take. Budgets are those of that run's machine: if all files take longer, as beside other load on the same core, the
machine is slower, and no folder has grown.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from statistics import median

import pytest

from tests.lab.scale import IS_FULL
from tests.lab.tiers import IS_RECORDING, tier_of

_TESTS = Path(__file__).parents[1]
COSTS_FILE = _TESTS / "costs.json"
BUDGET = tomllib.loads((_TESTS / "budget.toml").read_text(encoding="utf-8"))
_TOLERANCE = 1.15
# A thread of a core works more slowly while the other one does, and whichever test is the first to compute with a
# framework pays for its start (up to 3 s): a test over its limit is listed, one far over it fails.
_FAR = 5.0
_FRAMEWORKS = frozenset({"tensorflow", "keras", "torch", "jax", "pyspark", "sklearn", "pytorch_lightning"})
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_COST = "processor_seconds"
_SECONDS = pytest.StashKey[dict[str, float]]()


def read_costs() -> dict[str, dict[str, float]]:
    """Processor seconds of each test file by tier, as they were last written."""
    return json.loads(COSTS_FILE.read_text(encoding="utf-8")) if COSTS_FILE.exists() else {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-costs", action="store_true", help=f"write what each file took into {COSTS_FILE.name}")
    parser.addoption(
        "--costs", help="append a JSON line for each test to this file: what it started, processor seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Sums(config), "sums of costs")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_SECONDS] = {}
    return (yield from _counted(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    had = _FRAMEWORKS & sys.modules.keys()
    outcome = yield from _counted(item, "call")
    limit = None if IS_RECORDING or IS_FULL else BUDGET["test_seconds"].get(tier_of(item))
    if limit and item.stash[_SECONDS]["call"] > _FAR * limit and had == _FRAMEWORKS & sys.modules.keys():
        pytest.fail(f"took {item.stash[_SECONDS]['call']:.1f} processor seconds; {limit} is the limit of its tier")
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield from _counted(item, "teardown"))
    finally:
        item.user_properties.append((_COST, {"tier": tier_of(item), **item.stash[_SECONDS]}))


def _counted(item: pytest.Item, phase: str) -> Generator[None, object, object]:
    before = processor_seconds()
    try:
        return (yield)
    finally:
        item.stash[_SECONDS][phase] = round(processor_seconds() - before, 3)


def processor_seconds() -> float:
    times = os.times()
    ended = times.children_user + times.children_system
    return time.process_time() + ended + sum(map(_seconds_of, _descendants(os.getpid())))


def _descendants(pid: int) -> Iterator[int]:
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            for child in Path(task.path, "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return


def _seconds_of(pid: int) -> float:
    """With its own children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / _CLOCK_TICKS


def folder_of(file: str) -> str:
    """`tests/train` of `tests/train/test_auto.py`; images count with the library."""
    return "/".join(file.split("/")[:-1][:2])


def slowness_of(files: Mapping[str, Mapping[str, float]], recorded: Mapping[str, Mapping[str, float]]) -> float:
    """How many times as long as recorded the files take: the median of those that took a second or more; at least 1."""
    before = {file: sum(recorded.get(file, {}).get(tier, 0.0) for tier in tiers) for file, tiers in files.items()}
    ratios = [sum(tiers.values()) / before[file] for file, tiers in files.items() if before[file] >= 1]
    return max(1.0, median(ratios)) if ratios else 1.0


class _Sums:
    """Adds up the reports of all processes, in the one that prints the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._files: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._slow: list[str] = []
        self._collecting = time.process_time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties)
        if report.when != "teardown" or not isinstance(cost := found.get(_COST), Mapping):
            return
        seconds = {phase: cost.get(phase, 0.0) for phase in ("setup", "call", "teardown")}
        self._files[report.nodeid.partition("::")[0]][cost["tier"]] += sum(seconds.values())
        if seconds["call"] > BUDGET["test_seconds"].get(cost["tier"], float("inf")):
            self._slow.append(f"{seconds['call']:8.1f}  {report.nodeid}")
        if path := self._config.getoption("--costs"):
            with open(path, "a", encoding="utf-8") as file:
                line = {"test": report.nodeid, "tier": cost["tier"], "starts": found.get("starts", []), **seconds}
                file.write(json.dumps(line) + "\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._config.getoption("--write-costs"):
            costs = read_costs()
            for file, tiers in self._files.items():
                costs.setdefault(file, {}).update({tier: round(seconds, 1) for tier, seconds in tiers.items()})
            costs = {file: costs[file] for file in sorted(costs) if (_TESTS.parent / file).exists()}
            lines = (f"  {json.dumps(file)}: {json.dumps(tiers, sort_keys=True)}" for file, tiers in costs.items())
            COSTS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        if self._above() and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _folders(self) -> dict[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for file, tiers in self._files.items():
            sums[folder_of(file)] += sum(tiers.values())
        return dict(sorted(sums.items(), key=lambda pair: -pair[1]))

    def _above(self) -> list[str]:
        """Folders over their budget, if all tests of a tier have run."""
        if not self._is_whole():
            return []
        budget, slowness = BUDGET.get(self._config.getoption("--tier") or "", {}), self._slowness()
        return [
            f"{folder}: {seconds:.0f} processor seconds; its budget is {budget[folder]}, times {slowness:.2f}"
            for folder, seconds in self._folders().items()
            if seconds > _TOLERANCE * slowness * budget.get(folder, float("inf"))
        ]

    def _slowness(self) -> float:
        return slowness_of(self._files, read_costs())

    def _is_whole(self) -> bool:
        option = self._config.getoption
        return self._config.args_source == self._config.ArgsSource.TESTPATHS and not (option("-k") or option("-m"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._is_whole():
            return
        terminalreporter.section("processor seconds")
        for folder, seconds in self._folders().items():
            terminalreporter.line(f"{seconds:8.1f}  {folder}")
        terminalreporter.line(f"{sum(self._folders().values()):8.1f}  all")
        terminalreporter.line(f"{self._slowness():8.2f}  times what tests/costs.json says, by the median of its files")
        for line in sorted(self._slow, reverse=True):
            terminalreporter.line(f"over its limit: {line}")
        for line in self._above():
            terminalreporter.line(f"OVER BUDGET: {line} (tests/budget.toml)", red=True)
