"""Processes of torchrun, and of whatever else sets PyTorch's variables (Kubeflow's PyTorchJob, for instance)."""

from __future__ import annotations

from shardmill.environments import Starter, local_numbers

TORCHRUN = Starter(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    local_numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    lambda variables: variables.get("MASTER_ADDR", ""),
)
