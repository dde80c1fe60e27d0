"""What a test may start, which command runs it, and what it may cost (a plugin of pytest).

A test names what it starts: `@pytest.mark.starts("ranks")`; one that names nothing starts no process, and one that
starts something else fails. `make test-fast` runs the tests that start nothing, `make test` those and the ones with `starts`,
`make drill` the drills, `make test-all` everything. Processor time is counted for each test, and held against
`tests/budget.toml`: it is steady where the time of the wall is not.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.lab import decoder

KINDS = ("decoder", "program", "command", "ranks", "server", "jvm")
TIERS = ("fast", "test", "drill", "all")
BUDGET = tomllib.loads((Path(__file__).parents[1] / "budget.toml").read_text(encoding="utf-8"))
# Fixtures that start something for all tests that use them, and those that only drills may use.
_STARTED_BY = {"s3_server": "server", "spark": "jvm"}
_OF_DRILLS = frozenset(
    {"api_server", "demo", "gateway", "hdfs_server", "spark_cluster", "two_hosts", "versitygw", "yarn_cluster"}
)
# https://docs.python.org/3/library/audit_events.html; "tests.fork" is raised by tests/quick_start/forked.py.
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "tests.fork"})
# Who starts a process says what it is: the innermost file on the stack that is listed here.
_KIND_OF_FILE = {
    "/tests/services/": "server",
    "/tests/pipeline/command.py": "command",
    "/tests/lab/commands.py": "command",
    "/train/launching/": "ranks",
    "/tests/train/forked_ranks.py": "ranks",
    "/pyspark/": "jvm",
    "/shardmill/images/": "decoder",
}
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class _Running:
    """The test that runs now."""

    may_start: frozenset[str] | None
    """None: anything."""
    started: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)


_running: _Running | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier alone (tests/lab/tiers.py)")
    parser.addoption(
        "--costs", help="append a JSON line for each test to this file: what it started, processor seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        f"starts(kind, ...): the test starts processes: {', '.join(KINDS)}",
        "drill: a slow test of a real fault, server or cluster; `make drill` runs it",
        "exhaustive: the rest of a product of which `make test` runs a part; `make test-all` runs it",
    ):
        config.addinivalue_line("markers", line)
    sys.addaudithook(_see_start)


def kinds_of(item: pytest.Item) -> frozenset[str]:
    """What the test says that it starts."""
    return frozenset(kind for mark in item.iter_markers("starts") for kind in mark.args)


def tier_of(item: pytest.Item) -> str:
    """The least tier that runs the test."""
    if item.get_closest_marker("exhaustive"):
        return "all"
    if item.get_closest_marker("drill"):
        return "drill"
    return "test" if item.get_closest_marker("starts") else "fast"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & _OF_DRILLS and not item.get_closest_marker("drill"):
            item.add_marker(pytest.mark.drill)
        for fixture in fixtures & _STARTED_BY.keys():
            item.add_marker(pytest.mark.starts(_STARTED_BY[fixture]))
        if unknown := kinds_of(item) - set(KINDS):
            raise pytest.UsageError(f"{item.nodeid} starts {sorted(unknown)}; known: {', '.join(KINDS)}")
    tier = config.getoption("--tier")
    if tier in (None, "all"):
        return
    wanted = {"fast": {"fast"}, "test": {"fast", "test"}, "drill": {"drill"}}[tier]
    config.hook.pytest_deselected(items=[item for item in items if tier_of(item) not in wanted])
    items[:] = [item for item in items if tier_of(item) in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _running
    is_free = tier_of(item) in ("drill", "all") or os.environ.get("SHARDMILL_STARTS") == "record"
    _running = _Running(None if is_free else kinds_of(item))
    decoder.starts_children = tier_of(item) in ("drill", "all") or "decoder" in kinds_of(item)
    try:
        return (yield)
    finally:
        if (costs := item.config.getoption("--costs")) and _running is not None:
            line = {"test": item.nodeid, "tier": tier_of(item), "starts": sorted(_running.started), **_running.seconds}
            with open(costs, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        _running = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _running is not None and call.when == "teardown" and _running.may_start is not None:
        unnamed = _running.started - _running.may_start
        if unnamed and report.passed:
            report.outcome = "failed"
            report.longrepr = _unnamed(unnamed)
    return report


def _see_start(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: it sees each start of a process before it happens."""
    if event not in _STARTS or _running is None:
        return
    if (kind := _kind_of_start()) is None:
        return
    _running.started.add(kind)
    if _running.may_start is not None and kind not in _running.may_start:
        pytest.fail(_unnamed({kind}))


def _unnamed(kinds: set[str]) -> str:
    named = ", ".join(f'"{kind}"' for kind in sorted(kinds))
    return f"this test starts a process ({named}): mark it with @pytest.mark.starts({named}), or do without"


def _kind_of_start() -> str | None:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("/tests/quick_start/forked.py") and frame.f_code.co_name == "_server":
            # What forks are made from is no process of the test.
            return None
        for part, kind in _KIND_OF_FILE.items():
            if part in file:
                return kind
        frame = frame.f_back
    return "program"


# What a test costs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _counted("setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _counted("call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield from _counted("teardown"))
    finally:
        if _running is not None:
            item.user_properties.append(("processor_seconds", dict(_running.seconds)))


def _counted(phase: str) -> Generator[None, object, object]:
    before = processor_seconds()
    try:
        return (yield)
    finally:
        if _running is not None:
            _running.seconds[phase] = round(processor_seconds() - before, 3)


def processor_seconds() -> float:
    """Of this process, of its children that have ended, and of all that descend from it now."""
    times = os.times()
    return (
        time.process_time()
        + times.children_user
        + times.children_system
        + sum(map(_seconds_of, _descendants(os.getpid())))
    )


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


class Budget:
    """Adds up what the tests of each folder cost; registered where the reports of all processes arrive."""

    def __init__(self, tier: str | None) -> None:
        self._tier = tier
        self._folders: defaultdict[str, float] = defaultdict(float)
        self._slow: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        for name, seconds in report.user_properties:
            if name == "processor_seconds" and isinstance(seconds, dict):
                self._folders[folder_of(report.nodeid)] += sum(seconds.values())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self._folders.values()) < 5:
            return
        terminalreporter.section("processor seconds")
        for folder, seconds in sorted(self._folders.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"{seconds:8.1f}  {folder}")


def folder_of(nodeid: str) -> str:
    """`tests/train` of `tests/train/test_auto.py::...`; images count with the library."""
    return "/".join(nodeid.partition("::")[0].split("/")[:-1][:2])
