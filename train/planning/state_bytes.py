"""What a rank holds of a PyTorch module under each strategy, as a separate process counts it.

Nothing is allocated and no rank is started, so models and numbers of ranks may be larger than this machine.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError
from train.backends.model_spec import ModelSpec, model_spec
from train.config import TrainConfig
from train.contracts.values import to_json
from train.launching.side_process import ask_of_model
from train.planning.memory_fit import decided
from train.settings import MeshConfig

if TYPE_CHECKING:
    from train.planning.setup import Setup


@dataclass(frozen=True, slots=True)
class StateTask:
    """The model, under several strategies."""

    configs: tuple[TrainConfig, ...]
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of the rank that holds most."""

    parameters: int = 0
    """Weights, frozen parameters and buffers."""
    gradients: int = 0
    """Likewise what a compression remembers of them."""
    optimizer: int = 0
    """Also averages of the weights (`train.ema_decay`)."""
    gathered: int = 0
    update: int = 0
    """Both as in `train.api.RankState`."""
    start: int = 0
    """Parameters of the whole module, which rank 0 builds in its host at first; 0 if all ranks keep it."""
    step: int = 0
    """What a step has beside these for any number of images."""
    image: int = 0
    """Per image of a step: activations, and what is computed from them."""
    whole_image: int = 0
    """As `image`, of a rank with the whole model; 0 if that could not be followed."""
    recomputed_step: int = 0
    recomputed_image: int = 0
    """Both with `train.memory.activation_checkpointing`; 0 if the model does not have it."""
    recompute_problem: str | None = None
    step_problem: str | None = None
    """Why the forward and backward pass could not be followed without numbers; `step` and `image` are then 0."""
    refused: str = ""
    """Why the ranks cannot divide this model; everything else is then 0."""

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class StateAnswer:
    """One for each config of a task."""

    of_configs: tuple[StateBytes, ...]


def count_state(configs: tuple[TrainConfig, ...], spec: ModelSpec) -> tuple[StateBytes, ...]:
    """`configs`: of one model, each with its number of ranks and a strategy of the backend `torch`.

    Raises UsageError for a model that does not build.
    """
    task = StateTask(tuple(decided(config, 1, to_bfloat16=False) for config in configs), spec)
    steps = "called its factory, and placed the module as the ranks would, without numbers"
    program, fails = "train.planning.state_program", "cannot be counted"
    return ask_of_model(program, to_json(task), StateAnswer, configs[0], fails=fails, steps=steps).of_configs


@dataclass(frozen=True, slots=True)
class RankPart:
    """Of the rank that holds most."""

    state: StateBytes
    whole: StateBytes
    """Of a rank that has the whole model, alone."""

    @property
    def image_share(self) -> float:
        """Of the activations of the whole model, those that it has."""
        return self.state.image / self.state.whole_image if self.state.whole_image else 1.0


class RankParts:
    """The `RankPart` of a setup; counted once for each strategy and mesh, by a process that takes seconds."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], RankPart | None] = {}

    def __call__(self, setup: Setup) -> RankPart | None:
        """None if each rank has the whole model, or what it has cannot be counted."""
        if not setup.strategy.needs_module:
            return None
        key = (setup.config.strategy, str(setup.mesh))
        if key not in self._found:
            self._found[key] = None
            # Of a model that cannot be counted, the rank that builds it says why.
            with suppress(ShardmillError):
                mine, whole = count_state((setup.config, _alone(setup.config)), spec_of(setup))
                self._found[key] = None if mine.refused else RankPart(mine, whole)
        return self._found[key]

    def whole_of(self, setup: Setup) -> StateBytes | None:
        """Of a rank that has the whole model, alone; None for a Keras model, and for one that cannot be counted."""
        if part := self(setup):
            return part.whole
        if setup.strategy.needs_module or not setup.trains_module:
            return None
        with suppress(ShardmillError):
            [whole] = count_state((_alone(setup.config),), spec_of(setup))
            return whole
        return None


def spec_of(setup: Setup) -> ModelSpec:
    """What its model is built for."""
    return model_spec(setup.of_dataset.manifest, setup.config)


def _alone(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"num_workers": 1, "rank_weights": (), "mesh": MeshConfig()})
