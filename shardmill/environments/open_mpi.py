"""Processes of Open MPI's mpirun."""

from __future__ import annotations

from shardmill.environments import Starter, local_numbers

OPEN_MPI = Starter(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    local_numbers("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
