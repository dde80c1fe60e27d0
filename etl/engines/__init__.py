"""Engines run `write_unit` over work units, and group rows; a new one is an `Engine` in a module, and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.jobs.config import is_local_master, is_under_spark_submit
from shardmill.registry import Entry, ExtensionPoint, Registry

if TYPE_CHECKING:
    import pyarrow as pa

    from etl.listing.grouping import GroupBy
    from etl.units.units import CopyUnit, UnitTask, WorkUnit
    from shardmill.dataset.build import UnitResult
    from shardmill.jobs.config import SparkConfig


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the config that engines may need; each engine uses its own part."""

    spark: SparkConfig
    num_workers: int
    """Units that are decoded at once on this machine; 0 for one per core."""
    count_retries: Callable[[int], object] = lambda number: None
    """Told how many attempts at units ended too early and were followed by another one."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The interface of an engine, which runs a build's work. Results do not depend on the engine."""

    run_units: Callable[[Sequence[WorkUnit], UnitTask, EngineSettings], Iterator[UnitResult]]
    """Each unit's result once, as the units finish, in any order."""
    group_rows: Callable[[GroupBy, EngineSettings], Iterator[pa.Table]]
    """The answer of each part of a group-by, in the order of the parts; `etl.listing.grouping.group_here` will do."""
    copy_rows: Callable[[Sequence[CopyUnit], UnitTask, EngineSettings], Iterator[UnitResult]] = (
        lambda units, task, settings: ENGINES["local"].copy_rows(units, task, settings)
    )
    """Like `run_units`, with `etl.units.copy_rows.copy_rows` for each unit; by default in processes of this machine."""
    opened: Callable[[EngineSettings], AbstractContextManager[None]] = lambda settings: nullcontext()
    """Entered before a build lists its source: what the parts of its work can share stays open inside."""


ENGINES: Registry[Engine] = Registry(
    "etl.engine",
    {
        "auto": Entry(
            "etl.engines:AUTO",
            "local on one machine; spark under spark-submit, with a cluster's spark.master, or above 10 million images",
        ),
        "local": Entry("etl.engines.local:LOCAL", "processes on this machine; no Java, no Spark"),
        "spark": Entry(
            "etl.engines.spark:SPARK", "Spark tasks; local threads, or a cluster", extra="spark", packages=("pyspark",)
        ),
    },
    takes_own=True,
    point=ExtensionPoint("what runs the work units", "etl.engines:Engine"),
)

# About eleven hours of two cores at 250 images a second (docs/benchmarks/etl_peers.md).
MAX_LOCAL_IMAGES = 10_000_000


def engine_that_runs(name: str, num_images: int, settings: EngineSettings) -> str:
    """Of `etl.engine = NAME`: the named one; of `auto`, no JVM unless a cluster is configured or one machine would have
    too many images.
    """
    return name if name != "auto" else "spark" if num_images > MAX_LOCAL_IMAGES else _likely(settings)


def _likely(settings: EngineSettings) -> str:
    """What `auto` runs with few images, and all group-bys and copies with, however many: nothing of it needs a JVM."""
    has_cluster = is_under_spark_submit() or not is_local_master(settings.spark.master)
    return "spark" if has_cluster else "local"


def _run_automatically(units: Sequence[WorkUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    engine = engine_that_runs("auto", sum(unit.num_images for unit in units), settings)
    return ENGINES[engine].run_units(units, task, settings)


AUTO = Engine(
    _run_automatically,
    lambda group, settings: ENGINES[_likely(settings)].group_rows(group, settings),
    lambda units, task, settings: ENGINES[_likely(settings)].copy_rows(units, task, settings),
    lambda settings: ENGINES[_likely(settings)].opened(settings),
)
