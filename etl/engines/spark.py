"""The engine on Spark: every work unit is one partition, and its task runs the unit in a warm process on
the executor. A group-by runs in Spark's tasks too: contributions cross the shuffle as blocks of Arrow, and answers
come back as files.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from etl.engines import Engine, EngineSettings
from etl.engines.spark_jobs import num_failed_tasks, start_job, until_done
from etl.engines.unit_json import encode_task, encode_unit
from etl.engines.unit_runner import run_in_warm_process
from etl.listing.grouping import GroupBy, group_here
from etl.listing.spill import ROWS_PER_PART, split_rows
from etl.units.decoders import check_decoders, decoders_here
from etl.units.pending import finished_units
from etl.units.units import CopyUnit, ListingPlace, UnitTask, WorkUnit
from shardmill import errors
from shardmill.applications import OnExecutor
from shardmill.checksummed import ChecksummedFile, checksum_file
from shardmill.dataset.build import PENDING, UnitResult
from shardmill.dataset.row_segments import read_segment, table_bytes
from shardmill.jobs.config import is_local_master
from shardmill.jobs.reach import check_nonce, planted, removed_afterwards
from shardmill.jobs.spark import one_spark, spark_context
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import Nonce

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


LISTINGS = "listings"
"""The folder, below a dataset, for what tasks and driver leave each other; `gc` knows it."""
# The driver does so many in a few seconds, less than an application takes to start.
MIN_ROWS = 2_000_000


def group_on_spark(group: GroupBy, settings: EngineSettings) -> Iterator[pa.Table]:
    """The answers of all parts, in order; few rows are grouped in this process. Raises the tasks' own error."""
    if group.num_rows < MIN_ROWS:
        yield from group_here(group, settings)
        return
    store, spark = open_store(group.dataset_uri or group.uri), settings.spark
    with removed_afterwards(store, f"{LISTINGS}/{uuid.uuid4().hex[:12]}") as folder:
        shared = _shared(group, store, folder)
        # Nothing else may have shown so far that executors see the dataset's folder.
        with planted(store) as nonce, spark_context("shardmill-etl", spark, spark.etl.conf) as context:
            answers = group_in(context, shared, folder, nonce)
        for answer in answers:
            yield read_segment(store, answer, group.folded, group.num_rows)


def _shared(group: GroupBy, store: Store, folder: str) -> GroupBy:
    """The same rows where every task sees them: what is on the driver's machine alone is copied into `folder`."""
    if not group.dataset_uri:
        return group
    segments = []
    for segment in group.segments:
        path = f"{folder}/{segment.file.path}"
        store.put_file(path, Path(group.uri) / segment.file.path)
        segments.append(replace(segment, file=replace(segment.file, path=path)))
    return replace(group, uri=store.uri, segments=tuple(segments))


def group_in(context: SparkContext, group: GroupBy, folder: str, nonce: Nonce) -> list[ChecksummedFile]:
    """Return the files with each part's answer, in the order of the parts. The driver holds only these names."""
    places, num_parts = range(len(group.segments)), group.num_parts
    blocks = context.parallelize(places, min(len(places), num_parts)).mapPartitions(
        OnExecutor(lambda mine: _blocks(group, mine, nonce))
    )
    # One block for each task and part, and not one record for each row: Python never sees a row.
    parts = blocks.partitionBy(num_parts, int)
    answers = parts.mapPartitionsWithIndex(OnExecutor(lambda part, mine: [(part, _answer(group, folder, mine))]))
    job = start_job(answers.collect)
    for _ in until_done(context, job):
        pass
    return [answer for _, answer in sorted(job.result(), key=lambda answer: answer[0])]


def _blocks(group: GroupBy, places: Iterable[int], nonce: Nonce) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Yield these segments' contributions to each part: (part, (place of the first segment, Arrow stream))."""
    check_nonce(nonce)
    store = open_store(group.uri)
    waiting, num_waiting, first = [], 0, -1
    for place in places:
        rows = group.contribution(store, place)
        first = place if not waiting else first
        waiting.append((rows, group.parts_of(rows)))
        num_waiting += rows.num_rows
        if num_waiting >= ROWS_PER_PART:
            yield from _packed(waiting, first)
            waiting, num_waiting = [], 0
    yield from _packed(waiting, first)


def _packed(waiting: list, first: int) -> Iterator[tuple[int, tuple[int, bytes]]]:
    for part, rows in split_rows(waiting):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        yield part, (first, sink.getvalue().to_pybytes())


def _answer(group: GroupBy, folder: str, blocks: Iterable[tuple[int, tuple[int, bytes]]]) -> ChecksummedFile:
    """Fold one part, whose blocks come in any order, and leave the answer where the driver reads it."""
    ordered = sorted((block for _, block in blocks), key=lambda block: block[0])
    tables = [pa.ipc.open_stream(data).read_all() for _, data in ordered]
    data = table_bytes(group.fold(pa.concat_tables([group.picked.empty_table(), *tables])))
    file = checksum_file(f"{folder}/{uuid.uuid4().hex}.parquet", data)
    open_store(group.uri).put(file.path, data)
    return file


SPARK = Engine(run_on_spark, group_on_spark, run_on_spark, lambda settings: one_spark())
