"""The program that builds a training's model as a rank would (`train.planning.trial_build.try_build` asks it)."""

from __future__ import annotations

from typing import Any

from train.backends import BACKENDS
from train.backends.backend import StatePart
from train.contracts.world import World
from train.launching.side_process import answer
from train.planning.state_program import check_divided
from train.planning.trial_build import BuildTask
from train.strategies import STRATEGIES, mesh_of


def build(task: BuildTask) -> int:
    """Build in this process, with a fresh framework. -> the number of trainable weights."""
    config, backend = task.config, BACKENDS[task.config.backend]
    backend.start(World(), config.seed)
    learner: Any = backend.build(config, task.spec)
    STRATEGIES[config.strategy].check_learner(config, learner)
    if mesh_of(config).shape.tensor > 1 and hasattr(learner.module, "parallelize"):
        check_divided(config, task.spec)
    learner.check_exportable()
    return sum(array.size for array in learner.arrays(StatePart.WEIGHTS))


if __name__ == "__main__":
    answer(BuildTask, build)
