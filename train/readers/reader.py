"""The interface of readers: a reader opens the epochs of a rank, and declares its guarantees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from shardmill.stores import open_store
from train.contracts.activities import Activity, reading
from train.strategies.member import SiloIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardmill.dataset.dataset import Dataset
    from train.config import TrainConfig
    from train.contracts.epochs import Epoch
    from train.contracts.mesh import DataIndex
    from train.contracts.progress import Progress


class TrainReader(Protocol):
    """One way to read the train split."""

    is_exact: bool
    """Every sample exactly once an epoch, the same at every world size, and resumed at any step."""

    follows_plan: bool
    """The epoch plan shares its rows out, among any number of ranks that the streams allow."""

    def check(self, config: TrainConfig, dataset: Dataset) -> None:
        """Raises UsageError, before anything starts, for a dataset or a number of ranks that it cannot read for."""
        ...

    def limits(self, config: TrainConfig, dataset: Dataset) -> str:
        """Describe the limits of this training's epochs, with numbers; empty if there are none."""
        ...

    def epochs(self, dataset: Dataset, config: TrainConfig, data: DataIndex) -> Callable[[int], Epoch]:
        """What opens an epoch by its number, for the member with this share of the data.

        It may keep memory from one epoch for the next; nothing is read before an epoch is.
        """
        ...


@dataclass(frozen=True)
class Epochs:
    """All epochs of a training as one member reads them."""

    reader: TrainReader
    dataset: Dataset
    config: TrainConfig
    data: DataIndex

    def __getitem__(self, number: int) -> Epoch:
        return self._open(number)

    @cached_property
    def _open(self) -> Callable[[int], Epoch]:
        return self.reader.epochs(self.dataset, self.config, self.data)

    @cached_property
    def num_steps(self) -> int:
        """Number of steps of each epoch."""
        return self[0].num_steps

    @cached_property
    def num_rows(self) -> int:
        """Number of rows of each epoch, on all ranks."""
        return self[0].num_rows

    @cached_property
    def reading(self) -> Activity:
        """Waiting for a batch: from the store of what this member reads."""
        budget_bytes = self.config.reading.window_budget_bytes
        if isinstance(self.data, SiloIndex):
            return reading("reading a batch", open_store(self.data.uri), budget_bytes)
        # Of a training that began on more ranks the windows may be larger.
        num_chunks = len(self.data.streams) * self.config.reading.window_chunks
        window_bytes = num_chunks * self.dataset.index("train").max_chunk_bytes
        return reading("reading a batch", self.dataset.store, max(budget_bytes, window_bytes))

    @property
    def checkpoint_every_steps(self) -> int:
        """Inside of epochs; 0 for only at their ends, the only points at which an inexact reader can resume."""
        return self.config.checkpoint_every_steps if self.reader.is_exact else 0

    def resumed(self, progress: Progress) -> Progress:
        """The position at which a training with this progress continues."""
        return progress if self.reader.is_exact else progress.at_epoch_start()
