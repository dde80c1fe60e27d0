"""The plan of a training: who trains, and what follows from the memory. Made once, in the driver, by `plan_training`.

It is recorded in the training's folder (`train.planning.trainings.PlanRecord`), which every resume reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.checksummed import with_checksum
from train.config import TrainConfig
from train.launching import is_on_spark
from train.planning.checks import check, window_memory
from train.planning.memory import Fitted, Memory, look_at_memory
from train.planning.resume import resolve_resume
from train.planning.shard import begun_setup, check_unsharded
from train.planning.state_bytes import RankParts
from train.planning.trainings import PLAN, Decision, PlanRecord, read_plan
from train.planning.trial_build import try_build
from train.strategies.options import MirroredOptions

if TYPE_CHECKING:
    from shardmill.storage import Store
    from train.planning.resume import ResumePolicy
    from train.planning.setup import Setup
    from train.planning.trainings import FoundTraining, TrainingChoice
    from train.reporting.observer import TrainObserver


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Ranks, strategy, launcher, backend, streams, and, once the memory was looked at, microbatches and precision."""

    setup: Setup
    memory: Memory | None = None
    """Memory of this training, for any number of ranks; None if it was not examined."""
    fitted: Fitted | None = None
    """Its consequence for these ranks."""

    @property
    def config(self) -> TrainConfig:
        """The config that ranks receive: what was asked for, with every decision filled in."""
        return self.fitted.config if self.fitted else self.setup.config

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Each with its reason."""
        config, setup, set_by_user = self.config, self.setup, "set"
        of_memory = self.fitted.reason if self.fitted and self.fitted.reason else "as configured"
        backend = set_by_user if setup.asked.backend != "auto" else "the strategy and the model's source"
        return (
            Decision("train.num_workers", str(config.num_workers), setup.ranks_reason or set_by_user),
            Decision("train.num_streams", str(config.num_streams), setup.streams_reason or set_by_user),
            Decision("train.strategy", config.strategy, setup.strategy_reason),
            Decision("train.launcher", config.launcher, setup.launcher_reason),
            Decision("train.backend", config.backend, backend),
            Decision("train.accumulation_steps", str(config.accumulation_steps), of_memory),
            Decision("train.mixed_precision", config.mixed_precision, of_memory),
            Decision("train.memory.activation_checkpointing", config.memory.activation_checkpointing, of_memory),
            Decision("train.init_from", config.init_from or "fresh weights", "named by the hash of its file"),
        )

    def after_loss(self, num_workers: int) -> TrainingPlan:
        """The same training by fewer ranks, after some were lost. Which machine has which rank now is the launcher's
        choice, so `train.rank_weights` would meet other machines. Raises UsageError if so many cannot divide it."""
        return _fitted(self.setup.changed(num_workers=num_workers, rank_weights=()), self.memory)


def plan_training(
    found: FoundTraining, again: ResumePolicy, observer: TrainObserver
) -> tuple[TrainingChoice, TrainingPlan]:
    """How a training begins, or resumes as it was begun, in the memory that there is; and the training, which may be
    another unfinished one.

    Raises UsageError for what cannot run, and what building the model raises.
    """
    setup = begun_setup(found)
    setup = setup.with_window(window_memory(setup).window_chunks)
    # Before a cluster is asked for ranks, or ranks divide layers or stages that may not divide. Of other ranks, also
    # those that shard it, rank 0 builds and calls the model as soon as a trial would, which is seconds slower for all.
    # A training with steps has already been built.
    if (setup.divides_model or is_on_spark(setup.config.launcher)) and not found.has_steps:
        try_build(setup, setup.of_dataset.manifest.row_schema, observer)
    memory = look_at_memory(setup, RankParts(), begun=found.begun, has_begun=found.has_steps)
    if found.is_new:
        check_unsharded(setup, memory)
    choice, setup = resolve_resume(found.models, found.choice, setup, memory, again, observer)
    if choice.resumes:
        # It may have the streams of that training.
        check(setup)
    return choice, _fitted(setup, memory)


def _fitted(setup: Setup, memory: Memory | None) -> TrainingPlan:
    return TrainingPlan(setup, memory, memory.fitted(setup) if memory else None)


def plan_record(plan: TrainingPlan) -> PlanRecord:
    """As it is kept for a resume."""
    setup, config = plan.setup, plan.setup.config
    return PlanRecord(
        ranks_reason=setup.ranks_reason,
        strategy=config.strategy,
        strategy_reason=setup.strategy_reason,
        launcher=config.launcher,
        launcher_reason=setup.launcher_reason,
        num_workers=config.num_workers,
        num_streams=config.num_streams,
        window_chunks=config.reading.window_chunks,
        local_devices=config.options(MirroredOptions).num_devices,
        devices=config.devices,
        spark_master=setup.spark.master,
        memory=plan.memory.record if plan.memory else None,
        decisions=plan.decisions,
    )


def keep_plan(store: Store, training_dir: str, plan: TrainingPlan) -> None:
    """Write how this attempt is planned, for those that resume it."""
    now, before = plan_record(plan), read_plan(store, [training_dir])
    # The reasons of the first attempt hold as long as its decisions do.
    told = {name: getattr(now, name) for name in ("ranks_reason", "strategy_reason", "launcher_reason", "decisions")}
    if before is None or before.model_copy(update=told) != now:
        store.put(f"{training_dir}/{PLAN}", with_checksum(now.model_dump_json().encode()))
