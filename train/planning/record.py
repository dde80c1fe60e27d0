"""The record of a training's plan in its folder, `plan.json`, which every resume reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardmill.checksummed import with_checksum
from shardmill.section import Section
from shardmill.storage import Store
from train.planning.memory_record import MemoryRecord
from train.planning.plan import Decision, TrainingPlan
from train.records import read_kept
from train.strategies.options import MirroredOptions

if TYPE_CHECKING:
    from shardmill.jobs.config import SparkConfig

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
