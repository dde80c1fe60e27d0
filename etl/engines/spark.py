"""The engine on Spark: every work unit is one task, which runs the unit in a warm process on its executor. A group-by
runs in Spark's tasks too: contributions cross the shuffle as blocks of Arrow, and answers come back as files.

The driver follows each job's progress, and converts its error into ours.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from etl.engines import Engine, EngineSettings
from etl.engines.unit_runner import run_units_of_task
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
from shardmill.jobs.line_log import spark_log_hint
from shardmill.jobs.open_spark import open_spark
from shardmill.jobs.reach import check_nonce, planted, removed_afterwards
from shardmill.jobs.spark import one_spark
from shardmill.jobs.spark_tasks import Job, Row, SparkTasks, Tasks
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import Nonce

_NUM_JOBS = 3
_POLL_SECONDS = 0.5
LISTINGS = "listings"
"""The folder, below a dataset, for what tasks and driver leave each other; `gc` knows it."""
# The driver does so many in a few seconds, less than an application takes to start.
MIN_ROWS = 2_000_000
# What Spark and Python say where an executor has no Python that could work for this driver.
_OTHER_PYTHON = "PYTHON_VERSION_MISMATCH|^ModuleNotFoundError: |^ImportError: |Cannot run program "
File = TypeVar("File", ListingSegment, ChecksummedFile)


def run_on_spark(
    units: Sequence[WorkUnit | CopyUnit], task: UnitTask, settings: EngineSettings
) -> Iterator[UnitResult]:
    """One task for each unit. Spark moves the plan; images never cross the JVM.

    Results come from the records that tasks leave in the dataset, so that neither JVM nor driver holds all of them.
    Raises the tasks' own error after Spark's retries.
    """
    spark, store = settings.spark, open_store(task.dataset_uri)
    # Every task reads the nonce back before it works: a folder of its executor's own would swallow its shards.
    with (
        planted(store) as nonce,
        removed_afterwards(store, f"{LISTINGS}/{uuid.uuid4().hex[:12]}") as folder,
        open_spark("shardmill-etl", spark, spark.etl.conf) as cluster,
    ):
        if any(isinstance(unit, WorkUnit) for unit in units):
            _check_executors(cluster, task)
        listing = ListingLocation(store.uri, tuple(_shared(store, folder, task.listing.uri, task.listing.segments)))
        task_json = encode_task(replace(task, reach=nonce, listing=listing))
        # Of two attempts that run beside each other, the first has not failed.
        is_counted = cluster.settings.get("spark.speculation", "false") != "true"
        work = OnExecutor(partial(run_units_of_task, task_json, are_attempts_counted=is_counted))
        left = {unit.index: unit for unit in units}
        # A second run of the same units that committed first took their records away: then they are run again.
        for _ in range(_NUM_JOBS):
            job = cluster.start(
                Tasks(work, {"retries": "bigint"}, len(left), [encode_unit(unit) for unit in left.values()])
            )
            with closing(_finished(job)) as progress:
                for _ in progress:
                    for result in finished_units(store, list(left.values())):
                        del left[result.unit_index]
                        yield result
            settings.count_retries(sum(num_retries for (num_retries,) in job.result()))
            if not left:
                break
    if left:
        raise errors.StorageError(
            f"Spark's job ended, and {len(left)} work units wrote no record to {task.dataset_uri}/{PENDING}",
            "expected one record for each unit",
            "make sure that nothing else removes files there, then run the same command again",
        )


def _check_executors(cluster: SparkTasks, task: UnitTask) -> None:
    """Before any work, the executors that there are must make the driver's pixels; the units of later ones look, too.

    Raises UsageError with the names of all hosts that do not.
    """
    if cluster.is_here:
        return
    job = cluster.start(Tasks(OnExecutor(partial(decoders_here, task.config)), {"host": "string", "decoder": "string"}))
    check_decoders(task.decoder_id, dict(_rows_of(job)))


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
        with planted(store) as nonce, open_spark("shardmill-etl", spark, spark.etl.conf) as cluster:
            answers = group_in(cluster, group, folder, nonce)
        for part in range(group.num_parts):
            # Of a part without rows no task need have been asked.
            if part in answers:
                yield read_segment(store, answers[part], group.folded, group.num_rows)
            else:
                yield group.fold(group.picked.empty_table())


def group_in(cluster: SparkTasks, group: GroupBy, folder: str, nonce: Nonce) -> dict[int, ChecksummedFile]:
    """Return the file with each part's answer, by its part. The driver holds only these names."""
    num_places, num_parts = len(group.segments), group.num_parts
    job = cluster.start(
        Tasks(
            OnExecutor(partial(_blocks, group, nonce)),
            {"part": "bigint", "first": "bigint", "rows": "binary"},
            min(num_places, num_parts),
            [b"%d" % place for place in range(num_places)],
            # One block for each task and part, and not one record for each row: Python never sees a row.
            OnExecutor(partial(_answer, group, folder)),
            {"part": "bigint", "path": "string", "size_bytes": "bigint", "sha256": "string"},
            num_parts,
        )
    )
    return {part: ChecksummedFile(*file) for part, *file in _rows_of(job)}


def _blocks(group: GroupBy, nonce: Nonce, places: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield these segments' contributions to each part: (part, place of the first segment, Arrow stream)."""
    check_nonce(nonce)
    store = open_store(group.uri)
    waiting, num_waiting, first = [], 0, -1
    for place in map(int, places):
        rows = group.contribution(store, place)
        first = place if not waiting else first
        waiting.append((rows, group.parts_of(rows)))
        num_waiting += rows.num_rows
        if num_waiting >= ROWS_PER_PART:
            yield from _packed(waiting, first)
            waiting, num_waiting = [], 0
    yield from _packed(waiting, first)


def _packed(waiting: list, first: int) -> Iterator[tuple[int, int, bytes]]:
    for part, rows in split_rows(waiting):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        yield part, first, sink.getvalue().to_pybytes()


def _answer(
    group: GroupBy, folder: str, part: int, blocks: Iterable[tuple[int, int, bytes]]
) -> Iterator[tuple[int, str, int, str]]:
    """Fold one part, whose blocks come in any order, and leave the answer where the driver reads it."""
    ordered = sorted(blocks, key=lambda block: block[1])
    tables = [pa.ipc.open_stream(data).read_all() for _, _, data in ordered]
    data = table_bytes(group.fold(pa.concat_tables([group.picked.empty_table(), *tables])))
    file = checksum_file(f"{folder}/{uuid.uuid4().hex}.parquet", data)
    open_store(group.uri).put(file.path, data)
    yield part, file.path, file.size_bytes, file.sha256


def _shared(store: Store, folder: str, uri: str, files: Iterable[File]) -> Iterator[File]:
    """The files of the driver's folder `uri`, in a folder below the dataset, which every task sees."""
    for file in files:
        path = f"{folder}/{file.path}"
        store.put_file(path, Path(uri) / file.path)
        yield replace(file, path=path)


def _finished(job: Job) -> Generator[None, None, None]:
    """Yields whenever further tasks have finished, and once after the last. Raises one of our errors; the job is
    cancelled if nobody waits for it any more.
    """
    num_done = 0
    try:
        try:
            while not job.wait(_POLL_SECONDS):
                if (now := job.num_done()) > num_done:
                    num_done = now
                    yield
        except BaseException:
            job.cancel()
            raise
        job.result()
    except Exception as error:
        raise own_error(error) from error
    yield


def _rows_of(job: Job) -> Sequence[Row]:
    """The rows of all tasks, once they have ended. Raises one of our errors."""
    for _ in _finished(job):
        pass
    return job.result()


def own_error(error: BaseException) -> errors.ShardmillError:
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
