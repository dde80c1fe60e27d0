"""A strategy of a kind that train/strategies has not yet: ranks read the same rows, each with a part of the weights.

The whole model is there only while something is computed with it; at all other times what is another rank's is NaN. A
checkpoint has each rank's part in files of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from shardmill.values import Batch
from train.backends.backend import Learner, StatePart
from train.checkpoints.checkpoint import SavedFiles
from train.checkpoints.state import dump_arrays, load_arrays, rank_file
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.contracts.values import Reporter
from train.contracts.world import World
from train.strategies.collective import AnnouncedCollective, Collective
from train.strategies.member import Member, MemberStep
from train.strategies.replicated import ReplicatedMember
from train.strategies.strategy import CheckpointLayout, Strategy, WholeModel
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective


def one_group(config: TrainConfig) -> Mesh:
    """All ranks hold one copy of the model together, and read the same rows."""
    return Mesh.of(config, tensor=config.num_workers)


SHARDED_PARTS = (StatePart.WEIGHTS, StatePart.OPTIMIZER)


def shard_file(part: StatePart, rank: int) -> str:
    return f"{part.name.lower()}-{rank:05d}.npz"


def joined(of_ranks: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Arrays that were dealt out in turn."""
    arrays = [np.empty(0)] * sum(map(len, of_ranks))
    for rank, mine in enumerate(of_ranks):
        arrays[rank :: len(of_ranks)] = mine
    return arrays


class ShardedLearner:
    """The backend's own learner, of whose arrays this rank keeps every `world_size`-th."""

    def __init__(self, whole: Learner, collective: Collective, rank: int, world_size: int) -> None:
        self._whole: Any = whole
        self._collective = collective
        self._rank, self._world_size = rank, world_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def shard(self, part: StatePart) -> list[np.ndarray]:
        return self._whole.arrays(part)[self._rank :: self._world_size]

    def full_weights(self, part: StatePart = StatePart.WEIGHTS) -> list[np.ndarray]:
        """Gathered; all ranks call it."""
        return joined([load_arrays(each) for each in self._collective.gather_bytes(dump_arrays(self.shard(part)))])

    @contextmanager
    def gathered(self) -> Iterator[None]:
        for part in SHARDED_PARTS:
            self._whole.assign(part, self.full_weights(part), "all ranks")
        yield
        self.keep_own()

    def keep_own(self) -> None:
        """Lose what is another rank's."""
        for part in SHARDED_PARTS:
            arrays = self._whole.arrays(part)
            for place, array in enumerate(arrays):
                if place % self._world_size != self._rank:
                    arrays[place] = np.full_like(array, np.nan)
            self._whole.assign(part, arrays, "this rank")

    def outputs(self, images_NHWC: np.ndarray) -> np.ndarray:
        with self.gathered():
            return self._whole.outputs(images_NHWC)

    def weights_sha256(self) -> str:
        with self.gathered():
            return self._whole.weights_sha256()


class ShardedMember(ReplicatedMember):
    learner: ShardedLearner

    def __init__(self, learner: ShardedLearner, collective: Collective, world: World, config: TrainConfig) -> None:
        data = one_group(config).data_index(world.rank)
        super().__init__(learner, collective, data, world.exchange_aside)
        self.rank, self.world_size = world.rank, world.world_size

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        with self.learner.gathered():
            addends = self.learner.gradients(batch, global_weight, 1.0)
            return MemberStep(self.learner.apply(addends, learning_rate), 0.0)

    def own_gradient_is_finite(self, batch: Batch, global_weight: int) -> bool:
        with self.learner.gathered():
            return super().own_gradient_is_finite(batch, global_weight)

    def average_moving_statistics(self) -> None:
        """All have seen the same rows."""

    def state_files(self) -> dict[str, list[np.ndarray]]:
        files = {shard_file(part, self.rank): self.learner.shard(part) for part in SHARDED_PARTS}
        return files | {rank_file(self.rank): self.learner.arrays(StatePart.OWN)}

    def files_to_resume(self, saved: SavedFiles) -> list[str]:
        assert saved.world_size == self.world_size, "parts are not dealt out anew here"
        return [*(shard_file(part, self.rank) for part in SHARDED_PARTS), rank_file(self.rank)]

    def start(self, files: Mapping[str, bytes], saved_world_size: int, source: str) -> None:
        for part in StatePart if not files else ():
            mine = dump_arrays(self.learner.arrays(part))
            self.learner.assign(part, load_arrays(self.broadcast_bytes(mine)), "rank 0")
        self.take_weights(files, source)

    def weight_files(self, saved: SavedFiles) -> list[str]:
        return [shard_file(StatePart.WEIGHTS, self.rank), rank_file(self.rank)]

    def take_weights(self, files: Mapping[str, bytes], source: str) -> None:
        """And what else there is in `files`."""
        for part in SHARDED_PARTS:
            arrays = self.learner.arrays(part)
            if (name := shard_file(part, self.rank)) in files:
                arrays[self.rank :: self.world_size] = load_arrays(files[name])
            self.learner.assign(part, arrays, source)
        if (name := rank_file(self.rank)) in files:
            self.learner.assign(StatePart.OWN, load_arrays(files[name]), source)
        self.learner.keep_own()


def join(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    whole = build()
    collective = AnnouncedCollective(TorchCollective, world, reporter)
    return ShardedMember(ShardedLearner(whole, collective, world.rank, world.world_size), collective, world, config)


def whole_model(saved: SavedFiles) -> WholeModel:
    of_ranks = [load_arrays(saved.read(shard_file(StatePart.WEIGHTS, rank))) for rank in range(saved.world_size)]
    return WholeModel(joined(of_ranks), load_arrays(saved.read(rank_file(0))))


SHARDED = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    checkpoint_layout=CheckpointLayout("sharded", whole_model),
    max_world_size=None,
    join=join,
    secondary_error=TORCH_DDP.secondary_error,
    mesh=one_group,
)
