"""The reader of a silo: reads images of the silo's own dataset, in step with the other silos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import UsageError
from shardmill.loader.reader import BatchReader, ReaderSeconds, read_epoch
from train.contracts.mesh import DataIndex, SiloIndex
from train.contracts.row_source import row_source
from train.labels import LabelSpec

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import EpochPlan
    from shardmill.loader.row_source import RowSource
    from shardmill.values import Batch
    from train.config import TrainConfig


@dataclass(frozen=True)
class SiloSteps:
    """Steps of silos: each gives samples to a step in proportion to its size, so that all end together."""

    rows_of_silos: tuple[int, ...]
    global_batch_size: int

    @cached_property
    def local_batch_sizes(self) -> tuple[int, ...]:
        most_steps = -(-sum(self.rows_of_silos) // self.global_batch_size)
        return tuple(-(-rows // most_steps) for rows in self.rows_of_silos)

    @property
    def num_steps(self) -> int:
        sizes = zip(self.rows_of_silos, self.local_batch_sizes, strict=True)
        return max(-(-rows // batch) for rows, batch in sizes)

    def num_rows_of_step(self, step: int) -> int:
        sizes = zip(self.rows_of_silos, self.local_batch_sizes, strict=True)
        return sum(min(max(rows - step * batch, 0), batch) for rows, batch in sizes)


class SiloEpoch:
    """`train.api.Epoch` of one silo."""

    def __init__(self, plan: EpochPlan, epochs: SiloEpochs) -> None:
        self._plan, self._epochs = plan, epochs
        self.num_steps = epochs.steps.num_steps
        self.num_rows = sum(epochs.steps.rows_of_silos)
        self.num_rows_of_step = epochs.steps.num_rows_of_step

    def read(self, first_step: int) -> SiloBatches:
        # A silo whose samples are used up takes part with padding: for that it reads its last batch.
        start = min(first_step, self._plan.num_steps - 1)
        reader = read_epoch(self._epochs.source, self._plan, start)
        return SiloBatches(
            reader, first_step, self.num_steps, self._epochs.class_of_own, len(self._epochs.pinned.manifest.class_names)
        )


class SiloEpochs:
    """Opens the epochs of one silo; all of them read from one source."""

    def __init__(self, pinned: Dataset, config: TrainConfig, data: SiloIndex) -> None:
        self.pinned = pinned
        self.steps = SiloSteps(data.rows_of_silos, config.global_batch_size)
        self._config = config
        self._silo = open_dataset(data.uri)
        self.class_of_own = _classes_in(pinned, self._silo, data.uri)
        self._spec = self._silo.plan_spec(
            "train",
            seed=config.seed,
            global_batch_size=self.steps.local_batch_sizes[data.index],
            num_streams=1,
            window_bytes=config.reading.window_budget_bytes,
        )

    def __call__(self, number: int) -> SiloEpoch:
        return SiloEpoch(self._silo.plan_epoch(self._spec, number), self)

    @cached_property
    def source(self) -> RowSource:
        """Made when an epoch is read."""
        return row_source(self._config, self._silo, self._spec, range(1))


@dataclass(frozen=True, slots=True)
class SiloBatches:
    """`Batches` of a silo: labels are the pinned dataset's, and steps after its own last one are padding."""

    reader: BatchReader
    first_step: int
    num_steps: int
    class_of_own: np.ndarray
    num_classes: int
    """Of the pinned dataset."""

    def __enter__(self) -> SiloBatches:
        self.reader.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.reader.__exit__(*exception)

    def __iter__(self) -> Iterator[Batch]:
        batch = None
        for batch in self.reader:
            if batch.step >= self.first_step:
                yield replace(batch, labels_N=self._labels(batch))
        assert batch is not None
        for step in range(max(self.first_step, batch.step + 1), self.num_steps):
            nothing_N = np.zeros_like(batch.weights_N)
            yield replace(batch, labels_N=self._labels(batch), weights_N=nothing_N, step=step)

    def _labels(self, batch: Batch) -> np.ndarray:
        if batch.labels_N.ndim == 1:
            return self.class_of_own[batch.labels_N]
        # Shares of classes, of mixed rows.
        labels_NK = np.zeros((len(batch.labels_N), self.num_classes), np.float32)
        labels_NK[:, self.class_of_own] = batch.labels_N
        return labels_NK

    def take_seconds(self) -> ReaderSeconds:
        return self.reader.take_seconds()


class Silos:
    """`train.api.TrainReader`; the strategy checks what silos need."""

    is_exact = True
    follows_plan = False

    def check(self, config: TrainConfig, dataset: Dataset) -> None:
        labels = LabelSpec.of(dataset.manifest)
        if labels.kind != "class":
            raise UsageError(
                f"train.local_sgd.silos on {labels}",
                "expected one class per image",
                "remove train.local_sgd.silos, or build such datasets",
            )

    def limits(self, config: TrainConfig, dataset: Dataset) -> str:
        return ""

    def epochs(self, dataset: Dataset, config: TrainConfig, data: DataIndex) -> SiloEpochs:
        assert isinstance(data, SiloIndex), data
        return SiloEpochs(dataset, config, data)


SILOS = Silos()


def _classes_in(pinned: Dataset, silo: Dataset, uri: str) -> np.ndarray:
    """The pinned dataset's number of each class of the silo."""
    ours, its = pinned.manifest, silo.manifest
    if its.row_schema.label_kind != ours.row_schema.label_kind:
        raise UsageError(
            f"the silo {uri} has labels of kind {its.row_schema.label_kind!r}",
            f"expected {ours.row_schema.label_kind!r}, as dataset.uri has",
            "build it with the same section source",
        )
    unknown = sorted(set(its.class_names) - set(ours.class_names))
    if unknown or its.normalize.image_shape_HWC != ours.normalize.image_shape_HWC:
        raise UsageError(
            f"the silo {uri} has images of {its.normalize.image_shape_HWC}"
            + (f" and the classes {', '.join(unknown)}, which dataset.uri does not have" if unknown else ""),
            f"expected {ours.normalize.image_shape_HWC} and classes among {', '.join(ours.class_names)}",
            "build it with the same section etl; dataset.uri must have every class",
        )
    return np.array([ours.class_names.index(name) for name in its.class_names], np.int64)
