"""What a rank holds of a PyTorch module under each strategy, as a separate process counts it.

Nothing is allocated and no rank is started, so models and numbers of ranks may be larger than this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.errors import UsageError
from train.backends.backend import ModelSpec
from train.config import TrainConfig
from train.contracts.values import to_json
from train.launching.devices import CUDA_VARIABLE
from train.launching.side_process import Question, ask
from train.planning.memory_fit import decided


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
    """Both as in `train.strategies.held.Held`."""
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
    why_not_recomputed: str = ""
    why_not_stepped: str = ""
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
    watch = configs[0].watch
    timeout = {"timeout_seconds": watch.start_timeout_seconds, "key": "train.watch.start_timeout_seconds"}
    question = Question("train.planning.state_program", to_json(task), {CUDA_VARIABLE: "-1"}, **timeout)
    return ask(question, StateAnswer, lambda how: _not_counted(configs[0].model, how)).of_configs


def _not_counted(model: str, how: str) -> UsageError:
    """`how`: what became of the process."""
    return UsageError(
        f"train.model = {model!r} cannot be counted: the process that tried it {how}",
        "the process called its factory, and placed the module as the ranks would, without numbers",
        "call the factory in a Python shell for the full traceback",
    )
