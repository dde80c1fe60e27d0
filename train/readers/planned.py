"""The reader of the epoch plan: every sample exactly once, the same global batches at every world size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.augment.mixing import check_streams
from shardmill.epoch_plan import EpochPlan
from shardmill.loader.reader import BatchReader, read_batches
from train.contracts.epochs import reader_options

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from train.config import TrainConfig
    from train.contracts.epochs import Epoch
    from train.contracts.mesh import DataIndex


class PlannedEpoch:
    """`Epoch` of a plan."""

    def __init__(self, dataset: Dataset, config: TrainConfig, plan: EpochPlan, streams: range) -> None:
        self.num_steps = plan.num_steps
        self.num_rows = plan.num_rows
        self.num_rows_of_step = plan.num_rows_of_step
        self._dataset, self._config, self._plan, self._streams = dataset, config, plan, streams

    def read(self, first_step: int) -> BatchReader:
        config = self._config
        return read_batches(
            self._dataset,
            self._plan,
            streams=self._streams,
            first_step=first_step,
            options=reader_options(config, self._dataset, self._plan.spec),
            augment=config.augmentation,
        )


class Planned:
    """`TrainReader`; what it needs is checked where the plan is."""

    is_exact = True
    follows_plan = True

    def check(self, config: TrainConfig, dataset: Dataset) -> None:
        if config.num_streams:
            check_streams(config.augment, config.global_batch_size // config.num_streams)

    def limits(self, config: TrainConfig, dataset: Dataset) -> str:
        return ""

    def epoch(self, dataset: Dataset, config: TrainConfig, number: int, data: DataIndex) -> Epoch:
        return PlannedEpoch(dataset, config, dataset.plan_epoch(config.plan_spec(dataset), number), data.streams)


PLANNED = Planned()
