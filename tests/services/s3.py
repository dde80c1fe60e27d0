"""An S3 server on loopback for tests: moto's, in a process of its own."""

from __future__ import annotations

import functools
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.marked import free_ports
from tests.services.servers import start_server, wait_until_up

_START_SECONDS = 240.0


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a running server; the AWS_* environment points at it for the whole session."""
    [port] = free_ports(1)
    folder = tmp_path_factory.mktemp("moto")
    command = [sys.executable, "-m", "tests.services.moto_server", str(port)]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    server = start_server(command, folder / "server.log", {**os.environ, "PYTHONPATH": path})
    endpoint = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "canary-of-a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        wait_until_up("moto", lambda: _listens(port), [server], folder, _START_SECONDS)
        yield endpoint
    finally:
        server.terminate()
        server.wait(120)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _listens(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    return True


@pytest.fixture
def s3_bucket(s3_server: str) -> str:
    """`s3://` URI of a new bucket."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    s3_client(s3_server).create_bucket(Bucket=name)
    return f"s3://{name}"


@functools.cache
def s3_client(endpoint: str) -> Any:
    """Amazon's own client, for names and requests that our store does not make."""
    import boto3

    # A session of its own: the default one would keep the keys of the first server that a test asks.
    return boto3.Session().client("s3", endpoint_url=endpoint)
