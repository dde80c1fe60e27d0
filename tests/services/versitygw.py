"""A real S3 server on loopback for tests: versitygw over a folder, each object a file of it."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardmill.stores import s3
from tests.services.marked import free_ports
from tests.services.s3 import s3_client
from tests.services.servers import go_program, start_server, wait_until_up

_MODULE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
_START_SECONDS = 120.0
KEY, SECRET = "AKIACANARY0OF0A0KEY0", "canary+of+a+secret/with+forty+characters"


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running server, and the folder that holds its buckets as folders."""

    endpoint: str
    folder: Path


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("versitygw")
    (folder / "buckets").mkdir()
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    # Connections stay open, as Amazon's do.
    program = go_program("versitygw", _MODULE)
    command = [program, "--port", f"127.0.0.1:{port}", "--keep-alive", "--quiet", "posix", folder / "buckets"]
    keys = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
    server = start_server(command, folder / "server.log", keys)
    try:
        wait_until_up("versitygw", lambda: _answers(endpoint), [server], folder, _START_SECONDS)
        yield Gateway(endpoint, folder / "buckets")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture
def gateway(versitygw: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """The server, to which the AWS_* environment of this test points."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    connect_to(versitygw.endpoint, monkeypatch)
    yield versitygw
    s3._connected.cache_clear()


@pytest.fixture
def gateway_bucket(gateway: Gateway) -> str:
    """`s3://` URI of a new bucket there."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    s3_client(gateway.endpoint).create_bucket(Bucket=name)
    return f"s3://{name}"


def connect_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, and those that it starts, ask S3 there from now on."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    s3._connected.cache_clear()


def _answers(endpoint: str) -> bool:
    # Without a signature it refuses.
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(endpoint, timeout=10).close()
    return True
