"""Tasks of Spark Connect, for `shardmill.jobs.spark_tasks`: DataFrames in place of RDDs.

A session of Spark Connect is a client. It tells of finished tasks by progress messages, ends jobs by a tag, and knows
nothing of executors, slots or failed tasks.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shardmill.errors import StorageError, UsageError
from shardmill.jobs.config import CONNECT, CONNECT_PORT, call_master
from shardmill.jobs.spark_tasks import Columns, Job, Row, SparkTasks, Tasks, ThreadJob

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# More than any cluster has slots: without a number of tasks, Spark divides a range into as many as it has slots.
_MANY_ROWS = 100_000
_ARROW = {"bigint": pa.int64(), "string": pa.string(), "binary": pa.binary()}


class ConnectTasks(SparkTasks):
    """Tasks of a session of Spark Connect."""

    def __init__(self, session: Any) -> None:
        super().__init__(session.conf.getAll, _address_towards(session.client.host))
        self._session = session

    def num_slots(self) -> int | None:
        return None

    def start(self, tasks: Tasks) -> Job:
        session, tag, num_done = self._session, f"shardmill-{uuid.uuid4().hex}", [0]

        def follow(stages: Iterable[Any] | None = None, **_: object) -> None:
            # Spark reports the caller's other jobs, too; that only makes us look for results more often.
            num_done[0] = sum(stage.num_completed_tasks for stage in stages or ())

        def run() -> Sequence[Row]:
            # Both belong to this thread.
            session.addTag(tag)
            session.registerProgressHandler(follow)
            try:
                return [tuple(row) for row in frame_of(session, tasks).collect()]
            finally:
                session.removeProgressHandler(follow)

        return ThreadJob(run, lambda: num_done[0], lambda: session.interruptTag(tag))


def frame_of(session: Any, tasks: Tasks) -> DataFrame:
    """A range of as many rows as payloads has one in each task, and a broadcast join keeps that.

    A shuffle would not, and units that were shuffled would be lost with an executor that has finished its own.
    """
    if tasks.payloads is None:
        frame = session.range(0, tasks.num_tasks or _MANY_ROWS, 1, tasks.num_tasks)
    else:
        numbers = pa.array(range(len(tasks.payloads)), pa.int64())
        payloads = session.createDataFrame(pa.table({"id": numbers, "payload": pa.array(tasks.payloads, pa.binary())}))
        frame = session.range(0, len(tasks.payloads), 1, tasks.num_tasks).join(payloads.hint("broadcast"), "id")
    work, columns, fold, folded = tasks.work, tasks.columns, tasks.fold, tasks.folded

    # Plain functions: Spark counts their arguments, and ships them by value.
    def map_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        given = _payloads_of(batches)
        yield from _in_arrow(work(given), columns)
        # Spark keeps a Python worker for the next task only if it has read all.
        for _ in given:
            pass

    def fold_part(table: pa.Table) -> pa.Table:
        rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
        assert fold is not None
        return pa.Table.from_batches(list(_in_arrow(fold(rows[0][0], rows), folded)), _schema(folded))

    frame = frame.mapInArrow(map_batches, _ddl(columns), tasks.are_together)
    if fold is None:
        return frame
    part = next(iter(columns))
    return frame.repartition(tasks.num_parts, part).groupBy(part).applyInArrow(fold_part, _ddl(folded))


def _ddl(columns: Columns) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _schema(columns: Columns) -> pa.Schema:
    return pa.schema([(name, _ARROW[kind]) for name, kind in columns.items()])


def _payloads_of(batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    for batch in batches:
        if "payload" in batch.schema.names:
            yield from batch.column("payload").to_pylist()


def _in_arrow(rows: Iterable[Row], columns: Columns) -> Iterator[pa.RecordBatch]:
    """A batch for each row: a block of a group-by is one, and may be large."""
    schema = _schema(columns)
    for row in rows:
        values = [pa.array([value], kind) for value, kind in zip(row, schema.types, strict=True)]
        yield pa.RecordBatch.from_arrays(values, schema=schema)


@cache
def connected(master: str) -> ConnectTasks:
    """A session at a server, for as long as this process lives. Raises UsageError for a wrong URL and without the
    client's packages; StorageError if no server answers.

    The end of one session stops threads that pyspark shares among all, so that a job of the next one may fail: there is
    one, which the server drops once this process has gone. To end it would take minutes if the server is gone.
    """
    try:
        from pyspark.sql.connect.session import SparkSession
    except ImportError as error:
        raise UsageError(
            f"Spark Connect's client cannot be imported: {str(error).splitlines()[0]}",
            f"expected its packages, because spark.master begins with {CONNECT}",
            "pip install 'pyspark[connect]'",
        ) from None
    # Spark's client would try for ten minutes.
    address = call_master(master)
    try:
        return ConnectTasks(SparkSession.builder.remote(master).create())
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise StorageError(
            f"Spark Connect at {address} gives no session: {said}", "", "correct spark.master"
        ) from error


def _address_towards(host: str) -> str:
    """The address with which this host calls another one; nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, CONNECT_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as unconnected:
        unconnected.connect(target)
        return unconnected.getsockname()[0]
