"""Launch environments that may have started this process as one of several: one file for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardmill.environments.rank_environment import RankEnvironment
from shardmill.errors import UsageError
from shardmill.registry import Entry, Registry

Variables = Mapping[str, str]


def _says_nothing(variables: Variables) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Starter:
    """Names of the variables in which a starter of processes tells each its place."""

    name: str
    rank: str
    world_size: str
    local: Callable[[Variables], tuple[int, int]]
    """-> (local rank, number of ranks on this host). Raises ValueError or IndexError if a value is not a number."""
    first_host: Callable[[Variables], str] = _says_nothing
    """-> the host of rank 0, or empty if its variables do not say."""

    def __str__(self) -> str:
        return self.name

    @property
    def if_left(self) -> str:
        """The fix if nothing has started this process: its variables may be left over from another program."""
        return (
            f"if {self.rank} and {self.world_size} are left from another program, `unset {self.rank} {self.world_size}`"
        )


def local_numbers(rank: str, size: str) -> Callable[[Variables], tuple[int, int]]:
    """`Starter.local` of two variables, which are left out if a host has one process (Kubernetes: a pod is a host)."""
    return lambda variables: (int(variables.get(rank, "0")), int(variables.get(size, "1")))


# The first that has set its variables counts: torchrun runs inside of srun, mpirun inside of a SLURM allocation.
ENVIRONMENTS: Registry[Starter] = Registry(
    "started by",
    {
        "own": Entry("shardmill.environments.known:OWN", "any launcher that sets SHARDMILL_RANK and so on"),
        "torchrun": Entry("shardmill.environments.known:TORCHRUN", "torchrun, and Kubernetes' training operators"),
        "open_mpi": Entry("shardmill.environments.known:OPEN_MPI", "mpirun of Open MPI"),
        "mpich": Entry("shardmill.environments.known:MPICH", "mpiexec of MPICH and of Intel MPI"),
        "slurm": Entry("shardmill.environments.known:SLURM", "srun of SLURM"),
        "kubernetes": Entry("shardmill.environments.known:KUBERNETES", "pods of a Kubernetes Indexed Job"),
    },
)


def find_rank_environment(variables: Variables) -> tuple[Starter, RankEnvironment] | None:
    """(what started this process, its place), or None if nothing says so. Raises UsageError for an invalid place."""
    for starter in ENVIRONMENTS.values():
        if starter.rank not in variables or starter.world_size not in variables:
            continue
        try:
            numbers = int(variables[starter.rank]), int(variables[starter.world_size])
            place = RankEnvironment(*numbers, *starter.local(variables))
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
