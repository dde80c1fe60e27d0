"""The engine of Spark: every work unit is a partition of its own, and its task runs it in a warm process beside it."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from etl.engines import EngineSettings
from etl.engines.unit_json import encode_task, encode_unit
from etl.engines.unit_runner import run_in_warm_process
from etl.pending import PENDING, finished_units
from etl.units import ListingPlace, UnitTask, WorkUnit
from shardmill import errors
from shardmill.dataset.unit_result import UnitResult
from shardmill.jobs.reach import planted
from shardmill.jobs.spark import spark_context
from shardmill.jobs.spark_log import spark_log_hint
from shardmill.storage import Store
from shardmill.stores import open_store

if TYPE_CHECKING:
    from pyspark import SparkContext

LISTINGS = "listings"
_NUM_JOBS = 3
_POLL_SECONDS = 0.5


def run_on_spark(units: Sequence[WorkUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
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
        task = replace(task, reach=nonce, listing=listing)
        left = {unit.index: unit for unit in units}
        # A second run of the same units that committed first took their records away: then they are run again.
        for _ in range(_NUM_JOBS):
            job = _start(context, list(left.values()), task)
            for _ in _until_done(context, job):
                for result in finished_units(store, list(left.values())):
                    del left[result.unit_index]
                    yield result
            if not left:
                break
    if left:
        raise errors.StorageError(
            f"Spark's job ended, and {len(left)} work units left no record in {task.dataset_uri}/{PENDING}",
            "expected one of each", "see that nothing else removes files there, then run the same command again",
        )  # fmt: skip


@contextmanager
def _shared_listing(task: UnitTask, store: Store) -> Iterator[ListingPlace]:
    """The listing's segments below the dataset for as long as the units run: every executor sees that place."""
    folder = f"{LISTINGS}/{uuid.uuid4().hex[:12]}"
    paths = {segment: f"{folder}/{segment}" for segment in task.listing.segments}
    try:
        for segment, path in paths.items():
            store.put_file(path, Path(task.listing.uri) / segment)
        yield ListingPlace(store.uri, tuple(paths.values()))
    finally:
        # They must not stand in for what went wrong inside.
        with suppress(errors.ShardmillError):
            for path in paths.values():
                store.delete(path)


def _start(context: SparkContext, units: Sequence[WorkUnit], task: UnitTask) -> Future[None]:
    """Run the job in a thread, so that this one can take results and answer Ctrl-C."""
    # As many slices as rows: each row is its own partition, so the slowest task is one unit and no more. Plain rows:
    # a DataFrame would start Spark SQL, and pandas and pyarrow in each Python worker, for nothing.
    rows = context.parallelize(map(encode_unit, units), numSlices=len(units))
    # Its thread must be a daemon, or a job that hangs would keep this process from ending; a pool's threads are none.
    job: Future[None] = Future()
    work = partial(run_in_warm_process, encode_task(task))

    def run() -> None:
        try:
            rows.foreachPartition(work)
            job.set_result(None)
        except Exception as error:  # passed on to the thread that waits for the result
            job.set_exception(error)

    threading.Thread(target=run, name="shardmill-spark-job", daemon=True).start()
    return job


def _until_done(context: SparkContext, job: Future[None]) -> Iterator[None]:
    """Yields whenever further tasks have finished, and once after the last. Raises the error that ended the job."""
    tracker = context.statusTracker()
    num_done = 0
    try:
        while not job.done():
            wait([job], _POLL_SECONDS)
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            now = max((stage.numCompletedTasks for stage in stages if stage is not None), default=0)
            if now > num_done:
                num_done = now
                yield
    except BaseException:
        context.cancelAllJobs()
        raise
    error = job.exception()
    if error is not None:
        raise _own_error(error) from error
    yield


def _own_error(error: BaseException) -> errors.ShardmillError:
    """The error of ours inside Spark's report of a failed task, or one with Spark's reason; the hint names the log."""
    text = str(error)
    for name, message in re.findall(r"shardmill\.errors\.(\w+): (.+)", text):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.ShardmillError):
            return kind(message.strip(), "", spark_log_hint())
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*\w*(Error|Exception)\b.*:", line)]
    return errors.StorageError(
        f"a work unit failed on every try: {(lines or text.splitlines() or ['no reason given'])[-1][:300]}",
        "nothing was committed; finished units are kept",
        f"run the same command again; {spark_log_hint() or '--debug shows more'}",
    )
