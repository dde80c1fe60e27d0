"""An S3 server on loopback for tests: moto's, in a process of its own."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.marked import free_ports

_START_SECONDS = 60.0


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a running server; the AWS_* environment points at it for the whole session."""
    [port] = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
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
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "moto's server does not start"
                time.sleep(0.2)
        yield endpoint
    finally:
        server.terminate()
        server.wait(10)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


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
