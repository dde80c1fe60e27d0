"""Hosts of their own on this machine: network namespaces with names and addresses, and all of its files."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace: its loopback is not that of the others."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """The command that runs `arguments` there."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.name, *named, *arguments]


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and `ip` (Debian: iproute2)")
    token = uuid.uuid4().hex[:6]
    if subprocess.run(["ip", "netns", "add", f"sm{token}"], capture_output=True, timeout=120).returncode:
        pytest.skip("no network namespaces here: they need CAP_SYS_ADMIN")
    _ip("netns", "delete", f"sm{token}")
    hosts = (Host(f"sm{token}a", "10.213.77.1"), Host(f"sm{token}b", "10.213.77.2"))
    with ExitStack() as held:
        for host in hosts:
            _ip("netns", "add", host.name)
            held.callback(_ip, "netns", "delete", host.name)
            # `ip netns exec` mounts it over /etc/hosts.
            names = Path("/etc/netns", host.name, "hosts")
            names.parent.mkdir(parents=True)
            held.callback(shutil.rmtree, names.parent)
            names.write_text("127.0.0.1 localhost\n" + "".join(f"{each.address} {each.name}\n" for each in hosts))
        # Each end of the cable is named as its host.
        _ip("link", "add", hosts[0].name, "type", "veth", "peer", "name", hosts[1].name)
        for host in hosts:
            _ip("link", "set", host.name, "netns", host.name)
            inside = ("-n", host.name)
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", host.name)
            _ip(*inside, "link", "set", host.name, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=120)
