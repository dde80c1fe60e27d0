"""A rank's view of its running world: the loop uses only this interface, for any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardmill.values import Batch
from train.backends.backend import Learner
from train.checkpoints.checkpoint import SavedFiles
from train.contracts.mesh import DataIndex
from train.contracts.step_outcome import StepOutcome

if TYPE_CHECKING:
    from shardmill.values import Cursor
    from train.contracts.epochs import Batches, Epoch


@dataclass(frozen=True, slots=True)
class SiloIndex(DataIndex):
    """Member `index` of `count` trains on a dataset of its own; `streams` are those on which it evaluates."""

    uri: str
    rows_of_silos: tuple[int, ...]
    """Samples in the train split of each."""

    @property
    def fraction(self) -> float:
        """Fraction of its training data: all."""
        return 1.0


@dataclass(frozen=True, slots=True)
class MemberStep:
    """One step as a member saw it."""

    outcome: StepOutcome
    allreduce_seconds: float
    """Time spent in the exchange with other ranks; the rest was computation."""
    input_wait_seconds: float = 0.0
    """Time spent waiting for rows that another process reads."""
    batch: Batch | None = None
    """The batch of the step, if another process has read it."""


class Member(Protocol):
    """Every rank calls each method at the same place of the loop; those that exchange data return together."""

    rank: int
    world_size: int
    data: DataIndex
    learner: Learner
    reads_its_weights: bool
    """Whether it reads its own part of `train.init_from`. If not, rank 0 reads all, and `start` gives it to all."""

    def batches(self, epoch: Epoch, cursor: Cursor) -> Batches:
        """Yield the remaining batches of `epoch` from `cursor` on, as this member has them."""
        ...

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        """One update of the model by the global batch, of which this member has `batch`."""
        ...

    def own_gradient_is_finite(self, batch: Batch, global_weight: int) -> bool:
        """Whether what this member would add to a step of these rows is finite. No weight changes; moving statistics
        and random generators do."""
        ...

    def average_moving_statistics(self) -> None:
        """After an epoch: give all members the same moving statistics."""
        ...

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """The sum over all members, in the array's own type."""
        ...

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in rank order; not all of them may be empty."""
        ...

    def barrier(self) -> None:
        """Return when every member has arrived."""
        ...

    def close(self) -> None:
        """Leave the world."""
        ...

    def gather_aside(self, data: bytes) -> list[bytes]:
        """Like `gather_bytes` for those that have a part of a checkpoint; called by the thread that writes it."""
        ...

    def state_files(self) -> dict[str, list[np.ndarray]]:
        """This member's part of a checkpoint: what goes into which file. Later steps do not change the arrays."""
        ...

    def files_to_resume(self, saved: SavedFiles) -> list[str]:
        """The files of a checkpoint that this member needs, whichever strategy has written it."""
        ...

    def start(self, files: Mapping[str, bytes], saved_world_size: int, source: str) -> None:
        """Begin with the state in `files` (those of `files_to_resume`; none for fresh weights), alike on all members.

        Raises UsageError if they hold the state of another model.
        """
        ...

    def weight_files(self, saved: SavedFiles) -> list[str]:
        """The files of a checkpoint that this member needs for `take_weights`."""
        ...

    def take_weights(self, files: Mapping[str, bytes], source: str) -> None:
        """Exchange the model's weights for those in `files`, on all members."""
        ...
