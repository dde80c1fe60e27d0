"""Resolves a host's name and detects loopback addresses, for launchers, Spark's driver and doctor."""

from __future__ import annotations

import ipaddress
import socket


def addresses_of(host: str) -> list[str]:
    """The addresses that a name has on this host. Raises OSError if it has none."""
    return sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})


def is_loopback(host: str) -> bool:
    """Whether all that a name or an address leads to is this host alone; False for a name that is unknown here."""
    try:
        return all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses_of(host))
    except (OSError, UnicodeError):
        return False
