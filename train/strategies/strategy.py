"""The interface of a strategy: properties that the driver reads before anything starts, and how a rank joins
its world.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from train.backends.backend import Learner
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.contracts.values import Reporter
from train.contracts.world import Role, World
from train.strategies.held import Held, holds_all
from train.strategies.member import Member
from train.strategies.shared_model import SharedModel

if TYPE_CHECKING:
    from train.contracts.task import WorkerTask


class Build(Protocol):
    """Builds the learner of a rank."""

    def __call__(self, *, has_numbers: bool = True) -> Learner:
        """`train.backends.backend.Backend.build`."""
        ...


class Join(Protocol):
    """Called once on every rank, when the backend runs and before any variable exists."""

    def __call__(self, world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
        """Build the learner in the scope that the strategy needs, and connect to the other ranks.

        Raises what `build` raises, before any rank waits for another.
        """
        ...


def _loses_none(config: TrainConfig) -> frozenset[int]:
    return frozenset()


def all_members(config: TrainConfig) -> tuple[Role, ...]:
    """`train.num_workers` ranks, all with the role MEMBER."""
    return (Role.MEMBER,) * config.num_workers


def _none_serves(task: WorkerTask, world: World, reporter: Reporter) -> NoReturn:
    raise AssertionError(
        f"rank {world.rank} has the role {world.role}, but with this strategy every process runs the training loop"
    )


def _has_none(folder: Path) -> AbstractContextManager[None]:
    return nullcontext()


def _takes_all(config: TrainConfig) -> None:
    return


MATCHES_NOTHING = re.compile(r"(?!)")
"""Matches nothing, because a rank without peers has no secondary errors."""
GLOO_LOST_PEER = r"gloo::|gloo/transport|Connection (closed|reset) by peer"
"""Errors of Gloo's C++ code, which several strategies use."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to distribute a training over ranks; the shared tests check what it declares."""

    backends: tuple[str, ...]
    """Supported backends; the first one is the default for a model that any of them could train."""
    synchronous: bool
    """All ranks apply the same update at the same step."""
    exact_resume: bool
    """A resumed training at the same world size ends with the same bits as one that never stopped."""
    max_world_size: int | None
    """Largest world size, or None if only `train.num_streams` bounds it."""
    join: Join
    devices_per_rank: Literal["one", "all"] = "one"
    """How many GPUs a rank uses: one, or an equal share of all visible GPUs of its host."""
    leaves_out_batches: bool = False
    """A batch can be skipped without a trace (`train.non_finite`), because it only changes the learner's state."""
    secondary_error: re.Pattern[str] = MATCHES_NOTHING
    """Matches an error, or the last output, of a rank that only lost its peer: the cause is another rank's fault."""
    check: Callable[[TrainConfig], None] = _takes_all
    """Raises UsageError for settings that it does not support, without importing a framework."""
    compressions: tuple[str, ...] = ("none",)
    """Supported values of `train.compression`."""
    less_work: str = "give it less work with train.rank_weights, or remove it"
    """What a user does for a rank that is slower than the others."""
    syncs_batch_norm: bool = False
    """It can sum moments of batch norms over ranks inside a step (`train.sync_batch_norm`)."""
    recomputes: bool = True
    """Its step may compute activations twice (`train.memory.activation_checkpointing`): no variable changes within."""
    may_lose: Callable[[TrainConfig], frozenset[int]] = _loses_none
    """The ranks that may be lost once training has begun, because the others continue without them. A global step does
    not wait for them: it is what the other ranks report."""
    roles: Callable[[TrainConfig], tuple[Role, ...]] = all_members
    """The role of each rank's process; those that run the training loop come first."""
    serve: Callable[[WorkerTask, World, Reporter], NoReturn] = _none_serves
    """Run by a process without the training loop until the driver ends it; raises any error."""
    timeline: Callable[[Path], AbstractContextManager[None]] = _has_none
    """Records the exchange during `train.log.profile_steps` into a file of that folder, if supported."""
    reads_all: bool = False
    """One process reads all rows and hands them out."""
    shared_model: SharedModel | None = None
    """How its ranks hold one `nn.Module` together; a Keras model is refused. None: each has the whole model."""

    @property
    def needs_module(self) -> bool:
        """Whether its ranks hold parts of an `nn.Module`."""
        return self.shared_model is not None

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of `train.mesh` that it has beside `data`."""
        return self.shared_model.axes if self.shared_model else ()

    def mesh(self, config: TrainConfig) -> Mesh:
        """The axes along which its ranks divide a training. Raises UsageError for numbers that do not divide."""
        return Mesh.one_reader(config) if self.reads_all else Mesh.along(config, self.axes)

    def held(self, config: TrainConfig, module: Any) -> Held:
        """`SharedModel.held`."""
        return self.shared_model.held(config, module) if self.shared_model else holds_all(config, module)

    def check_learner(self, config: TrainConfig, learner: Any) -> None:
        """`SharedModel.check_learner`."""
        if self.shared_model:
            self.shared_model.check_learner(config, learner)

    def allows_world_size(self, world_size: int) -> bool:
        return world_size >= 1 and (self.max_world_size is None or world_size <= self.max_world_size)
