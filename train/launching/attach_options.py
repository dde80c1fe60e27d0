"""The section `[train.attach]`, and the address of rank 0 if another program has started the processes."""

from __future__ import annotations

import socket
from typing import Annotated

from pydantic import Field

from shardmill.environments import ENVIRONMENTS, Variables
from shardmill.environments.rank_environment import RankEnvironment
from shardmill.jobs.config import addresses_of, is_loopback
from shardmill.section import Section
from train.contracts.world import LOOPBACK
from train.settings import EXECUTION, Host


class AttachOptions(Section):
    """Settings of the launcher `attach`."""

    host: Annotated[Host, EXECUTION] = ""
    """Host name or address of rank 0 for the other ranks; empty: from the starter (MASTER_ADDR, SLURM's first node)."""
    port: Annotated[int, EXECUTION] = Field(default=29610, ge=1, le=65535)
    """Port of rank 0."""


def host_of_rank_0(variables: Variables, place: RankEnvironment) -> str:
    """Return the host at which rank 0's process can be reached, or empty if unknown.

    Another environment than the one that started the ranks may say it: SLURM, if mpirun runs in its allocation.
    """
    if place.ranks_per_node == place.world_size:
        return LOOPBACK
    hosts = (starter.first_host(variables) for starter in ENVIRONMENTS.values())
    return next((host for host in hosts if host), "")


def loopback_warning(host: str, place: RankEnvironment) -> str:
    """Why ranks on other hosts cannot find rank 0 at `host`, or "".

    Debian's /etc/hosts maps a host's own name to 127.0.1.1. Of several addresses rank 0 listens on the first alone.
    """
    if place.ranks_per_node == place.world_size:
        return ""
    try:
        addresses = addresses_of(host)
    except OSError:
        return ""
    loopback = [address for address in addresses if is_loopback(address)]
    if not loopback or (place.rank and len(loopback) < len(addresses)):
        return ""
    found = host if host in loopback else f"{host}, which is {', '.join(loopback)} on {socket.gethostname()}"
    return (
        f"rank {place.rank} {'calls' if place.rank else 'is'} rank 0 at {found}: a loopback address, but the "
        f"{place.world_size} ranks are on several hosts; set train.attach.host to the address of rank 0's host on "
        "their network (`hostname -I` there lists it), or correct /etc/hosts"
    )
