"""Where torchrun, SLURM, MPI or Kubernetes put this process, and where rank 0 is: from their variables."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardmill.errors import UsageError
from shardmill.jobs.addresses import addresses_of, is_loopback
from train.launching.place import OURS, Place
from train.world import LOOPBACK

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Starter:
    """Names of the variables in which a starter of processes tells each its place."""

    name: str
    rank: str
    world_size: str
    local: Callable[[Environment], tuple[int, int]]
    """-> (local rank, number of ranks on this host)."""

    def __str__(self) -> str:
        return self.name

    @property
    def if_left(self) -> str:
        """What to do if nothing has started this process: its variables may be left from another program."""
        return (
            f"if {self.rank} and {self.world_size} are left from another program, `unset {self.rank} {self.world_size}`"
        )


def _numbers(rank: str, size: str) -> Callable[[Environment], tuple[int, int]]:
    # One process on each host is what leaves them out (Kubernetes: a pod is a host).
    return lambda environment: (int(environment.get(rank, "0")), int(environment.get(size, "1")))


def _slurm_local(environment: Environment) -> tuple[int, int]:
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return int(environment.get("SLURM_LOCALID", "0")), counts[int(environment.get("SLURM_NODEID", "0"))]


# The first that has set its variables counts: torchrun runs inside of srun, mpirun inside of a SLURM allocation.
STARTERS = (
    Starter("shardmill's own variables", OURS[0], OURS[1], _numbers(OURS[2], OURS[3])),
    Starter("torchrun", "RANK", "WORLD_SIZE", _numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    Starter(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        _numbers("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    Starter("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", _numbers("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    Starter("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _slurm_local),
)


def find_place(environment: Environment) -> tuple[Starter, Place] | None:
    """(who started this process, its place), or None if nobody says so. Raises UsageError for what is no place."""
    for starter in STARTERS:
        if starter.rank not in environment or starter.world_size not in environment:
            continue
        try:
            place = Place(int(environment[starter.rank]), int(environment[starter.world_size]),
                          *starter.local(environment))  # fmt: skip
        except (ValueError, IndexError) as error:
            raise UsageError(
                f"the variables of {starter.name} are not numbers: {error}", "expected whole numbers", starter.if_left
            ) from None
        if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.ranks_per_node):
            raise UsageError(
                f"the variables of {starter.name} make this process rank {place.rank} of {place.world_size}, "
                f"number {place.local_rank} of {place.ranks_per_node} on its host",
                "expected numbers that count from 0",
                starter.if_left,
            )
        return starter, place
    return None


def host_of_rank_0(environment: Environment, place: Place) -> str:
    """Where rank 0's process can be called, or empty if nothing says so."""
    if place.ranks_per_node == place.world_size:
        return LOOPBACK
    if host := environment.get("MASTER_ADDR"):
        return host
    return first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "")


def loopback_warning(host: str, place: Place) -> str:
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
        f"rank {place.rank} {'calls' if place.rank else 'is'} rank 0 at {found}: a loopback address, and the "
        f"{place.world_size} ranks are on several hosts; set train.attach.host to the address of rank 0's host on "
        "their network (`hostname -I` there lists it), or correct /etc/hosts"
    )


def tasks_per_node(text: str) -> list[int]:
    """SLURM's `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or "1")
    return counts


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: `rack[3-4]node[07,09-12],b1` -> `rack3node07`."""
    inside, first = 0, nodes
    for position, character in enumerate(nodes):
        inside += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and not inside:
            first = nodes[:position]
            break
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)
