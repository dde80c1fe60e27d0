"""The program that builds a training's model as a rank would (`train.planning.trial_build.try_build` asks it)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shardmill.memory import free_bytes
from train.api import StatePart
from train.backends import BACKENDS
from train.backends.torch.meta_device import meta_module
from train.contracts.world import World
from train.launching.side_process import answer
from train.planning.memory import HOST_FRAMEWORK_BYTES
from train.planning.state_program import check_divided
from train.planning.trial_build import BuildTask
from train.strategies import STRATEGIES, mesh_of


def build(task: BuildTask) -> int:
    """Build in this process, with a fresh framework. -> the number of trainable weights."""
    config, backend = task.config, BACKENDS[task.config.backend]
    backend.start(World(), config.seed)
    if config.needs_module and (module := _too_large(task)):
        # Rank 0 calls it.
        check_divided(config, task.spec)
        return _num_trained(module)
    learner: Any = backend.build(config, task.spec)
    STRATEGIES[config.strategy].check_learner(config, learner)
    if mesh_of(config).shape.tensor > 1 and hasattr(learner.module, "parallelize"):
        check_divided(config, task.spec)
    learner.check_exportable()
    if config.needs_module:
        # Its arrays, and the optimizer behind them, are never in one process.
        return _num_trained(learner.module)
    return sum(array.size for array in learner.arrays(StatePart.WEIGHTS))


def _too_large(task: BuildTask) -> Any:
    """The module without numbers if this host has no memory for them, else None."""
    try:
        module = meta_module(task.config, task.spec)
    except Exception:
        # A user's module may raise anything. The build with numbers, which follows, reports its error.
        return None
    num_bytes = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    has_room = HOST_FRAMEWORK_BYTES + num_bytes < (free_bytes(Path("/")) or math.inf)
    return None if has_room else module


def _num_trained(module: Any) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad)


if __name__ == "__main__":
    answer(BuildTask, build)
