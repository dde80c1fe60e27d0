"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.demo import demo
from tests.services.faulty_store import faulty
from tests.services.s3 import s3_bucket, s3_server

__all__ = ["demo", "faulty", "s3_bucket", "s3_server"]

# A failing example prints the blob that reproduces it; no deadline, because these machines are noisy.
settings.register_profile("shardmill", deadline=None, print_blob=True)
settings.load_profile("shardmill")

# Whoever starts the tests in the background passes on that Ctrl-C is ignored; then the commands that tests interrupt
# would ignore it too. A terminal does not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Roughly, on two cores; only the order in which files start depends on it.
_SECONDS_OF_A_TEST = {"train": 4.0, "etl": 3.0, "pipeline": 2.0, "airflow_dags": 20.0, "tests": 5.0}
# They share the one run of the demo.
_FILES_OF_THE_DEMO = ("test_readme.py", "test_whole_pipeline.py")


def scope_of(nodeid: str) -> str:
    """Tests of one scope run in one process, because they share fixtures: those of a file, and those of the demo."""
    file = nodeid.partition("::")[0]
    return "demo" if file.endswith(_FILES_OF_THE_DEMO) else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long scopes start first, the demo's before all; inside a scope the order stays as written."""
    seconds: Counter[str] = Counter()
    for item in items:
        seconds[scope_of(item.nodeid)] += _SECONDS_OF_A_TEST.get(item.path.parent.name, 0.1)
    items.sort(key=lambda item: (scope_of(item.nodeid) != "demo", -seconds[scope_of(item.nodeid)]))


class ScopeScheduling(LoadScopeScheduling):
    """Hands out whole scopes. (`--dist loadgroup` sets no groups with pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ScopeScheduling(config, log)


_EXIT_STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End without exit handlers if both frameworks were used in this process, which only tests do.

    The copies of LLVM in TensorFlow and in PyTorch's Triton share symbols: the destructors of the one have crashed in
    the other, and made exit code 139 of tests that had passed.
    """
    is_worker = hasattr(config, "workerinput")
    if not is_worker and {"tensorflow", "torch"} <= sys.modules.keys() and _EXIT_STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_EXIT_STATUS])
