"""A real HDFS on loopback for tests: Apache's NameNode and DataNode, from one jar beside pyspark's."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

# Of the release that pyspark 4.0 brings; fetched once, into the user's cache, by the Ivy inside pyspark.
_JAR = "org.apache.hadoop:hadoop-client-minicluster:3.4.1"
_SERVERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardmill" / "servers"
_START_SECONDS = 120.0
_FETCH_SECONDS = 300.0
_FETCH = f"""
import sys
from pyspark.sql import SparkSession
SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config(
    "spark.jars.packages", {_JAR!r}).config("spark.jars.ivy", sys.argv[1]).config(
    "spark.jars.excludes", "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime,"
    "junit:junit,org.hamcrest:hamcrest-core").getOrCreate().stop()
"""


@dataclass(frozen=True, slots=True)
class HdfsServer:
    """A running file system of one DataNode."""

    uri: str
    """`hdfs://127.0.0.1:port`."""
    folder: Path
    class_path: str

    @property
    def conf(self) -> Path:
        """Its `HADOOP_CONF_DIR`."""
        return self.folder / "conf"

    def set_space_quota(self, path: str, size: str) -> None:
        """Files below the folder `path` may take `size` bytes in all."""
        tool = _start(self.folder, self.class_path, "tools.DFSAdmin", "-setSpaceQuota", size, path)
        assert tool.wait(_START_SECONDS) == 0


@pytest.fixture(scope="session")
def hdfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsServer]:
    folder = tmp_path_factory.mktemp("hdfs")
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(5)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    uri = f"hdfs://127.0.0.1:{ports[0]}"
    _configure(folder / "conf", uri, ports[1:], folder)
    class_path = f"{folder}/conf:{_jar()}:{_pyspark_jars()}/*"
    _start(folder, class_path, "server.namenode.NameNode", "-format", "-nonInteractive").wait(_START_SECONDS)
    servers = [_start(folder, class_path, f"server.{name}") for name in ("namenode.NameNode", "datanode.DataNode")]
    try:
        _wait_until_it_writes(uri, servers, folder)
        yield HdfsServer(uri, folder, class_path)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture
def hdfs_root(hdfs_server: HdfsServer) -> str:
    """`hdfs://` URI of a folder that is not there yet."""
    return f"{hdfs_server.uri}/test-{uuid.uuid4().hex[:12]}"


def _jar() -> Path:
    def found() -> Path | None:
        return next((_SERVERS / "jars").glob("*hadoop-client-minicluster-3.4.1.jar"), None)

    # Test processes ask at once, and a jar that is still copied is none.
    _SERVERS.mkdir(parents=True, exist_ok=True)
    with open(_SERVERS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found() is None:
            subprocess.run([sys.executable, "-c", _FETCH, str(_SERVERS)], check=True, timeout=_FETCH_SECONDS)
        jar = found()
    assert jar is not None, f"{_JAR} is not in {_SERVERS}/jars; it comes from Maven Central"
    return jar


def _pyspark_jars() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent / "jars"


def _configure(conf: Path, uri: str, ports: list[int], folder: Path) -> None:
    http, data, data_http, data_ipc = (f"127.0.0.1:{port}" for port in ports)
    files = {
        "core-site.xml": {"fs.defaultFS": uri},
        "hdfs-site.xml": {
            "dfs.replication": "1",
            "dfs.namenode.name.dir": f"{folder}/name",
            "dfs.datanode.data.dir": f"{folder}/data",
            "dfs.namenode.http-address": http,
            "dfs.datanode.address": data,
            "dfs.datanode.http.address": data_http,
            "dfs.datanode.ipc.address": data_ipc,
            "dfs.datanode.hostname": "127.0.0.1",
        },
    }
    conf.mkdir()
    for name, settings in files.items():
        rows = (f"<property><name>{key}</name><value>{value}</value></property>" for key, value in settings.items())
        (conf / name).write_text(f"<configuration>{''.join(rows)}</configuration>")


def _start(folder: Path, class_path: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    java = f"{os.environ['JAVA_HOME']}/bin/java" if "JAVA_HOME" in os.environ else "java"
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            [java, "-Xmx512m", "-cp", class_path, f"org.apache.hadoop.hdfs.{name}", *arguments],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_until_it_writes(uri: str, servers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    from shardmill.errors import StorageError
    from shardmill.stores import open_store

    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            open_store(uri).put("ready", b"")
            open_store(uri).put("ready", b"written by a DataNode")
            return
        except StorageError as error:
            logs = "".join(log.read_text()[-1000:] for log in folder.glob("*.log"))
            assert all(server.poll() is None for server in servers), f"HDFS does not start: {logs}"
            assert time.monotonic() < deadline, f"HDFS does not start: {error} {logs}"
            time.sleep(0.5)
