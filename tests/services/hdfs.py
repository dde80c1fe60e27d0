"""A real HDFS on loopback for tests: Apache's NameNode and DataNode, from one jar beside pyspark's."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.hadoop import class_path, start_java, write_settings
from tests.services.marked import free_ports
from tests.services.servers import wait_until_up

_START_SECONDS = 240.0


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
        self._run("tools.DFSAdmin", "-setSpaceQuota", size, path)

    def fetch_token(self, file: Path) -> None:
        """A delegation token of this process's user, as YARN puts one beside each container."""
        self._run("tools.DelegationTokenFetcher", "--renewer", "yarn", str(file))

    def _run(self, name: str, *arguments: str) -> None:
        assert _start(self.folder, self.class_path, name, *arguments).wait(_START_SECONDS) == 0, name


@pytest.fixture(scope="session")
def hdfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsServer]:
    folder = tmp_path_factory.mktemp("hdfs")
    ports = free_ports(5)
    uri = f"hdfs://127.0.0.1:{ports[0]}"
    _configure(folder / "conf", uri, ports[1:], folder)
    path = class_path(folder / "conf")
    servers = [_start(folder, path, "server.namenode.NameNode", "-format", "-nonInteractive")]
    try:
        assert servers.pop().wait(_START_SECONDS) == 0, (folder / "server.namenode.NameNode.log").read_text()[-3000:]
        servers += [_start(folder, path, f"server.{name}") for name in ("namenode.NameNode", "datanode.DataNode")]
        wait_until_up("HDFS", lambda: _writes(uri), servers, folder, _START_SECONDS)
        yield HdfsServer(uri, folder, path)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture
def hdfs_root(hdfs_server: HdfsServer) -> str:
    """`hdfs://` URI of a folder that is not there yet."""
    return f"{hdfs_server.uri}/test-{uuid.uuid4().hex[:12]}"


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
            # Without Kerberos, which is what usually makes a NameNode give and take them.
            "dfs.namenode.delegation.token.always-use": "true",
        },
    }
    conf.mkdir()
    for name, settings in files.items():
        write_settings(conf / name, settings)


def _start(folder: Path, class_path: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    return start_java(folder / f"{name}.log", class_path, f"org.apache.hadoop.hdfs.{name}", *arguments)


def _writes(uri: str) -> bool:
    from shardmill.errors import StorageError
    from shardmill.stores import open_store

    try:
        open_store(uri).put("ready", b"")
        open_store(uri).put("ready", b"written by a DataNode")
    except StorageError as error:
        raise OSError(str(error)) from error
    return True
