"""A Spark standalone cluster on loopback: a master and two workers with one slot each, from pyspark's own package.

It runs with the settings that examples/spark/secure.properties ships, so it knows only applications with its secret.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.quick_start import FOLDER
from tests.services.marked import MARK, QUICK_JVM, end_marked, free_ports, marked
from tests.services.servers import start_server, wait_until_up

NUM_SLOTS = 2
_START_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class SparkCluster:
    """A running cluster."""

    master: str
    """`spark://127.0.0.1:port`."""
    pages: str
    """The master's, over HTTP."""
    folder: Path
    mark: str
    """In the environment of all its processes."""
    secret: str
    """That master, workers and applications share."""

    @property
    def conf(self) -> Path:
        """The `SPARK_CONF_DIR` that holds the cluster's secret."""
        return self.folder / "conf"

    def write_conf(self) -> None:
        """Make `conf`, for who knows the secret."""
        self.conf.mkdir()
        defaults = self.conf / "spark-defaults.conf"
        defaults.touch(mode=0o600)
        defaults.write_text(
            f"spark.authenticate true\nspark.network.crypto.enabled true\nspark.authenticate.secret {self.secret}\n"
        )

    def num_workers(self) -> int:
        """Those that the master has let in and that are there."""
        with urllib.request.urlopen(f"{self.pages}/json/", timeout=60) as answer:
            return sum(each["state"] == "ALIVE" for each in json.load(answer)["workers"])

    def processes(self, part: str) -> dict[int, list[str]]:
        """The arguments of its processes that have one with `part`, by process id."""
        found = marked(self.mark).items()
        return {pid: arguments for pid, arguments in found if any(part in each for each in arguments)}

    def work_folders(self) -> list[Path]:
        """One of each executor there ever was, of all applications."""
        return sorted(self.folder.glob("work-*/app-*/*"))


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    folder = tmp_path_factory.mktemp("spark")
    port, *ui_ports = free_ports(2 + NUM_SLOTS)
    master, pages = f"spark://127.0.0.1:{port}", f"http://127.0.0.1:{ui_ports[0]}"
    cluster = SparkCluster(master, pages, folder, f"spark-{secrets.token_hex(8)}", secrets.token_hex(16))
    cluster.write_conf()
    address = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(ui_ports[0]))
    servers = [_start(cluster, "master.Master", *address)]
    try:
        servers += [start_worker(cluster, number, ui_port) for number, ui_port in enumerate(ui_ports[1:])]
        wait_until_up("Spark standalone", lambda: cluster.num_workers() == NUM_SLOTS, servers, folder, _START_SECONDS)
        yield cluster
    finally:
        end_marked(cluster.mark)
        for server in servers:
            server.wait()


def start_worker(cluster: SparkCluster, number: int, ui_port: int, host: str = "127.0.0.1") -> subprocess.Popen[bytes]:
    """One of one slot, that asks the master to let it in."""
    size = ("--host", host, "--cores", "1", "--memory", "1g", "--webui-port", str(ui_port))
    return _start(cluster, "worker.Worker", *size, "--work-dir", f"{cluster.folder}/work-{number}", cluster.master)


def _start(cluster: SparkCluster, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """As `start_server` does."""
    import pyspark

    home = Path(pyspark.__file__).parent
    # Nodes know nothing of this checkout.
    nodes = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    nodes |= {"SPARK_HOME": str(home), "SPARK_CONF_DIR": str(cluster.conf), "SPARK_LOCAL_IP": "127.0.0.1",
              "SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": " ".join(QUICK_JVM), MARK: cluster.mark,
              "SPARK_LOCAL_DIRS": str(cluster.folder / "scratch"), "PYTHONPATH": FOLDER}  # fmt: skip
    command = [home / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", *arguments]
    return start_server(command, cluster.folder / "servers.log", nodes)
