"""What a strategy promises, which the driver reads before anything starts, and how a rank joins its world."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

import numpy as np

from train.backends.backend import Learner
from train.config import TrainConfig
from train.strategies.member import Member
from train.values import Reporter
from train.world import Role, World

if TYPE_CHECKING:
    from train.task import WorkerTask


class Join(Protocol):
    """Called once on every rank, when the backend runs and before any variable exists."""

    def __call__(self, world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
        """Build the learner, in whatever scope the strategy needs, and meet the other ranks.

        Raises what `build` raises, before any rank waits for another.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What of a checkpoint an export needs, as a learner's arrays."""

    weights: list[np.ndarray]
    """`StatePart.WEIGHTS`."""
    own: list[np.ndarray]
    """`StatePart.OWN` of rank 0."""


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Which files a checkpoint has."""

    name: str
    whole_model: Callable[[Callable[[str], bytes], int], WholeModel]
    """`(read, world_size)` -> the model, of whatever files of a checkpoint of so many ranks it is in; `read` gives a
    file by its name."""


def _loses_none(config: TrainConfig) -> frozenset[int]:
    return frozenset()


def all_members(config: TrainConfig) -> tuple[Role, ...]:
    """`train.num_workers` equals."""
    return (Role.MEMBER,) * config.num_workers


def _none_serves(task: WorkerTask, world: World, reporter: Reporter) -> NoReturn:
    raise AssertionError(f"every process of this strategy runs the loop, not rank {world.rank}: {world.role}")


def _has_none(folder: Path) -> AbstractContextManager[None]:
    return nullcontext()


def _takes_all(config: TrainConfig) -> None:
    return


MATCHES_NOTHING = re.compile(r"(?!)")
"""Matches nothing: a rank without peers fails by itself."""
GLOO_LOST_PEER = r"gloo::|gloo/transport|Connection (closed|reset) by peer"
"""Of Gloo's C++ code, on which several strategies stand."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to spread a training over ranks; the shared tests follow what is declared."""

    backends: tuple[str, ...]
    """With which it runs; the first one is the default for a model that any of them could train."""
    synchronous: bool
    """All ranks apply the same update at the same step."""
    exact_resume: bool
    """A resumed training at the same world size ends with the same bits as one that never stopped."""
    checkpoint_layout: CheckpointLayout
    """What of a checkpoint its ranks write, for the export that reads it without them."""
    max_world_size: int | None
    """Largest world size, or None if only `train.num_streams` bounds it."""
    join: Join
    devices_per_rank: Literal["one", "all"] = "one"
    """How many GPUs a rank computes on: one, or its equal part of all that its host shows."""
    leaves_out_batches: bool = False
    """A batch can be left out as if it had not been (`train.non_finite`): all that it changes is the learner's."""
    secondary_error: re.Pattern[str] = MATCHES_NOTHING
    """What an error, or the last words, of a rank say that only lost its peer: another rank's fault is the cause."""
    check: Callable[[TrainConfig], None] = _takes_all
    """Raises UsageError for settings that it cannot run with; nothing is imported that trains."""
    compressions: tuple[str, ...] = ("none",)
    """Which values of `train.compression` it has."""
    syncs_batch_norm: bool = False
    """It can add up batch norms' moments over ranks in the middle of a step (`train.sync_batch_norm`)."""
    may_lose: Callable[[TrainConfig], frozenset[int]] = _loses_none
    """The ranks without which the others go on, once training has begun. Their steps are not waited for, and a global
    step is what the other ranks report."""
    roles: Callable[[TrainConfig], tuple[Role, ...]] = all_members
    """What the process of each rank is for; those that run the loop come first."""
    serve: Callable[[WorkerTask, World, Reporter], NoReturn] = _none_serves
    """What a process that does not run the loop does instead, until the driver ends it; raises what goes wrong."""
    timeline: Callable[[Path], AbstractContextManager[None]] = _has_none
    """Records what its exchange does meanwhile (`train.log.profile_steps`) into a file of that folder, where it can."""
    shares_streams: bool = True
    """Each rank reads its part of the streams; False: every worker reads all of them."""

    def allows_world_size(self, world_size: int) -> bool:
        return world_size >= 1 and (self.max_world_size is None or world_size <= self.max_world_size)
