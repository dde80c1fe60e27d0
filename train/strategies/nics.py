"""Finds network interfaces by name and by address; each strategy binds to one of them, never to all."""

from __future__ import annotations

import socket

from shardmill.errors import UsageError


def nic_with(address: str) -> str:
    """The interface that has this IPv4 address. Raises UsageError if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return name
    raise UsageError(
        f"{socket.gethostname()} has no interface with the address {address}",
        "expected the interface with which this host reaches the driver",
        "make sure that no NAT translates the connections to the driver",
    )


def ipv4_of(nic: str) -> str:
    """The IPv4 address of an interface. Raises UsageError if it has none."""
    import psutil

    addresses = {
        name: [each.address for each in found if each.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
    if not addresses.get(nic):
        # An empty address would listen on every interface.
        raise UsageError(
            f"train.nics: {socket.gethostname()} has no interface {nic!r} with an IPv4 address",
            f"it has {', '.join(sorted(name for name in addresses if addresses[name]))}",
            "name an interface that every host has, or leave train.nics empty",
        )
    return addresses[nic][0]
