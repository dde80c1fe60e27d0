"""The settings of section `source.download`: how a task downloads images that a table names by `http://` or `https://`."""

from __future__ import annotations

import ipaddress

from pydantic import Field, field_validator

from shardmill.section import Section


class DownloadConfig(Section):
    """How a task downloads images that a table names by `http://` or `https://`."""

    timeout_seconds: float = Field(default=20.0, gt=0)
    """Time limit of one attempt, including redirects."""
    num_retries: int = Field(default=2, ge=0, le=20)
    """Retries after a transient failure, with growing delays."""
    num_parallel: int = Field(default=16, ge=1, le=256)
    """Images that a task downloads at once; also applies to files and objects that a table names."""
    num_parallel_per_host: int = Field(default=4, ge=1)
    """Maximum number of simultaneous downloads from one host."""
    allow_private_addresses: bool = False
    """Also download from private networks and this machine; otherwise such URLs are rejected."""
    allow_networks: tuple[str, ...] = ()
    """Private networks that are allowed in any case, such as `10.1.0.0/16`."""

    @field_validator("allow_networks")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)
        return networks
