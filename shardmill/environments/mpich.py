"""Processes of mpiexec, for MPICH and Intel MPI (their process manager is Hydra)."""

from __future__ import annotations

from shardmill.environments import Starter, local_numbers

MPICH = Starter("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", local_numbers("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
