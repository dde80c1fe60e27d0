"""Fixtures for all tests."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

from tests.demo import demo
from tests.lab import costs, tiers
from tests.lab.scale import usually
from tests.quick_start import pytest_sessionstart
from tests.scheduling import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from tests.services.clouds import azure, azure_container, azurite, fake_gcs, gcs, gcs_bucket
from tests.services.faulty_store import faulty
from tests.services.hdfs import hdfs_root, hdfs_server
from tests.services.hosts import two_hosts
from tests.services.kubernetes import api_server
from tests.services.s3 import s3_bucket, s3_server
from tests.services.spark_connect import spark_connect
from tests.services.spark_standalone import spark_cluster
from tests.services.versitygw import gateway, gateway_bucket, versitygw
from tests.services.yarn import yarn_cluster

# Before PyTorch is loaded, here and in every process that tests start: threads that wait for work sleep. They look for
# it in a loop otherwise, and take the core that another process would use: 12 processor seconds in place of 0.7 for 12
# steps of a small model on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from tests.lab.datasets import SharedDatasets

__all__ = [
    "api_server", "azure", "azure_container", "azurite", "demo", "fake_gcs", "faulty", "gateway", "gateway_bucket",
    "gcs", "gcs_bucket", "hdfs_root", "hdfs_server",
    "pytest_collection_modifyitems", "pytest_sessionstart", "pytest_xdist_make_scheduler", "s3_bucket", "s3_server",
    "spark_cluster", "spark_connect", "two_hosts", "versitygw", "yarn_cluster",
]  # fmt: skip


@pytest.fixture(scope="session")
def shared_dataset(tmp_path_factory: pytest.TempPathFactory) -> SharedDatasets:
    from tests.lab.datasets import SharedDatasets

    return SharedDatasets(tmp_path_factory.mktemp)


# A failing example prints the blob that reproduces it; no deadline, because these machines are noisy.
settings.register_profile("shardmill", max_examples=usually(25, 500), deadline=None, print_blob=True)
settings.load_profile("shardmill")

# Whoever starts the tests in the background passes on that Ctrl-C is ignored; then the commands that tests interrupt
# would ignore it too. A terminal does not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(tiers, "tiers")
    pluginmanager.register(costs, "costs")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`faulthandler_timeout` of pyproject.toml would end a test whose own mark gives it longer."""
    mark = item.get_closest_marker("timeout")
    if mark and mark.args and mark.args[0] > float(item.config.getini("faulthandler_timeout")) / 2:
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(2 * mark.args[0], exit=True, file=stderr)


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
