"""Chooses the default engine: no JVM unless a cluster is configured or one machine would have too many images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import pyarrow as pa

from etl.engines import ENGINES, Engine, EngineSettings
from etl.listing.grouping import GroupBy, group_here
from etl.units.units import CopyUnit, UnitTask, WorkUnit
from shardmill.dataset.build import UnitResult
from shardmill.jobs.config import is_local_master, is_under_spark_submit

# About eleven hours of two cores at 250 images a second (docs/benchmarks/etl_peers.md).
MAX_LOCAL_IMAGES = 10_000_000


def run_automatically(units: Sequence[WorkUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    """Run the units on the engine that `choose_engine` names."""
    engine = ENGINES[choose_engine(sum(unit.num_images for unit in units), settings)]
    return engine.run_units(units, task, settings)


def group_automatically(group: GroupBy, settings: EngineSettings) -> Iterator[pa.Table]:
    """Group the rows on the cluster, if there is one; else here, however many: nothing of it needs a JVM."""
    return ENGINES["spark"].group_rows(group, settings) if _has_cluster(settings) else group_here(group, settings)


def choose_engine(num_images: int, settings: EngineSettings) -> str:
    """`local` or `spark`."""
    return "spark" if _has_cluster(settings) or num_images > MAX_LOCAL_IMAGES else "local"


def engine_that_runs(name: str, num_images: int, settings: EngineSettings) -> str:
    """Of `etl.engine = NAME`: the engine that `auto` chooses, else the named one."""
    return choose_engine(num_images, settings) if name == "auto" else name


def _has_cluster(settings: EngineSettings) -> bool:
    return is_under_spark_submit() or not is_local_master(settings.spark.master)


def open_likely(settings: EngineSettings) -> AbstractContextManager[None]:
    """Open the resources of the engine that `choose_engine` will probably choose, before the source is listed."""
    return ENGINES["spark" if _has_cluster(settings) else "local"].opened(settings)


def copy_automatically(units: Sequence[CopyUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    """Copy rows on the cluster, if there is one; else in processes of this machine."""
    return ENGINES["spark" if _has_cluster(settings) else "local"].copy_rows(units, task, settings)


AUTO = Engine(run_automatically, group_automatically, copy_automatically, open_likely)
