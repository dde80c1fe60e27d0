"""Plans a training: resolves `auto`, keeps the choices of an earlier attempt, and checks the result.

A plan is recorded in the training's folder, `plan.json`, which every resume reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardmill.checksummed import with_checksum
from shardmill.epoch_plan import num_streams_for
from shardmill.errors import UsageError
from shardmill.section import Section
from shardmill.storage import Store
from shardmill.words import counted
from train.planning.auto import AUTO, resolve
from train.planning.host_memory import MemoryRecord
from train.planning.plan import Decision, TrainingPlan
from train.planning.preflight import check_spread
from train.records import read_kept
from train.strategies.options import MirroredOptions

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.jobs.config import SparkConfig
    from train.config import TrainConfig


PLAN = "plan.json"
"""The `PlanRecord` of a training, in its folder."""
_ADVICE = "delete it: `auto` is then resolved again, and numbers may differ by rounding"


class PlanRecord(Section):
    """The plan of the newest attempt at a training, and the settings that it was based on."""

    ranks_reason: str = ""
    """Empty if the number was configured."""
    strategy: str
    strategy_reason: str
    launcher: str
    launcher_reason: str
    num_workers: int
    num_streams: int
    window_chunks: int
    """Chunks of a shuffle window, on however many ranks the training is resumed."""
    local_devices: int
    devices: str
    spark_master: str
    memory: MemoryRecord | None = None
    """The memory measurement; None if there is none."""
    decisions: tuple[Decision, ...] = ()
    """All of them, for people."""


def record_of(plan: TrainingPlan, spark: SparkConfig) -> PlanRecord:
    config = plan.spread
    return PlanRecord(
        ranks_reason=plan.ranks_reason,
        strategy=config.strategy,
        strategy_reason=plan.strategy_reason,
        launcher=config.launcher,
        launcher_reason=plan.launcher_reason,
        num_workers=config.num_workers,
        num_streams=config.num_streams,
        window_chunks=config.reading.window_chunks,
        local_devices=config.options(MirroredOptions).num_devices,
        devices=config.devices,
        spark_master=spark.master,
        memory=plan.memory.record if plan.memory else None,
        decisions=plan.decisions,
    )


def read_plan(store: Store, folders: Sequence[str]) -> PlanRecord | None:
    """The record in the first of these folders that has one; None if none has: the training begins now.

    Raises IntegrityError for a record that was altered.
    """
    return read_kept(store, folders, PLAN, PlanRecord, _ADVICE)


def keep_plan(store: Store, training_dir: str, plan: TrainingPlan, spark: SparkConfig) -> None:
    """Write how this attempt is planned, for those that resume it."""
    now, before = record_of(plan, spark), read_plan(store, [training_dir])
    # The reasons of the first attempt hold as long as its decisions do.
    told = {name: getattr(now, name) for name in ("ranks_reason", "strategy_reason", "launcher_reason", "decisions")}
    if before is None or before.model_copy(update=told) != now:
        store.put(f"{training_dir}/{PLAN}", with_checksum(now.model_dump_json().encode()))


_ASKED = ("local_devices", "devices")
_SPREAD = ("num_workers", "strategy", "launcher")
_AS_BEGUN = "as when this training began ({})"


def plan_training(
    asked: TrainConfig, spark: SparkConfig, dataset: Dataset | None = None, begun: PlanRecord | None = None
) -> TrainingPlan:
    """Decide what `asked` leaves open, and check that it can run.

    Before there is a `dataset`, nothing follows from its size. `begun`: how an earlier attempt was planned. Raises
    UsageError for what cannot work, and for more ranks than streams of `begun`; nothing is imported that trains.
    """
    if begun and not asked.num_streams:
        if (num_ranks := asked.num_ranks_asked) > begun.num_streams:
            other = num_streams_for(asked.global_batch_size, num_ranks)
            raise UsageError(
                f"{num_ranks} ranks for a training that began with train.num_streams = {begun.num_streams}",
                "each rank owns at least one stream, and a resumed training keeps its streams",
                f"set train.num_workers = {begun.num_streams} or less; or train from the beginning with --fresh or "
                f"train.num_streams = {other}",
            )
        plan = resolve(asked.model_copy(update={"num_streams": begun.num_streams}), spark, dataset)
        plan = replace(plan, asked=asked, streams_reason=_AS_BEGUN.format(begun.num_streams))
    else:
        plan = resolve(asked, spark, dataset)
    if begun:
        plan = plan.with_window(begun.window_chunks)
    check_spread(plan.config, spark)
    return plan if begun is None else _as_begun(begun, plan, spark)


def plan_of_finished(
    asked: TrainConfig, spark: SparkConfig, dataset: Dataset, record: PlanRecord | None
) -> TrainingPlan:
    """How a finished training was carried out, by its record; without one, as it would be planned now."""
    plan = plan_training(asked, spark, dataset)
    now = record_of(plan, spark)
    if record is None or all(getattr(record, name) == getattr(now, name) for name in _SPREAD):
        return plan
    plan = plan.with_ranks(record.num_workers, record.ranks_reason)
    plan = plan.with_strategy(record.strategy, record.strategy_reason)
    # The numbers that were looked at are not recorded; those of now decided nothing.
    return replace(plan.with_launcher(record.launcher, record.launcher_reason), numbers=())


def _as_begun(begun: PlanRecord, plan: TrainingPlan, spark: SparkConfig) -> TrainingPlan:
    """`plan`, but what `asked` leaves open is as an earlier attempt had it, if that can run now.

    Other workers or devices that are set, or another Spark master, are a new question, and get a new answer.
    """
    asked, now, then = plan.asked, record_of(plan, spark), plan
    is_same_master = begun.spark_master == now.spark_master
    may_be_other = is_same_master and not asked.num_workers
    same_ranks = may_be_other or begun.num_workers == now.num_workers
    same_spread = same_ranks and all(getattr(begun, name) == getattr(now, name) for name in _ASKED)
    if same_spread and begun.num_workers != now.num_workers:
        then = then.with_ranks(begun.num_workers, _AS_BEGUN.format(begun.ranks_reason or "as set"))
    if same_spread and asked.strategy == AUTO and begun.strategy != now.strategy:
        then = then.with_strategy(begun.strategy, _AS_BEGUN.format(begun.strategy_reason))
    same_place = same_spread and is_same_master
    if same_place and asked.launcher == AUTO and begun.launcher != now.launcher:
        then = then.with_launcher(begun.launcher, _AS_BEGUN.format(begun.launcher_reason))
    try:
        check_spread(then.spread, spark)
    except UsageError as error:
        how = f"{counted(begun.num_workers, 'rank')}, {begun.strategy} ({begun.launcher})"
        was = f"this training began with {how}, which cannot run now: {error}"
        return replace(plan, chosen_anew=was)
    return then
