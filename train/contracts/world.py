"""The place of a process in a training: its role, its devices, and how it connects to the others, by one network
interface.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from shardmill.errors import UsageError

LOOPBACK = "127.0.0.1"


Gather = Callable[[bytes], list[bytes]]
"""Every rank's bytes in rank order."""


def alone(data: bytes) -> list[bytes]:
    """`Gather` of a process that has no peers, or does something without them."""
    return [data]


class Role(StrEnum):
    """The role of a process in a training."""

    MEMBER = "member"
    """Runs the loop, as all other ranks do."""
    CHIEF = "chief"
    """Runs the loop for all."""
    WORKER = "worker"
    """Computes what a chief dispatches."""
    SERVER = "server"
    """Holds variables."""

    @property
    def runs_loop(self) -> bool:
        return self in (Role.MEMBER, Role.CHIEF)

    @property
    def computes(self) -> bool:
        """Whether it uses a GPU."""
        return self is not Role.SERVER


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The devices of a rank."""

    rank: int
    host: str
    devices: tuple[str, ...]
    """Addresses of GPUs of its host, as CUDA_VISIBLE_DEVICES takes them; none: the CPU."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.host} {'gpu ' + ','.join(self.devices) if self.devices else 'cpu'}"


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among all ranks, and how it meets the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among those of its host."""
    ranks_per_node: int = 1
    address: str = LOOPBACK
    """Address of this host at which the other ranks reach it."""
    exchange: Gather = alone
    """Goes through the driver's authenticated connection, so use it for addresses, not for bulk data. All ranks call
    it equally often."""
    exchange_aside: Gather = alone
    """Like `exchange`, for threads other than the training thread."""
    may_begin: Callable[[int], bool] = lambda global_step: True
    """Asked by every rank before each global step, by a chief also ahead of it; False: the training is to stop before
    this step, and then it is so on all ranks (train/launching/connection.py)."""
    placement: tuple[RankDevices, ...] = ()
    """All ranks, in rank order; empty if nothing was asked of devices."""
    files_uri: str = ""
    """A folder of this training in which ranks may leave files for each other."""
    role: Role = Role.MEMBER
    """Role of this process."""

    @property
    def devices(self) -> tuple[str, ...]:
        """This rank's GPUs."""
        return self.placement[self.rank].devices if self.placement else ()


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
