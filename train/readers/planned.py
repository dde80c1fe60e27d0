"""The reader of the epoch plan: every sample exactly once, the same global batches at every world size.

`Epochs` are all epochs of a training as one member reads them, whichever reader it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardmill.augment.mixing import check_streams
from shardmill.epoch_plan import EpochPlan
from shardmill.loader.reader import BatchReader, read_epoch
from shardmill.stores import open_store
from train.api import TrainReader
from train.contracts.activities import Activity, reading
from train.contracts.mesh import SiloIndex
from train.contracts.row_source import row_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardmill.dataset.dataset import Dataset
    from shardmill.loader.row_source import RowSource
    from train.api import Epoch
    from train.config import TrainConfig
    from train.contracts.mesh import DataIndex
    from train.contracts.values import Progress


class PlannedEpoch:
    """`Epoch` of a plan."""

    def __init__(self, plan: EpochPlan, epochs: PlannedEpochs) -> None:
        self.num_steps = plan.num_steps
        self.num_rows = plan.num_rows
        self.num_rows_of_step = plan.num_rows_of_step
        self._plan, self._epochs = plan, epochs

    def read(self, first_step: int) -> BatchReader:
        return read_epoch(self._epochs.source, self._plan, first_step)


@dataclass(frozen=True)
class PlannedEpochs:
    """Opens the epochs of a plan for a rank's streams; all of them read from one source."""

    dataset: Dataset
    config: TrainConfig
    streams: range

    def __call__(self, number: int) -> PlannedEpoch:
        return PlannedEpoch(self.dataset.plan_epoch(self.config.plan_spec(self.dataset), number), self)

    @cached_property
    def source(self) -> RowSource:
        """Made when an epoch is read: then its cache is opened, too."""
        return row_source(self.config, self.dataset, self.config.plan_spec(self.dataset), self.streams)


class Planned:
    """`TrainReader`; what it needs is checked where the plan is."""

    is_exact = True
    follows_plan = True

    def check(self, config: TrainConfig, dataset: Dataset) -> None:
        if config.num_streams:
            check_streams(config.augment, config.global_batch_size // config.num_streams)

    def limits(self, config: TrainConfig, dataset: Dataset) -> str:
        return ""

    def epochs(self, dataset: Dataset, config: TrainConfig, data: DataIndex) -> PlannedEpochs:
        return PlannedEpochs(dataset, config, data.streams)


PLANNED = Planned()


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
