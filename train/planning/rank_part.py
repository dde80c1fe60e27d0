"""The part of one rank of a model that ranks hold together, beside what a rank with the whole model has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from shardmill.errors import ShardmillError
from train.backends.backend import ModelSpec
from train.config import TrainConfig
from train.models.user import trains_module
from train.planning.memory_record import MemoryRecord
from train.planning.state_bytes import StateBytes, count_state
from train.settings.mesh import MeshConfig
from train.strategies import STRATEGIES, mesh_of


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

    def beside(self, record: MemoryRecord) -> int:
        """Bytes to add to the measured `fixed_bytes`: fewer of state, more of what is gathered from other ranks."""
        num_copies = 1 if record.on_gpu else 2
        fewer = num_copies * (self.state.state - record.state_bytes) if record.state_bytes else 0
        return fewer + self.state.gathered


class RankParts:
    """The `RankPart` of a config; counted once for each strategy and mesh, by a process that takes seconds."""

    def __init__(self, spec_of: Callable[[TrainConfig], ModelSpec]) -> None:
        self._spec_of = spec_of
        self._found: dict[tuple[str, str], RankPart | None] = {}

    def __call__(self, config: TrainConfig) -> RankPart | None:
        """None if each rank has the whole model, or what it has cannot be counted."""
        if not STRATEGIES[config.strategy].needs_module:
            return None
        key = (config.strategy, str(mesh_of(config)))
        if key not in self._found:
            self._found[key] = self._count(config)
        return self._found[key]

    def whole_of(self, config: TrainConfig) -> StateBytes | None:
        """Of a rank that has the whole model, alone; None for a Keras model, and for one that cannot be counted."""
        if part := self(config):
            return part.whole
        if STRATEGIES[config.strategy].needs_module or not trains_module(config):
            return None
        with suppress(ShardmillError):
            [whole] = count_state((_alone(config),), self._spec_of(config))
            return whole
        return None

    def _count(self, config: TrainConfig) -> RankPart | None:
        try:
            mine, whole = count_state((config, _alone(config)), self._spec_of(config))
        except ShardmillError:
            # The rank that builds the model says why.
            return None
        return None if mine.refused else RankPart(mine, whole)


def _alone(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"num_workers": 1, "rank_weights": (), "mesh": MeshConfig()})
