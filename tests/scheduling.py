"""The order in which test files start, and which of two processes runs them (a plugin of pytest-xdist)."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.lab.costs import read_costs
from tests.lab.tiers import tier_of

# Of a test of a file that was never measured; only the order in which files start depends on it.
_SECONDS_OF_A_TEST = 0.3
# What takes long to start, and the files that share it.
_SHARED = {
    "demo": ("test_documented_commands.py", "test_whole_pipeline.py"),
    "local spark": (
        "test_engines.py",
        "etl/test_job.py",
        "etl/test_predictions.py",
    ),
    "spark": ("test_spark_standalone.py", "test_spark_s3.py"),
    "hdfs": (
        "test_hdfs_store.py",
        "test_cloud_stores.py",
        "test_storage.py",
        "test_remote_chain.py",
        "test_yarn.py",
        "test_on_yarn.py",
    ),
}


def scope_of(nodeid: str) -> str:
    """Tests of one scope run in one process, because they share fixtures: those of a file, or of a few files."""
    file = nodeid.partition("::")[0]
    return next(
        (scope for scope, files in _SHARED.items() if f"/{file}".endswith(tuple(f"/{each}" for each in files))), file
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long scopes start first, those of several files before all; inside a scope the order stays as written.

    One process alone runs the files in the order in which it was given them.
    """
    if not hasattr(config, "workerinput"):
        return
    costs, tiers = read_costs(), {tier_of(item) for item in items}
    seconds: defaultdict[str, float] = defaultdict(float)
    for file, num_tests in Counter(item.nodeid.partition("::")[0] for item in items).items():
        measured = sum(cost for tier, cost in costs.get(file, {}).items() if tier in tiers)
        seconds[scope_of(file)] += measured or _SECONDS_OF_A_TEST * num_tests
    items.sort(key=lambda item: (scope_of(item.nodeid) not in _SHARED, -seconds[scope_of(item.nodeid)]))


class ScopeScheduling(LoadScopeScheduling):
    """Hands out whole scopes. (`--dist loadgroup` sets no groups with pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _reschedule(self, node: Any) -> None:
        """A process begins a test only when it knows the next one, or that there is none; so it is given two, or told.

        xdist gives one scope at a time, and says that there is no other after the next test that finishes. The process
        in the place of one that died may get a scope with a single test that is left: it waited, and the run with it.
        """
        if node not in self.registered_collections:
            # It has yet to find the tests.
            return
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()

    def remove_node(self, node: Any) -> str | None:
        """What a process that died has finished is not handed out again.

        xdist would: a process that is given nothing but finished scopes waits forever, and so did the whole run.
        """
        workload = self.assigned_work[node]
        for scope in [scope for scope, tests in workload.items() if all(tests.values())]:
            del workload[scope]
        return super().remove_node(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ScopeScheduling(config, log)
