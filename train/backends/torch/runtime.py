"""Starts PyTorch deterministically on one device, records its computations, and converts the state of its random
generators to arrays.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.registry import install_hint
from train.backends.frameworks import check_seen, without_collection
from train.contracts.world import World


def import_torch() -> Any:
    """The module `torch`. Raises UsageError that names the extra if it cannot be imported."""
    try:
        with without_collection():
            import torch
    except ImportError as error:
        raise UsageError(f"this needs PyTorch: {error}", "which is an extra", install_hint("torch")) from None
    return torch


def start_torch(world: World, seed: int) -> None:
    """Threads for this rank's share of the node, seeds, deterministic kernels."""
    # Without it cuBLAS is not deterministic, and PyTorch refuses to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch = import_torch()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.ranks_per_node))
    torch.manual_seed(seed)
    with without_collection():
        # It imports PyTorch's compilers.
        torch.use_deterministic_algorithms(True)
    # By default it also fills all fresh memory, to show who reads what was never written: a sixth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    check_seen(world, "PyTorch", num_seen)
    if num_seen:
        # The launcher shows this process its own device only.
        torch.cuda.set_device(0)


def device() -> Any:
    """The one on which this process computes."""
    torch = import_torch()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def generator_states() -> list[np.ndarray]:
    """Return the states of the generators used by dropout and similar layers."""
    torch = import_torch()
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return [state.numpy() for state in states]


def restore_generators(states: list[np.ndarray]) -> None:
    """Take over what `generator_states` gave on a machine of the same kind; a GPU's is omitted if there is none."""
    torch = import_torch()
    torch.set_rng_state(torch.from_numpy(states[0].copy()))
    if torch.cuda.is_available() and len(states) > 1:
        torch.cuda.set_rng_state(torch.from_numpy(states[1].copy()))


def reseed_generators(rank: int) -> None:
    """Let each rank draw numbers of its own, by a seed that follows from the state that all have and the rank."""
    torch = import_torch()
    if rank:
        torch.manual_seed(int(torch.randint(2**62, ())) + rank)


TRACE = "trace.pt.trace.json.gz"
"""File name that TensorBoard's plugin and Holistic Trace Analysis expect."""


class TorchRecording:
    """`train.api.Recording`, by Kineto."""

    def __init__(self, folder: Path) -> None:
        torch = import_torch()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._file = folder / TRACE
        # It is one cycle; without this PyTorch warns that others would be lost.
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()

    def step(self, global_step: int) -> AbstractContextManager[None]:
        # What the tools take for a step.
        return import_torch().profiler.record_function(f"ProfilerStep#{global_step}")

    def stop(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._file))
