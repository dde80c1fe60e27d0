"""Finds the applications of a config that would start Spark, for checks before anything starts."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError

if TYPE_CHECKING:
    from pipeline.tree import PipelineTree


def applications_on_spark(tree: PipelineTree) -> dict[str, dict[str, str]]:
    """The settings of each application that would be one of Spark, by name, as far as the config alone tells."""
    from etl.engines import ENGINES, EngineSettings, engine_that_runs
    from train.launching import is_on_spark
    from train.planning.setup import resolve

    found: dict[str, dict[str, str]] = {}
    engine = engine_that_runs(tree.etl.engine, 0, EngineSettings(tree.spark, 0))
    if "pyspark" in ENGINES.entry(engine).packages:
        found["etl"] = tree.spark.etl.conf
    with suppress(ShardmillError):
        if is_on_spark(resolve(tree.train, tree.spark).config.launcher):
            found["train"] = tree.spark.train.conf
    return found
