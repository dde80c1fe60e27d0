"""A server of Spark Connect on loopback, with two slots, from the JARs of pyspark's own package."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.quick_start import FOLDER
from tests.services.marked import MARK, QUICK_JVM, end_marked, free_ports
from tests.services.servers import start_server, wait_until_up

_ROOT = Path(__file__).parents[2]
_START_SECONDS = 240.0


@pytest.fixture(scope="session")
def spark_connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, `sc://127.0.0.1:PORT`."""
    from pyspark.sql.connect.client.reattach import ExecutePlanResponseReattachableIterator

    with running_connect(Path(sys.executable), tmp_path_factory.mktemp("connect")) as address:
        try:
            yield address
        finally:
            # To a server that has gone, clients here would go on for ten minutes to say what they have read. The names
            # of Spark 4.0 and 4.3.
            for name in ("shutdown", "shutdown_threadpool_if_idle"):
                getattr(ExecutePlanResponseReattachableIterator, name, lambda: None)()


@contextmanager
def running_connect(python: Path, folder: Path) -> Iterator[str]:
    """A server of the pyspark that `python` has, with its logs in `folder`; its address."""
    found = subprocess.run(
        [python, "-c", "import pyspark; print(pyspark.__path__[0])"], check=True, capture_output=True, text=True
    )
    home, [port], mark = Path(found.stdout.strip()), free_ports(1), f"connect-{secrets.token_hex(8)}"
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": f"{port}",
        "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": f"{folder}/scratch", "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.driver.extraJavaOptions": " ".join(QUICK_JVM),
    }  # fmt: skip
    options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    server_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    # Its Python workers find this checkout, as those of a cluster would find the wheel.
    environment = {
        **os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": str(python), MARK: mark,
        "PYTHONPATH": f"{FOLDER}{os.pathsep}{_ROOT}",
    }  # fmt: skip
    command = [home / "bin" / "spark-submit", "--master", "local[2]", *options, "--class", server_class]
    server = start_server(command, folder / "server.log", environment)
    try:
        wait_until_up("Spark Connect", lambda: _answers(port), [server], folder, _START_SECONDS)
        yield f"sc://127.0.0.1:{port}"
    finally:
        end_marked(mark)
        server.wait()


def _answers(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), 1).close()
    return True
