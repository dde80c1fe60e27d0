"""The engine on Spark: every work unit is one partition, and its task runs the unit in a warm process on
the executor. A group-by runs in Spark's tasks too: contributions cross the shuffle as blocks of Arrow, and answers
come back as files.

The driver runs each job in a thread, follows its progress, and converts its error into ours.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from etl.engines import Engine, EngineSettings
from etl.engines.unit_runner import run_in_warm_process
from etl.listing.grouping import ROWS_PER_PART, GroupBy, group_here, split_rows
from etl.listing.listing import ListingSegment
from etl.units.read_source import check_decoders, decoders_here
from etl.units.results import finished_units
from etl.units.units import CopyUnit, ListingLocation, UnitTask, WorkUnit, encode_task, encode_unit
from shardmill import errors
from shardmill.applications import OnExecutor
from shardmill.checksummed import ChecksummedFile, checksum_file
from shardmill.dataset.build import PENDING, UnitResult
from shardmill.dataset.row_segments import read_segment, table_bytes
from shardmill.jobs.config import is_local_master
from shardmill.jobs.line_log import spark_log_hint
from shardmill.jobs.reach import check_nonce, planted, removed_afterwards
from shardmill.jobs.spark import one_spark, spark_context
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import Nonce

if TYPE_CHECKING:
    from pyspark import SparkContext


_NUM_JOBS = 3
LISTINGS = "listings"
"""The folder, below a dataset, for what tasks and driver leave each other; `gc` knows it."""
# The driver does so many in a few seconds, less than an application takes to start.
MIN_ROWS = 2_000_000
_POLL_SECONDS = 0.5
_STATUS_SECONDS = 5.0
# What Spark and Python say where an executor has no Python that could work for this driver.
_OTHER_PYTHON = "PYTHON_VERSION_MISMATCH|^ModuleNotFoundError: |^ImportError: |Cannot run program "
Value = TypeVar("Value")
File = TypeVar("File", ListingSegment, ChecksummedFile)


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
        removed_afterwards(store, f"{LISTINGS}/{uuid.uuid4().hex[:12]}") as folder,
        spark_context("shardmill-etl", spark, spark.etl.conf) as context,
    ):
        if any(isinstance(unit, WorkUnit) for unit in units):
            _check_executors(context, task)
        listing = ListingLocation(store.uri, tuple(_shared(store, folder, task.listing.uri, task.listing.segments)))
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


def group_on_spark(group: GroupBy, settings: EngineSettings) -> Iterator[pa.Table]:
    """The answers of all parts, in order; few rows are grouped in this process. Raises the tasks' own error."""
    if group.num_rows < MIN_ROWS:
        yield from group_here(group, settings)
        return
    store, spark = open_store(group.dataset_uri or group.uri), settings.spark
    with removed_afterwards(store, f"{LISTINGS}/{uuid.uuid4().hex[:12]}") as folder:
        # What is on the driver's machine alone goes where every task sees it.
        if group.dataset_uri:
            files = _shared(store, folder, group.uri, [segment.file for segment in group.segments])
            segments = (replace(each, file=file) for each, file in zip(group.segments, files, strict=True))
            group = replace(group, uri=store.uri, segments=tuple(segments))
        # Nothing else may have shown so far that executors see the dataset's folder.
        with planted(store) as nonce, spark_context("shardmill-etl", spark, spark.etl.conf) as context:
            answers = group_in(context, group, folder, nonce)
        for answer in answers:
            yield read_segment(store, answer, group.folded, group.num_rows)


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


def _shared(store: Store, folder: str, uri: str, files: Iterable[File]) -> Iterator[File]:
    """The files of the driver's folder `uri`, in a folder below the dataset, which every task sees."""
    for file in files:
        path = f"{folder}/{file.path}"
        store.put_file(path, Path(uri) / file.path)
        yield replace(file, path=path)


def start_job(action: Callable[[], Value]) -> Future[Value]:
    """Run a job in a thread, so that this one can take results and answer Ctrl-C."""
    # Its thread must be a daemon (a pool's threads are not), or a job that hangs would keep this process from ending.
    job: Future[Value] = Future()

    def run() -> None:
        try:
            job.set_result(action())
        except Exception as error:  # passed on to the thread that waits for the result
            job.set_exception(error)

    threading.Thread(target=run, name="shardmill-spark-job", daemon=True).start()
    return job


def until_done(context: SparkContext, job: Future[Value]) -> Iterator[None]:
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


def num_failed_tasks(context: SparkContext) -> int:
    """Attempts at tasks that failed in all jobs so far, which have ended. Those that Spark killed itself are none."""
    tracker, deadline = context.statusTracker(), time.monotonic() + _STATUS_SECONDS
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup()]
    # Spark reports the cause a moment later.
    while any(job is not None and job.status == "RUNNING" for job in jobs) and time.monotonic() < deadline:
        time.sleep(_STATUS_SECONDS / 100)
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup()]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return sum(stage.numFailedTasks for stage in stages if stage is not None)


def _own_error(error: BaseException) -> errors.ShardmillError:
    """The error of ours inside Spark's report of a failed task, or one with Spark's reason; the hint names the log."""
    text = str(error)
    for name, message in re.findall(r"shardmill\.errors\.(\w+): (.+)", text):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.ShardmillError):
            return kind(message.strip(), "", spark_log_hint())
    reason = _reason(text)
    if re.search(_OTHER_PYTHON, reason):
        host = re.search(r"\(([^\s()]+) executor", text)
        return errors.UsageError(
            f"host {host[1] if host else 'of an executor'} cannot run our tasks: {reason}",
            f"expected Python {sys.version_info.major}.{sys.version_info.minor} with our packages, as in the driver",
            "set spark.pyspark.python (PYSPARK_PYTHON) to such an interpreter of the executors, or install them there",
        )
    return errors.StorageError(
        f"a work unit failed on every try: {reason}",
        "nothing was committed; finished units are kept",
        f"run the same command again; {spark_log_hint() or '--debug shows more'}",
    )


def _reason(text: str) -> str:
    """The exception that ended Python on the executor, whatever its name is, or what Java says; without a stack."""
    _, found, trace = text.rpartition("Traceback (most recent call last):")
    if found:
        lines = [line for line in trace.splitlines() if line and not line[0].isspace()]
    else:
        lines = re.findall(r"Lost task \S+ in stage \S+ \(TID \d+\) \(\S+ executor \S+\): (.+)", text)
        lines += [
            line.lstrip(": ") for line in text.splitlines() if re.match(r"[:\s]*[\w.$]*(Error|Exception)\b.*:", line)
        ]
    return [*lines, *text.splitlines(), "no reason given"][0][:300]


SPARK = Engine(run_on_spark, group_on_spark, run_on_spark, lambda settings: one_spark())
