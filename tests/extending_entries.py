"""One new entry for each extension point, as an extension would bring it: all that tests/test_extending.py adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from etl.engines import Engine, EngineSettings
from etl.listing.grouping import group_here
from etl.sources.folders import FolderSource
from etl.units.copy_unit import copy_rows
from etl.units.units import CopyUnit, WorkUnit
from etl.units.write_unit import UnitTask, write_unit
from shardmill.dataset.unit_result import UnitResult
from shardmill.environments import Starter, local_numbers
from shardmill.errors import UsageError
from shardmill.formats.encodings import PNG
from shardmill.formats.parquet import PARQUET
from shardmill.section import Section
from shardmill.stores.local import LocalStore
from train.backends.keras.backend import KerasBackend
from train.backends.keras.optimizers import sgd
from train.config import TrainConfig
from train.contracts.world import World
from train.launching.inline import INLINE
from train.models.small_cnn import small_cnn
from train.optimizers import Optimizer
from train.readers.planned import Planned
from train.reporting.scalars import Scalars
from train.reporting.trackers.sent import SentTracker
from train.schedules import STEP
from train.strategies.collective import SingleCollective
from train.strategies.replicated import replicated
from train.strategies.single import SINGLE

NEW_READER = Planned()
NEW_SOURCE = FolderSource
NEW_FORMAT = replace(PARQUET, suffix="new.parquet")
NEW_ENCODING = replace(PNG)


class NewOptions(Section):
    """Settings of the strategy `new`."""

    patience: int = Field(default=1, ge=1)
    """Anything that no other strategy has."""


class NewCollective(SingleCollective):
    """How its one rank exchanges data; its first sum says with what setting."""

    def __init__(self, patience: int) -> None:
        self._says = f"the first sum with patience {patience}"

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        if self._says:
            print(self._says)
            self._says = ""
        return super().sum_tensors(tensors)


def join_new(world: World, config: TrainConfig) -> NewCollective:
    """Runs on a rank."""
    return NewCollective(config.options(NewOptions).patience)


def check_new(config: TrainConfig) -> None:
    """Runs in the driver, which refuses a value of the strategy's own setting."""
    if (patience := config.options(NewOptions).patience) > 9:
        raise UsageError(f"train.new.patience = {patience}", "expected at most 9")


NEW_STRATEGY = replace(SINGLE, backends=("keras", "new"))
NEW_STRATEGY_WITH_OPTIONS = replace(NEW_STRATEGY, check=check_new, join=replicated(join_new))
NEW_BACKEND = KerasBackend()
NEW_LAUNCHER = replace(INLINE)
NEW_ENVIRONMENT = Starter("the new cluster", "NEW_RANK", "NEW_SIZE", local_numbers("NEW_LOCAL_RANK", "NEW_LOCAL_SIZE"))
NEW_MODEL = small_cnn
NEW_SCHEDULE = replace(STEP)
new_optimizer = Optimizer(keras=sgd)


class NewTracker(SentTracker):
    """Its server is a file of the run."""

    def begin(self) -> None:
        self.run_id, self._lines = self.run.run_id, list[str]()

    def send(self, scalars: Sequence[Scalars]) -> None:
        self._lines += [f"{each.at} {name} {value}\n" for each in scalars for name, value in each.values.items()]

    def end(self, *, is_finished: bool) -> None:
        self.run.store.put(f"{self.run.folder}/curves.txt", "".join([*self._lines, f"{is_finished}"]).encode())


def run_here(units: Sequence[WorkUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    """Every unit in this process, one after the other."""
    return (write_unit(unit, task) for unit in units)


def copy_here(units: Sequence[CopyUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    """As `run_here`."""
    return (copy_rows(unit, task) for unit in units)


NEW_ENGINE = Engine(run_here, group_here, copy_here)


def new_store(uri: str) -> LocalStore:
    """`new:///folder` is a local folder."""
    return LocalStore(uri.removeprefix("new://"))
