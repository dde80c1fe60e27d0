"""A real YARN on loopback: Apache's ResourceManager and one NodeManager, over the HDFS of tests."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.services.hadoop import jars, pyspark_jars, start_java, write_settings
from tests.services.hdfs import HdfsServer
from tests.services.marked import MARK, end_marked, free_ports
from tests.services.servers import CACHE, wait_until_up

_START_SECONDS = 120.0
# Not the one jar from which HDFS runs: half of it looks for JAXB under another name, and so its ResourceManager answers
# in another form than documented, or breaks off.
_COORDINATES = tuple(
    f"org.apache.hadoop:hadoop-{name}:3.4.1"
    for name in (
        "common", "hdfs-client", "yarn-server-resourcemanager", "yarn-server-nodemanager",
        "yarn-server-timelineservice",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class YarnCluster:
    """A running cluster with room for a driver and two executors of 512 MB."""

    folder: Path
    mark: str
    url: str
    """Of the ResourceManager's pages."""
    hdfs: HdfsServer

    def applications(self, name: str) -> list[dict[str, Any]]:
        """What the ResourceManager knows of those with this name, in the order in which they were submitted."""
        with urllib.request.urlopen(f"{self.url}/ws/v1/cluster/apps", timeout=30) as answer:
            found = json.load(answer)["apps"].get("app", [])
        return sorted((each for each in found if each["name"] == name), key=lambda each: each["id"])

    @property
    def conf(self) -> Path:
        """Its `HADOOP_CONF_DIR`, that of HDFS included."""
        return self.folder / "conf"

    @property
    def container_logs(self) -> Path:
        """What the containers of all applications have printed, and how they were started."""
        return self.folder / "logs"


@pytest.fixture(scope="session")
def yarn_cluster(hdfs_server: HdfsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[YarnCluster]:
    folder = tmp_path_factory.mktemp("yarn")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(8)]
    cluster = YarnCluster(folder, f"yarn-{secrets.token_hex(8)}", f"http://{addresses[0]}", hdfs_server)
    _configure(cluster, addresses)
    path = ":".join(map(str, (cluster.conf, *jars(*_COORDINATES, cache=CACHE / "yarn"))))
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for name in ("resourcemanager.ResourceManager", "nodemanager.NodeManager"):
            opened = ("--add-opens", "java.base/java.lang=ALL-UNNAMED", f"-Dhadoop.tmp.dir={folder}/tmp")
            main = f"org.apache.hadoop.yarn.server.{name}"
            servers.append(start_java(folder / "servers.log", path, main, options=opened, **{MARK: cluster.mark}))
        nodes = f"{cluster.url}/ws/v1/cluster/nodes"
        wait_until_up("YARN", lambda: _has_node(nodes), servers, folder, _START_SECONDS)
        yield cluster
    finally:
        end_marked(cluster.mark)
        for server in servers:
            server.wait()


def _configure(cluster: YarnCluster, addresses: list[str]) -> None:
    shutil.copytree(cluster.hdfs.conf, cluster.conf)
    manager, node = "yarn.resourcemanager", "yarn.nodemanager"
    names = (
        f"{manager}.webapp.address", f"{manager}.address", f"{manager}.scheduler.address",
        f"{manager}.resource-tracker.address", f"{manager}.admin.address",
        f"{node}.address", f"{node}.localizer.address", f"{node}.webapp.address",
    )  # fmt: skip
    settings = {
        f"{manager}.hostname": "127.0.0.1",
        f"{node}.hostname": "127.0.0.1",
        f"{node}.resource.memory-mb": "4096",
        f"{node}.resource.cpu-vcores": "4",
        f"{node}.vmem-check-enabled": "false",
        f"{node}.pmem-check-enabled": "false",
        # A node checks its disk once, when it starts, even if its checker is disabled; 90 % in use would be too much.
        f"{node}.disk-health-checker.enable": "false",
        f"{node}.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
        f"{node}.local-dirs": f"{cluster.folder}/local",
        f"{node}.log-dirs": str(cluster.container_logs),
        # The logs of containers stay for who looks for a reason.
        f"{node}.delete.debug-delay-sec": "3600",
        f"{node}.env-whitelist": f"JAVA_HOME,{MARK}",
        # Containers are handed out with heartbeats.
        f"{manager}.nodemanagers.heartbeat-interval-ms": "100",
        "yarn.scheduler.minimum-allocation-mb": "256",
        "yarn.application.classpath": f"{pyspark_jars()}/*",
    }
    write_settings(cluster.conf / "yarn-site.xml", dict(zip(names, addresses, strict=True)) | settings)
    queue = "yarn.scheduler.capacity"
    write_settings(
        cluster.conf / "capacity-scheduler.xml",
        {f"{queue}.root.queues": "default", f"{queue}.root.default.capacity": "100",
         f"{queue}.maximum-am-resource-percent": "0.5"},
    )  # fmt: skip


def _has_node(nodes_json: str) -> bool:
    with urllib.request.urlopen(nodes_json, timeout=30) as answer:
        return any(node["state"] == "RUNNING" for node in (json.load(answer)["nodes"] or {}).get("node", []))
