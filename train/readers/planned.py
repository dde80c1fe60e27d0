"""The reader of the epoch plan: every sample exactly once, the same global batches at every world size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardmill.augment.mixing import check_streams
from shardmill.epoch_plan import EpochPlan
from shardmill.loader.reader import BatchReader, read_epoch
from train.contracts.epochs import row_source

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.loader.row_source import RowSource
    from train.config import TrainConfig
    from train.contracts.mesh import DataIndex


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
