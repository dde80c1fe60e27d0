"""Runs functions in Spark's tasks and returns the rows that they yield: by a context of this process, by Spark Connect,
or by the session of the process that has started this one. The applications do not know which.

A context runs RDDs of plain rows: a DataFrame would start Spark SQL, and Arrow in each Python worker, for nothing
(docs/benchmarks/spark_tasks.md). Spark Connect has no RDDs, and runs the same functions by `mapInArrow`.
"""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shardmill.applications import OnExecutor
from shardmill.jobs.config import is_local_master

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

Row = tuple[Any, ...]
Columns = Mapping[str, str]
"""The values of a row by their names: `bigint`, `string` or `binary`."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """A job: each task calls `work` with its payloads, in order, and returns the rows that it yields."""

    work: OnExecutor
    columns: Columns
    num_tasks: int | None = None
    """None for as many as Spark has slots."""
    payloads: Sequence[bytes] | None = None
    """At least one for each task; None if `work` needs none."""
    fold: OnExecutor | None = None
    """Called with a part's number, which is the first value of a row, and all rows of the part, in any order; the job
    then returns what it yields. For parts without rows it may be called or not."""
    folded: Columns = field(default_factory=dict)
    num_parts: int = 0
    are_together: bool = False
    """They all start together: a barrier stage."""


class Job(Protocol):
    """Tasks at work."""

    def num_done(self) -> int:
        """Tasks that have finished, as far as Spark has reported them."""
        ...

    def cancel(self) -> object:
        """Have them end early; nothing else of the session is touched."""
        ...

    def wait(self, seconds: float | None) -> bool:
        """Whether they have ended, after that time at the latest."""
        ...

    def result(self) -> Sequence[Row]:
        """The rows of all tasks, in any order, once they have ended. Raises what ended them."""
        ...


class SparkTasks(ABC):
    """A Spark that runs tasks."""

    def __init__(self, settings: Mapping[str, str], own_address: str = "") -> None:
        self.settings = settings
        self.own_address = own_address
        """This host's address as Spark Connect's server sees it; empty if Spark's driver is on this host."""
        self.master = settings.get("spark.master", "Spark Connect")

    @property
    def is_here(self) -> bool:
        """Whether its tasks run on this machine for certain."""
        return not self.own_address and is_local_master(self.master)

    @abstractmethod
    def num_slots(self) -> int | None:
        """Tasks that run at once on the executors that have registered, busy or not; None if Spark does not tell."""

    @abstractmethod
    def start(self, tasks: Tasks) -> Job:
        """Begin with a job."""


class ThreadJob:
    """A job that a thread runs, so that this one can take results and answer Ctrl-C."""

    def __init__(
        self, run: Callable[[], Sequence[Row]], num_done: Callable[[], int], cancel: Callable[[], object]
    ) -> None:
        self._run, self._num_done, self._cancel = run, num_done, cancel
        self._future: Future[Sequence[Row]] = Future()
        # It must be a daemon (a pool's threads are not), or a job that hangs would keep this process from ending.
        threading.Thread(target=self._work, name="shardmill-spark-job", daemon=True).start()

    def num_done(self) -> int:
        return self._num_done()

    def cancel(self) -> object:
        return self._cancel()

    def wait(self, seconds: float | None) -> bool:
        wait([self._future], seconds)
        return self._future.done()

    def result(self) -> Sequence[Row]:
        return self._future.result()

    def _work(self) -> None:
        try:
            self._future.set_result(self._run())
        except Exception as error:  # passed on to the thread that waits for the result
            self._future.set_exception(error)


class ContextTasks(SparkTasks):
    """Tasks of a context of this process."""

    def __init__(self, context: SparkContext) -> None:
        super().__init__({**dict(context.getConf().getAll()), "spark.master": str(context.master)})
        self._context = context

    def num_slots(self) -> int | None:
        java: Any = self._context._jsc
        spark = java.sc()
        # By cores and GPUs: what Spark itself asks for a barrier stage.
        return spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile())

    def start(self, tasks: Tasks) -> Job:
        context, group = self._context, f"shardmill-{uuid.uuid4().hex}"

        def run() -> Sequence[Row]:
            context.setJobGroup(group, "shardmill")
            return _rdd(context, tasks).collect()

        def num_done() -> int:
            tracker = context.statusTracker()
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
            return sum(stage.numCompletedTasks for stage in stages if stage is not None)

        return ThreadJob(run, num_done, lambda: context.cancelJobGroup(group))


def _rdd(context: SparkContext, tasks: Tasks) -> RDD[Row]:
    """As many partitions as tasks: with a payload for each, the slowest task is one payload and no more."""
    # Spark offers all free slots at once, so that as many tasks as slots reach every executor.
    num_tasks = tasks.num_tasks or max(1, context.defaultParallelism)
    payloads = context.parallelize([b""] * num_tasks if tasks.payloads is None else tasks.payloads, num_tasks)
    rows = payloads.barrier().mapPartitions(tasks.work) if tasks.are_together else payloads.mapPartitions(tasks.work)
    if tasks.fold is None:
        return rows
    by_part = rows.keyBy(lambda row: row[0]).partitionBy(tasks.num_parts, int).values()
    return by_part.mapPartitionsWithIndex(tasks.fold)
