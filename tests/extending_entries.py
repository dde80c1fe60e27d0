"""One new entry for each extension point, as an extension would bring it: all that tests/test_extending.py adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from etl.sources.folders import list_folders
from etl.units import WorkUnit
from etl.write_unit import UnitTask, write_unit
from shardmill.dataset.unit_result import UnitResult
from shardmill.formats.encodings import PNG
from shardmill.formats.parquet import PARQUET
from shardmill.jobs.config import SparkConfig
from shardmill.stores.local import LocalStore
from train.launching.inline import launch_inline
from train.models.small_cnn import small_cnn
from train.strategies.strategy import SINGLE

NEW_SOURCE = list_folders
NEW_FORMAT = replace(PARQUET, suffix="new.parquet")
NEW_ENCODING = replace(PNG)
NEW_STRATEGY = replace(SINGLE)
NEW_LAUNCHER = launch_inline
NEW_MODEL = small_cnn


def new_engine(
    units: Sequence[WorkUnit], task: UnitTask, spark: SparkConfig, on_units_done: Callable[[int], None]
) -> list[UnitResult]:
    """Every unit in this process, one after the other."""
    results = []
    for unit in units:
        results.append(write_unit(unit, task))
        on_units_done(len(results))
    return results


def new_store(uri: str) -> LocalStore:
    """`new:///folder` is a local folder."""
    return LocalStore(uri.removeprefix("new://"))
