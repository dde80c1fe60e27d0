"""A new entry for each extension point, as an extension would bring it: all that tests/test_extending.py adds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from etl.engines import Engine, EngineSettings
from etl.listing.grouping import group_here
from etl.sources.kinds.folders import FolderSource
from etl.units.copy_rows import copy_rows
from etl.units.units import CopyUnit, WorkUnit
from etl.units.write_unit import UnitTask, write_unit
from shardmill.dataset.build import UnitResult
from shardmill.environments import Starter, local_numbers
from shardmill.errors import UsageError
from shardmill.formats.encodings import PNG
from shardmill.formats.parquet import PARQUET
from shardmill.section import Section
from shardmill.stores.local import LocalStore
from train.api import Build, Member, RankState, SharedModel, Strategy, num_bytes
from train.backends.keras.backend import KerasBackend
from train.backends.keras.optimizers import sgd
from train.config import TrainConfig
from train.contracts.values import Reporter
from train.contracts.world import World
from train.launching.inline import INLINE
from train.models.small_cnn import small_cnn
from train.optimizers import Optimizer
from train.readers.planned import Planned
from train.reporting.observer import Scalars
from train.reporting.trackers.sent import SentTracker
from train.schedules import STEP
from train.strategies import mesh_of
from train.strategies.collective import AnnouncedCollective, SingleCollective
from train.strategies.replicated import SINGLE, replicated
from train.strategies.sharded.member import ShardedMember, Sharding, device_mesh_of, sum_over_all
from train.strategies.torch_ddp import TorchCollective

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner

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


def join_new_shared(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """Each rank holds a part of every weight, and gathers the whole module for its step."""
    from train.backends.torch.layout import ShardedTensors

    mesh = mesh_of(config)
    learner = cast("TorchLearner", build(materialized=world.rank == 0))
    collective = AnnouncedCollective(TorchCollective, world, reporter)
    ranks = device_mesh_of(mesh.shape, ("data", "fsdp"))
    sharding = Sharding(partial(_place, ranks), ShardedTensors(mesh.num_ranks, sum_over_all), _add_up_metrics)
    return ShardedMember(learner, collective, mesh.data_index(world.rank), world, reporter, sharding)


def _place(ranks: Any, module: Any, kept: Collection[Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=ranks, ignored_params=set(kept))
    # The loss is divided by the weight of the global batch already.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _add_up_metrics(learner: TorchLearner, addends: list[Any]) -> list[Any]:
    """(loss, number correct); the backward pass has added up the gradients."""
    sum_over_all(addends[-1])
    return addends


def rank_state_of_new_shared(config: TrainConfig, module: Any) -> RankState:
    """What the driver counts for `plan` and `auto`, without ranks."""
    from train.backends.torch.layout import ShardedTensors, kept_whole, slices_of
    from train.backends.torch.meta_device import meta_copy

    mesh = mesh_of(config)
    placed = meta_copy(module)
    _place(device_mesh_of(mesh.shape, ("data", "fsdp")), placed, kept_whole(placed))
    shapes = {name: box.shape for name, box in slices_of(placed, ShardedTensors(mesh.num_ranks, sum_over_all)).items()}
    whole = num_bytes(each.shape for each in module.parameters() if each.requires_grad)
    return RankState(shapes, shapes, module, gathered_bytes=2 * whole)


NEW_SHARED_STRATEGY = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    max_world_size=None,
    join=join_new_shared,
    shared_model=SharedModel(axes=("fsdp",), rank_state=rank_state_of_new_shared),
)
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
