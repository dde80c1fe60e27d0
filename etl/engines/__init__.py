"""Engines run `write_unit` over work units; a new one is a module with a function and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.registry import Entry, Registry

if TYPE_CHECKING:
    from etl.units import UnitTask, WorkUnit
    from shardmill.dataset.unit_result import UnitResult
    from shardmill.jobs.config import SparkConfig

    # Each unit's result once, as the units finish, in any order.
    Engine = Callable[[Sequence[WorkUnit], UnitTask, "EngineSettings"], Iterator[UnitResult]]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine may need of the config; each takes what concerns it."""

    spark: SparkConfig
    num_workers: int
    """Processes on this machine; 0 for one per core."""


ENGINES: Registry[Engine] = Registry(
    "etl.engine",
    {
        "auto": Entry(
            "etl.engines.auto:run_automatically",
            "local on one machine; spark under spark-submit, with a cluster's spark.master, or above 10 million images",
        ),
        "local": Entry("etl.engines.local:run_locally", "processes on this machine; no Java, no Spark"),
        "spark": Entry(
            "etl.engines.spark:run_on_spark",
            "Spark tasks; local threads, or a cluster",
            extra="spark",
            packages=("pyspark",),
        ),
    },
    takes_own=True,
)
