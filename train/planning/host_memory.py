"""Computes the memory that the ranks of a training may use: of this machine, of its GPUs, or as configured."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.free_memory import free_bytes
from train.launching import LAUNCHERS
from train.launching.devices import gpus_here
from train.strategies import roles_of

if TYPE_CHECKING:
    from shardmill.jobs.config import SparkConfig
    from train.config import TrainConfig
    from train.planning.memory_record import MemoryRecord

# What the framework itself keeps on a GPU, and in a process, if that is not measured.
GPU_FRAMEWORK_BYTES = 2**30
HOST_FRAMEWORK_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class Limit:
    """The usable amount of a memory."""

    device: str
    """Owner of the memory, in words."""
    rank_bytes: int
    """Limit per rank; 0: an equal part of `host_bytes`."""
    host_bytes: int = 0
    """Limit of all ranks of the host."""
    on_gpu: bool = False


def limit_of(config: TrainConfig, spark: SparkConfig) -> Limit | None:
    """Return the memory that ranks may use: as set, or of this machine; None if they run elsewhere, or it
    is unknown.
    """
    gpus = gpus_here(config, config.backend)
    if config.memory.budget_bytes:
        return Limit("train.memory.budget_bytes", config.memory.budget_bytes, on_gpu=bool(gpus))
    if not ranks_here(config, spark):
        return None
    if gpus:
        num_bytes = gpu_bytes()
        return Limit("a GPU here", num_bytes, on_gpu=True) if num_bytes else None
    num_bytes = free_bytes(Path("/"))
    return Limit("a rank's share of the free memory of this host", 0, num_bytes) if num_bytes else None


def ranks_here(config: TrainConfig, spark: SparkConfig) -> int:
    """Ranks that share this machine; 0 if all are elsewhere."""
    return LAUNCHERS[config.launcher].ranks_here(len(roles_of(config)), spark)


def bytes_of_a_rank(limit: Limit | MemoryRecord, config: TrainConfig, spark: SparkConfig) -> int:
    """What one rank may use of it."""
    return limit.rank_bytes or limit.host_bytes // max(1, ranks_here(config, spark))


def gpu_bytes() -> int:
    """Memory of the smallest GPU here, from NVIDIA's driver; 0 if unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return min((int(line) * 2**20 for line in told.split() if line.isdigit()), default=0)
