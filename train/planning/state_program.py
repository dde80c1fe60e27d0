"""The program that counts what a rank holds of a PyTorch module (`train.planning.state_bytes.count_state` asks it)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from shardmill.errors import ShardmillError, UsageError
from shardmill.registry import line_of_user, with_line_of_user
from train.api import RankState
from train.backends.model_spec import ModelSpec
from train.backends.torch.chain import ANOTHER
from train.backends.torch.meta_device import (
    fake_process_group,
    meta_classifier,
    meta_module,
    optimizer_bytes,
    step_bytes,
)
from train.config import TrainConfig
from train.launching.side_process import answer
from train.planning.memory_fit import recompute_problem
from train.planning.state_bytes import StateAnswer, StateBytes, StateTask
from train.strategies import STRATEGIES, mesh_of


def count(task: StateTask) -> StateAnswer:
    """Count in this process, with a fresh framework."""
    steps: dict[_WholeModule, _Step] = {}
    return StateAnswer(tuple(_of_rank(config, task.spec, steps) for config in task.configs))


@dataclass(frozen=True, slots=True)
class _Step:
    """The fields of `StateBytes` for a forward and a backward pass, on a rank with all activations of its module."""

    step: int = 0
    image: int = 0
    recomputed_step: int = 0
    recomputed_image: int = 0
    recompute_problem: str | None = None
    step_problem: str | None = None


@dataclass(frozen=True, slots=True)
class _WholeModule:
    """What decides the step of a whole module: ranks with undivided layers take the same one."""

    settings: str
    is_torch_twin: bool
    """Of a name that is a Keras model without it."""

    @classmethod
    def of(cls, config: TrainConfig) -> _WholeModule:
        settings = config.model_dump_json(exclude={"strategy", "num_workers", "num_streams", "mesh", "reading"})
        return cls(settings, config.needs_module)


def _of_rank(config: TrainConfig, spec: ModelSpec, steps: dict[_WholeModule, _Step]) -> StateBytes:
    """`steps`: those that were followed before. Raises UsageError for a model that does not build."""
    module = meta_module(config, spec)
    try:
        held, step = _placed(config, module, spec, steps)
    except UsageError as error:
        return StateBytes(refused=str(error))
    return _counted(config, module, held, step, _step_of_whole(config, module, spec, steps))


def check_divided(config: TrainConfig, spec: ModelSpec) -> None:
    """Raises UsageError for a model that its ranks cannot divide, or that does not compute then."""
    _placed(config, meta_module(config, spec), spec, {})


def _placed(
    config: TrainConfig, module: Any, spec: ModelSpec, steps: dict[_WholeModule, _Step]
) -> tuple[RankState, _Step]:
    """Raises as `check_divided` does."""
    with fake_process_group(mesh_of(config).num_ranks):
        try:
            held = STRATEGIES[config.strategy].rank_state(config, module)
        except ShardmillError:
            raise
        except Exception as error:
            # A user's module says how it is divided, and may raise anything.
            raise UsageError(
                f"train.model = {config.model!r} cannot be divided: {with_line_of_user(error)}",
                "its methods parallelize(mesh) and stages(), if it has them, say how",
                f"correct them, {ANOTHER}",
            ) from error
        if held.module is module:
            return held, _step_of_whole(config, module, spec, steps)
        step = _step(config, held.module, spec)
        # As a whole it may look at numbers, which it has not here.
        if step.step_problem and not _step_of_whole(config, module, spec, steps).step_problem:
            raise UsageError(
                f"train.model = {config.model!r} does not compute with its layers divided: {step.step_problem}",
                f"expected sizes that {mesh_of(config).shape.tensor} ranks divide, and layers that take what the ones "
                "before them leave on a rank",
                f"correct its parallelize(mesh): a ColwiseParallel layer goes with a RowwiseParallel one, {ANOTHER}",
            )
    return held, step


def _step_of_whole(config: TrainConfig, module: Any, spec: ModelSpec, steps: dict[_WholeModule, _Step]) -> _Step:
    key = _WholeModule.of(config)
    if key not in steps:
        steps[key] = _step(config, module, spec)
    return steps[key]


def _counted(config: TrainConfig, module: Any, held: RankState, step: _Step, whole: _Step) -> StateBytes:
    """`step`: of `held.module`; `whole`: of `module`."""
    # A strategy may have other names for parts of a weight.
    named = dict(held.module.named_parameters())
    weights = sum(math.prod(shape) * named[name].element_size() for name, shape in held.weights.items())
    # What is not trained is whole on every rank.
    own = sum(each.nbytes for each in module.buffers())
    own += sum(each.nbytes for each in module.parameters() if not each.requires_grad)
    share = held.activation_share
    return StateBytes(
        parameters=weights + own,
        gradients=weights,
        optimizer=optimizer_bytes(config, held.module, held.updated) + (weights if config.ema_decay else 0),
        gathered=held.gathered_bytes,
        update=held.update_bytes,
        start=sum(each.nbytes for each in module.parameters()) if STRATEGIES[config.strategy].needs_module else 0,
        step=int(share * step.step),
        image=math.ceil(share * step.image),
        whole_image=whole.image,
        recomputed_step=int(share * step.recomputed_step),
        recomputed_image=math.ceil(share * step.recomputed_image),
        recompute_problem=step.recompute_problem,
        step_problem=step.step_problem,
    )


def _step(config: TrainConfig, module: Any, spec: ModelSpec) -> _Step:
    classifier = meta_classifier(module, spec)
    try:
        step, image = step_bytes(config, classifier, spec.image_shape_HWC)
    except Exception as error:
        # A user's module may raise anything if its tensors have no numbers.
        line = line_of_user(error)
        where = f" ({line})" if line else ""
        return _Step(step_problem=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}")
    found = _Step(step, image)
    if config.memory.activation_checkpointing == "on":
        return found
    if problem := recompute_problem(config):
        return replace(found, recompute_problem=problem)
    memory = config.memory.model_copy(update={"activation_checkpointing": "on"})
    try:
        step, image = step_bytes(config.model_copy(update={"memory": memory}), classifier, spec.image_shape_HWC)
    except ShardmillError as error:
        return replace(found, recompute_problem=str(error))
    return replace(found, recomputed_step=step, recomputed_image=image)


if __name__ == "__main__":
    answer(StateTask, count)
