"""The engine on Spark: every work unit is one partition, and its task runs the unit in a warm process on
the executor.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from etl.engines import Engine, EngineSettings
from etl.engines.spark_groups import LISTINGS, group_on_spark
from etl.engines.spark_jobs import num_failed_tasks, start_job, until_done
from etl.engines.unit_json import encode_task, encode_unit
from etl.engines.unit_runner import run_in_warm_process
from etl.units.decoders import check_decoders, decoders_here
from etl.units.pending import finished_units
from etl.units.units import CopyUnit, ListingPlace, UnitTask, WorkUnit
from shardmill import errors
from shardmill.applications import OnExecutor
from shardmill.dataset.unit_result import PENDING, UnitResult
from shardmill.jobs.reach import planted
from shardmill.jobs.spark import one_spark, spark_context
from shardmill.jobs.spark_settings import is_local_master
from shardmill.storage import Store
from shardmill.stores import open_store

if TYPE_CHECKING:
    from pyspark import SparkContext

_NUM_JOBS = 3


def run_on_spark(
    units: Sequence[WorkUnit | CopyUnit], task: UnitTask, settings: EngineSettings
) -> Iterator[UnitResult]:
    """One row, one partition and one task for each unit. Spark moves the plan; images never cross the JVM.

    Results come from the records that tasks leave in the dataset, so that neither JVM nor driver holds all of them.
    Raises the tasks' own error after Spark's retries.
    """
    spark, store = settings.spark, open_store(task.dataset_uri)
    # Every task reads the nonce back before it works: a folder of its executor's own would swallow its shards.
    with (
        planted(store) as nonce,
        _shared_listing(task, store) as listing,
        spark_context("shardmill-etl", spark, spark.etl.conf) as context,
    ):
        if any(isinstance(unit, WorkUnit) for unit in units):
            _check_executors(context, task)
        task_json, retried = encode_task(replace(task, reach=nonce, listing=listing)), context.accumulator(0)
        work, num_failed = partial(run_in_warm_process, task_json, count_retries=retried.add), num_failed_tasks(context)
        left = {unit.index: unit for unit in units}
        # A second run of the same units that committed first took their records away: then they are run again.
        for _ in range(_NUM_JOBS):
            # As many slices as units: each is its own partition, so the slowest task is one unit and no more. Plain
            # rows: a DataFrame would start Spark SQL, and pandas and pyarrow in each Python worker, for nothing.
            rows = context.parallelize(map(encode_unit, left.values()), numSlices=len(left))
            job = start_job(partial(rows.foreachPartition, OnExecutor(work)))
            for _ in until_done(context, job):
                for result in finished_units(store, list(left.values())):
                    del left[result.unit_index]
                    yield result
            if not left:
                break
        settings.count_retries(retried.value + num_failed_tasks(context) - num_failed)
    if left:
        raise errors.StorageError(
            f"Spark's job ended, and {len(left)} work units wrote no record to {task.dataset_uri}/{PENDING}",
            "expected one record for each unit",
            "make sure that nothing else removes files there, then run the same command again",
        )


def _check_executors(context: SparkContext, task: UnitTask) -> None:
    """Before any work, the executors that there are must make the driver's pixels; the units of later ones look, too.

    Raises UsageError with the names of all hosts that do not.
    """
    if is_local_master(context.master or ""):
        return
    # Spark offers all free slots at once, so that as many tasks as slots reach every executor.
    num_tasks = max(1, context.defaultParallelism)
    tasks = context.parallelize(range(num_tasks), num_tasks)
    job = start_job(tasks.mapPartitions(OnExecutor(partial(decoders_here, task.config))).collect)
    for _ in until_done(context, job):
        pass
    check_decoders(task.decoder_id, dict(job.result()))


@contextmanager
def _shared_listing(task: UnitTask, store: Store) -> Iterator[ListingPlace]:
    """The listing's segments below the dataset for as long as the units run: every executor sees that place."""
    folder = f"{LISTINGS}/{uuid.uuid4().hex[:12]}"
    shared = tuple(replace(segment, path=f"{folder}/{segment.path}") for segment in task.listing.segments)
    try:
        for segment, copy in zip(task.listing.segments, shared, strict=True):
            store.put_file(copy.path, Path(task.listing.uri) / segment.path)
        yield ListingPlace(store.uri, shared)
    finally:
        # They must not hide an error from inside.
        with suppress(errors.ShardmillError):
            for copy in shared:
                store.delete(copy.path)


SPARK = Engine(run_on_spark, group_on_spark, run_on_spark, lambda settings: one_spark())
