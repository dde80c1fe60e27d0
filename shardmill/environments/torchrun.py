"""Processes of torchrun, and of other launchers that set PyTorch's variables (such as Kubeflow's PyTorchJob)."""

from __future__ import annotations

from shardmill.environments import Starter, local_numbers

TORCHRUN = Starter(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    local_numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    lambda variables: variables.get("MASTER_ADDR", ""),
)
