"""Engines run `write_unit` over work units; a new one is a module with a function and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardmill.registry import Entry, Registry

if TYPE_CHECKING:
    from etl.units import UnitTask, WorkUnit
    from shardmill.dataset.unit_result import UnitResult
    from shardmill.jobs.config import SparkConfig

    # (units, what they share, Spark's settings, called with the number of finished units) -> every unit's result
    Engine = Callable[[Sequence[WorkUnit], UnitTask, SparkConfig, Callable[[int], None]], list[UnitResult]]

ENGINES: Registry[Engine] = Registry(
    "etl.engine",
    {
        "spark": Entry(
            "etl.engines.spark:run_on_spark",
            "Spark tasks; local threads, or a cluster",
            extra="spark",
            packages=("pyspark", "pandas"),
        )
    },
    takes_own=True,
)
