"""The program that counts what a rank holds of a PyTorch module (`train.planning.state_bytes.count_state` asks it)."""

from __future__ import annotations

import math
from typing import Any

from shardmill.errors import ShardmillError, UsageError
from train.backends.backend import ModelSpec
from train.backends.torch.empty import empty_classifier, empty_module, optimizer_bytes
from train.backends.torch.imagined_ranks import imagined_ranks
from train.backends.torch.live_bytes import step_bytes
from train.config import TrainConfig
from train.launching.side_process import answer
from train.planning.recompute import why_not_recompute
from train.planning.state_bytes import StateAnswer, StateBytes, StateTask
from train.strategies import STRATEGIES, mesh_of
from train.strategies.compression import remembered_bytes
from train.strategies.held import Held


def count(task: StateTask) -> StateAnswer:
    """Count in this process, with a fresh framework."""
    return StateAnswer(tuple(_of_rank(config, task.spec) for config in task.configs))


def _of_rank(config: TrainConfig, spec: ModelSpec) -> StateBytes:
    """Raises UsageError for a model that does not build."""
    module = empty_module(config, spec)
    with imagined_ranks(mesh_of(config).num_ranks):
        try:
            held = STRATEGIES[config.strategy].held(config, module)
        except UsageError as error:
            return StateBytes(refused=str(error))
        return _counted(config, module, held, spec)


def _counted(config: TrainConfig, module: Any, held: Held, spec: ModelSpec) -> StateBytes:
    named = dict(module.named_parameters())
    weights = {name: math.prod(shape) * named[name].element_size() for name, shape in held.weights.items()}
    # What is not trained is whole on every rank.
    own = sum(each.nbytes for each in (*(each for each in named.values() if not each.requires_grad), *module.buffers()))
    gradients = sum(weights.values()) + remembered_bytes([named[name] for name in weights], config)
    averages = sum(weights.values()) if config.ema_decay else 0
    return StateBytes(
        parameters=sum(weights.values()) + own,
        gradients=gradients,
        optimizer=optimizer_bytes(config, module, held.updated) + averages,
        gathered=held.gathered_bytes,
        update=held.update_bytes,
        start=own + sum(each.nbytes for each in named.values()) if STRATEGIES[config.strategy].needs_module else 0,
        **_of_step(config, held, spec),
    )


def _of_step(config: TrainConfig, held: Held, spec: ModelSpec) -> dict[str, Any]:
    """The fields of `StateBytes` for a forward and a backward pass."""
    share, classifier = held.activation_share, empty_classifier(held.module, spec)
    try:
        step, image = step_bytes(config, classifier, spec.image_shape_HWC)
    except Exception as error:
        # A user's module may raise anything if its tensors have no numbers.
        return {"why_not_stepped": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    found: dict[str, Any] = {"step": int(share * step), "image": math.ceil(share * image)}
    if config.memory.activation_checkpointing == "on":
        return found
    if why_not := why_not_recompute(config):
        return found | {"why_not_recomputed": why_not}
    memory = config.memory.model_copy(update={"activation_checkpointing": "on"})
    try:
        step, image = step_bytes(config.model_copy(update={"memory": memory}), classifier, spec.image_shape_HWC)
    except ShardmillError as error:
        return found | {"why_not_recomputed": str(error)}
    return found | {"recomputed_step": int(share * step), "recomputed_image": math.ceil(share * image)}


if __name__ == "__main__":
    answer(StateTask, count)
