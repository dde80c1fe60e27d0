"""Runs one rank in this process and keeps what it reported; can end it in the middle of a step, as a crash would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etl.config import EtlConfig
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.jobs.config import DatasetConfig, ModelsConfig, SparkConfig
from shardmill.jobs.observer import FieldValue
from train.api import StatePart
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import StepReport, TrainResult
from train.contracts.world import World
from train.initialization.initial import check_initial
from train.labels import LabelSpec
from train.models.user import source_sha256
from train.planning.checks import check
from train.planning.setup import Setup, resolve
from train.rank.worker import run_worker
from train.reporting.observer import GlobalStep
from train.settings import GateConfig
from train.tree import TrainTree

MODELS = "tests.train.models_under_test"
ONE_LAYER = f"{MODELS}:linear"
ETL = EtlConfig(image_size=16, encoding="png", chunk_bytes=8_000, unit_min_images=40)
SMALL = {"epochs": 2, "global_batch_size": 32, "augment": {"random_crop_padding": 1}}


class Killed(BaseException):
    """Not an Exception: nothing may handle it."""


@dataclass
class Recorder:
    """A reporter that remembers, and raises Killed instead of reporting global step `killed_at` (counted from 0)."""

    killed_at: int | None = None
    steps: list[StepReport] = field(default_factory=list)
    events: list[tuple[str, dict]] = field(default_factory=list)

    def step(self, report: StepReport) -> None:
        if report.epoch * report.num_steps + report.step == self.killed_at:
            raise Killed
        self.steps.append(report)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self.events.append((name, dict(fields)))

    def doing(self, activity: Activity) -> Activity:
        return activity

    @property
    def losses(self) -> dict[tuple[int, int], str]:
        return {(report.epoch, report.step): report.loss_hex for report in self.steps}

    def named(self, name: str) -> list[dict]:
        return [fields for event, fields in self.events if event == name]


@dataclass
class DriverRecorder(Recorder):
    """As `Recorder`, on the driver's side: of the steps of all ranks; it fails after `fail_after_steps` of them."""

    fail_after_steps: int = -1

    def step(self, step: GlobalStep) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.steps.append(step)  # pyright: ignore[reportArgumentType]
        if len(self.steps) == self.fail_after_steps:
            raise RuntimeError("stopped here")

    @property
    def losses(self) -> dict[tuple[int, int], str]:
        """Of a step that was done twice the last."""
        return {(step.epoch, step.step): step.loss_hex for step in self.steps}

    @property
    def sample_ids(self) -> dict[tuple[int, int], tuple[str, ...]]:
        return {(step.epoch, step.step): step.sample_ids for step in self.steps}

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def check_terms(config: TrainConfig, spark: SparkConfig) -> Setup:
    """All that a training refuses before it looks at the dataset."""
    setup = check(resolve(config, spark))
    check_initial(setup.config)
    return setup


def check_trainable(config: TrainConfig, dataset: Dataset, gate: GateConfig | None = None) -> None:
    """All that it refuses of a dataset."""
    check(resolve(config, SparkConfig(), dataset, gate))


def task_of(uri: str, models: Path | str, training_dir: str = "t", **config: object) -> WorkerTask:
    settings = resolve(TrainConfig(**{**SMALL, **config}), SparkConfig()).config
    return WorkerTask(settings, open_dataset(uri).pin, str(models), training_dir, source_sha256(settings.model))


def tree_of(dataset_uri: str, models_uri: Path, **train: Any) -> TrainTree:
    """What a driver is given; of a model of one layer, if `train` names none."""
    settings = {"model": ONE_LAYER, "epochs": 2, "global_batch_size": 24, "num_streams": 6, "checkpoint_every_steps": 2,
                **train}  # fmt: skip
    return TrainTree(
        dataset=DatasetConfig(uri=dataset_uri), models=ModelsConfig(uri=str(models_uri)), train=TrainConfig(**settings)
    )


def train_here(
    uri: str,
    models: Path | str,
    recorder: Recorder | None = None,
    training_dir: str = "t",
    expect_source: str | None = None,
    **config: object,
) -> TrainResult:
    """Of a model of one layer, if `config` names none."""
    task = task_of(uri, models, training_dir, **{"model": ONE_LAYER, **config})
    if expect_source is not None:
        task = replace(task, model_source_sha256=expect_source)
    return run_worker(task, World(), recorder or Recorder())


def keras_model_of(learner: Any, model: str, shape_HWC: tuple[int, int, int], labels: LabelSpec) -> Any:
    """Another Keras model of the factory `model`, with a learner's weights, statistics and layers' names."""
    from train.backends.keras.build import build_model

    # Names are numbered, and counted from the start.
    BACKENDS["keras"].start(World(), 0)
    built = build_model(TrainConfig(model=model), shape_HWC, labels).model
    variables = [*built.trainable_variables, *built.non_trainable_variables]
    arrays = [*learner.arrays(StatePart.WEIGHTS), *learner.arrays(StatePart.OWN)]
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)
    return built
