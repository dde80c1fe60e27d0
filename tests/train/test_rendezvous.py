"""An attacker who reaches every port of a training: nothing is answered, nothing listens beyond this machine."""

from __future__ import annotations

import http.client
import re
import socket
import time
from pathlib import Path

import pytest

from tests.train.test_launchers import Driver, dataset, start
from train.launchers.rendezvous import GLOO_ADDRESS, GuardedRendezvous, address_variables

__all__ = ["dataset", "start"]

# What Gloo's ranks look for, by names that everybody can guess.
KEYS = [f"/{scope}/{key}" for scope in ("global", "cross_0", "local_127.0.0.1") for key in ("0", "1", "0/1")]
LOCAL = {"127.0.0.1", "::1"}


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and content; status 0 if nobody speaks HTTP there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


@pytest.fixture
def store():
    server = GuardedRendezvous("127.0.0.1", "s" * 64)
    server.init([])
    port = server.start()
    yield port, f"/{'s' * 64}:{port}"
    server.stop()


def test_a_key_is_written_once_and_by_those_who_know_the_path(store):
    port, root = store
    assert address_variables("127.0.0.1", port, "s" * 64)[GLOO_ADDRESS] == f"127.0.0.1:{port}/{'s' * 64}"
    assert ask(port, "PUT", "/global/0", b"mine")[0] == 403
    assert ask(port, "GET", f"{root}/global/0")[0] == 404
    assert ask(port, "PUT", f"{root}/global/0", b"first")[0] == 200
    assert ask(port, "PUT", f"{root}/global/0", b"first")[0] == 200
    assert ask(port, "PUT", f"{root}/global/0", b"second")[0] == 409
    assert ask(port, "DELETE", f"{root}/global/0")[0] == 200
    assert ask(port, "GET", f"{root}/global/0") == (200, b"first")
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert ask(port, method, "/pyproject.toml", b"")[0] == 403
        assert ask(port, method, f"/{'t' * 64}:{port}/global/0", b"")[0] == 403


def listeners(driver: Driver) -> dict[int, str]:
    """Port -> address of everything on which the driver and what it started listen."""
    inodes = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if driver.mark.encode() in (folder / "environ").read_bytes():
                for link in (folder / "fd").iterdir():
                    inodes.add(re.sub(r"socket:\[(\d+)\]", r"\1", str(link.readlink())))
        except OSError:
            continue
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                packed, _, port = fields[1].partition(":")
                # Words of four bytes, each in the machine's order.
                words = bytes.fromhex(packed)
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found[int(port, 16)] = socket.inet_ntop(family, address).removeprefix("::ffff:")
    return found


@pytest.mark.parametrize("launcher", ["local", "horovod_spark"])
def test_training_under_attack_ends_well_and_listens_to_this_machine_only(start, dataset, launcher):
    train = {"global_batch_size": 24, "num_streams": 6, "epochs": 40 if launcher == "local" else 10}
    driver = start(launcher, 2, dataset=dataset, **train)
    seen, answers = {}, set()
    while driver.process.poll() is None:
        seen |= listeners(driver)
        for port in list(seen):
            answers |= {ask(port, "PUT", path, b"\0" * 64)[0] for path in KEYS}
        time.sleep(0.05)
    outcome = driver.outcome()
    assert outcome.get("world_size") == 2, outcome
    driver.assert_no_file_left()
    assert len(seen) >= 4 and set(seen.values()) <= LOCAL, seen
    # The rendezvous was among those who were asked, and refused.
    assert 403 in answers and not any(200 <= answer < 300 for answer in answers), answers
