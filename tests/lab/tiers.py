"""What a test may start, and which command runs it (a plugin of pytest).

A test names what it starts: `@pytest.mark.starts("ranks")`; one that names nothing starts no process, and one that
starts something else fails. `make test-fast` runs the tests that start nothing, `make test` those and the ones with
`starts`, `make test-current` those of `CURRENT`, `make drill` the drills, `make test-all` everything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from dataclasses import dataclass, field

import pytest

from tests.lab import decoder

KINDS = ("decoder", "program", "command", "ranks", "server", "jvm")
TIERS = ("fast", "test", "current", "drill", "all")
# With the newest of everything (docs/decisions/0015-two-environments.md): the tests of what other projects release, and
# of those that start processes one of each kind. The first part of a test's name, by what it is there for.
CURRENT = {
    "pyarrow, pandas": (
        *(f"tests/etl/test_sources_{name}.py" for name in ("arrow", "iceberg", "lance", "parquet", "table")),
        *(f"tests/etl/test_{name}.py" for name in ("extra_columns", "table_values")),
        *(f"tests/shardmill/test_{name}.py" for name in ("formats", "parquet", "reader", "tfrecord")),
    ),
    "NumPy, OpenCV": ("tests/shardmill/images/",),
    "loaders": (
        *(f"tests/shardmill/test_{name}.py" for name in ("jax_loader", "loader", "loader_rows", "loader_transform")),
        "tests/test_other_readers.py",
    ),
    "stores": ("tests/shardmill/test_s3_store.py", "tests/shardmill/test_storage.py"),
    "TensorFlow, Keras, PyTorch": tuple(
        f"tests/train/test_{name}.py"
        for name in (
            "backends", "checkpoint", "drawn", "evaluate", "export", "models", "optimizer", "precision", "predict",
            "session", "torch_buckets", "torch_ddp", "worker",
        )
    ),
    "trackers": ("tests/train/test_mlflow.py", "tests/train/test_trackers.py"),
    "Spark": (
        "tests/shardmill/test_spark_start.py",
        "tests/etl/test_engines.py::test_every_engine_writes_the_shards_of_units_in_order[spark]",
        *(
            f"tests/test_two_environments.py::test_the_chain_runs_on_spark_without_horovod[{strategy}]"
            for strategy in ("multi_worker_mirrored", "torch_ddp")
        ),
    ),
    "Airflow": (
        "tests/airflow_dags/test_predictions.py",
        "tests/airflow_dags/test_shardmill_dag.py::test_a_dag_for_each_config_and_none_without_a_folder",
    ),
}  # fmt: skip
# What only the environment with Python 3.11 has.
_OLDER = frozenset({"horovod", "petastorm"})
# Fixtures that start something for all tests that use them, and those that only drills may use.
_STARTED_BY = {"s3_server": "server", "spark": "jvm"}
_OF_DRILLS = frozenset(
    {"api_server", "azurite", "demo", "fake_gcs", "gateway", "hdfs_server", "spark_cluster", "spark_connect"}
    | {"two_hosts", "versitygw", "yarn_cluster"}
)
# https://docs.python.org/3/library/audit_events.html; "tests.fork" is raised by tests/quick_start/forked.py.
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "tests.fork", "socket.bind"})
# Who starts a process says what it is: the innermost file on the stack that is listed here.
_KIND_OF_FILE = {
    # What a package starts while it is imported (PyTorch asks ldconfig) is no process of the test.
    "<frozen importlib": None,
    "/tests/services/": "server",
    "/tests/lab/commands.py": "command",
    "/train/launching/": "ranks",
    "/tests/train/forked_ranks.py": "ranks",
    "/pyspark/": "jvm",
    "/shardmill/images/sandbox.py": "decoder",
}
# While tests are written: everything is allowed, and `--costs FILE` says what each has started.
IS_RECORDING = os.environ.get("SHARDMILL_STARTS") == "record"


@dataclass
class _Running:
    """The test that runs now."""

    may_start: frozenset[str] | None
    """None: anything."""
    started: set[str] = field(default_factory=set)
    has_failed: bool = False


_running: _Running | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier alone (tests/lab/tiers.py)")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        f"starts(kind, ...): the test starts processes: {', '.join(KINDS)}",
        f"needs(package): with Python 3.11 only, which alone has the package: {', '.join(sorted(_OLDER))}",
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
        needs = {package for mark in item.iter_markers("needs") for package in mark.args}
        if not needs <= _OLDER:
            raise pytest.UsageError(f"{item.nodeid} needs {sorted(needs - _OLDER)}; known: {', '.join(sorted(_OLDER))}")
        # By the version: where 3.11 lacks one, its tests have to fail.
        if needs and sys.version_info >= (3, 12):
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(needs)}, which Python 3.11 has"))
    tier = config.getoption("--tier")
    if tier in (None, "all"):
        return
    chosen = [_is_in_tier(item, tier) for item in items]
    config.hook.pytest_deselected(items=[item for item, is_chosen in zip(items, chosen, strict=True) if not is_chosen])
    items[:] = [item for item, is_chosen in zip(items, chosen, strict=True) if is_chosen]


def _is_in_tier(item: pytest.Item, tier: str) -> bool:
    if tier == "current":
        chosen = tuple(name for names in CURRENT.values() for name in names)
        return item.nodeid in chosen or (tier_of(item) == "fast" and item.nodeid.startswith(chosen))
    return tier_of(item) in {"fast": ("fast",), "test": ("fast", "test"), "drill": ("drill",)}[tier]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _running
    is_free = IS_RECORDING or tier_of(item) in ("drill", "all")
    _running = _Running(None if is_free else kinds_of(item))
    decoder.starts_children = tier_of(item) in ("drill", "all") or "decoder" in kinds_of(item)
    try:
        return (yield)
    finally:
        _running = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Behind the last test ends what the whole session has used."""
    if _running is not None and nextitem is None:
        _running.may_start = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if _running is not None and call.when == "teardown":
        item.user_properties.append(("starts", sorted(_running.started)))
    report = yield
    if _running is None or _running.may_start is None:
        return report
    _running.has_failed |= report.failed
    unnamed = _running.started - _running.may_start
    if call.when == "teardown" and unnamed and not _running.has_failed:
        # Whoever started it went on without.
        report.outcome = "failed"
        report.longrepr = _unnamed(unnamed)
    return report


def _see_start(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: it sees each start of a process before it happens."""
    # In this order: at the interpreter's end both are None.
    if _running is None or event not in _STARTS:
        return
    kind = _kind_of_start()
    # A context of Spark binds a port also where an earlier test has started the JVM.
    if kind is None or (event == "socket.bind" and kind != "jvm"):
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
            # Forks are made from it; it counts with them.
            return None
        # A command that is called in this process is no process; what it starts is what it would be in any test.
        is_command_here = file.endswith("/tests/lab/commands.py") and frame.f_code.co_name == "in_process"
        for part, kind in _KIND_OF_FILE.items():
            if part in file and not is_command_here:
                return kind
        frame = frame.f_back
    return "program"
