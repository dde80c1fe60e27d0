"""The engine of Spark: every work unit is a row of a DataFrame, and `write_unit` runs in a task of its own."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from etl.units import UnitTask, WorkUnit
from etl.write_unit import write_unit
from shardmill import errors
from shardmill.dataset.unit_result import UnitResult, decode_unit_result, encode_unit_result
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.reach import planted
from shardmill.jobs.spark import spark_session
from shardmill.jobs.spark_log import spark_log_hint
from shardmill.stores import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_POLL_SECONDS = 0.5


def run_on_spark(
    units: Sequence[WorkUnit], task: UnitTask, spark: SparkConfig, on_units_done: Callable[[int], None]
) -> list[UnitResult]:
    """One DataFrame row, one partition and one task for each unit. Spark moves the plan; images never cross the JVM.

    `on_units_done` gets the number of finished units. Raises the tasks' own error after Spark's retries.
    """
    # Every task reads the nonce back before it works: a folder of its executor's own would swallow its shards.
    with (
        planted(open_store(task.dataset_uri)) as nonce,
        spark_session("shardmill-etl", spark, spark.etl.conf) as session,
    ):
        frame = _unit_frame(session, units)
        results = frame.mapInArrow(_write_units(replace(task, reach=nonce)), "unit_result string")
        rows = _collect(session, results, on_units_done)
    return [decode_unit_result(row) for row in rows]


def _unit_frame(session: SparkSession, units: Sequence[WorkUnit]) -> DataFrame:
    adapter = TypeAdapter(WorkUnit)
    rows = [(unit.index, adapter.dump_json(unit).decode()) for unit in units]
    # As many slices as rows: each row is its own partition, so the slowest task is one unit and no more.
    return session.createDataFrame(
        session.sparkContext.parallelize(rows, numSlices=len(rows)), "unit_index int, unit string"
    )


def _write_units(task: UnitTask) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """The function that Spark ships to its tasks."""

    def write_units(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        import pyarrow as pa

        adapter = TypeAdapter(WorkUnit)
        for batch in batches:
            for text in batch.column("unit").to_pylist():
                result = write_unit(adapter.validate_json(text), task)
                yield pa.RecordBatch.from_pydict({"unit_result": [encode_unit_result(result).decode()]})

    return write_units


def _collect(session: SparkSession, frame: DataFrame, on_units_done: Callable[[int], None]) -> list[str]:
    """Run the job in a thread, so that this one can show progress and answer Ctrl-C."""
    # Its thread must be a daemon, or a job that hangs would keep this process from ending; a pool's threads are none.
    collected: Future[list[str]] = Future()

    def collect() -> None:
        try:
            collected.set_result([row.unit_result for row in frame.collect()])
        except Exception as error:  # passed on to the thread that waits for the result
            collected.set_exception(error)

    threading.Thread(target=collect, name="shardmill-spark-job", daemon=True).start()
    tracker = session.sparkContext.statusTracker()
    try:
        while not collected.done():
            wait([collected], _POLL_SECONDS)
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            done = max((stage.numCompletedTasks for stage in stages if stage is not None), default=0)
            if done:
                on_units_done(done)
    except BaseException:
        session.sparkContext.cancelAllJobs()
        raise
    error = collected.exception()
    if error is not None:
        raise _own_error(error) from error
    return collected.result()


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
