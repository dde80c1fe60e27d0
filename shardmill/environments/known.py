"""What starts the processes of a job, and tells each its rank: by the variables that it sets."""

from __future__ import annotations

import re

from shardmill.environments import Starter, Variables, local_numbers
from shardmill.environments.rank_environment import OURS


def _local(variables: Variables) -> tuple[int, int]:
    counts = tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return int(variables.get("SLURM_LOCALID", "0")), counts[int(variables.get("SLURM_NODEID", "0"))]


def _first_host(variables: Variables) -> str:
    return first_host(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or "")


# https://slurm.schedmd.com/srun.html, "Output environment variables".
SLURM = Starter("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _local, _first_host)


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


# The Job gives each pod its index; the manifest repeats the number of pods. A pod is a host with one process.
# Training operators set torchrun's variables instead.
KUBERNETES = Starter(
    "a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX", "SHARDMILL_JOB_COMPLETIONS", lambda variables: (0, 1)
)

# The process manager of both is Hydra.
MPICH = Starter("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", local_numbers("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))

OPEN_MPI = Starter(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    local_numbers("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)

OWN = Starter("shardmill's own variables", OURS[0], OURS[1], local_numbers(OURS[2], OURS[3]))

# Also of launchers that set PyTorch's variables, such as Kubeflow's PyTorchJob.
TORCHRUN = Starter(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    local_numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    lambda variables: variables.get("MASTER_ADDR", ""),
)
