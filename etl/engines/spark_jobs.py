"""Runs a Spark job from the driver in a thread, follows its progress, and converts its error into ours."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from shardmill import errors
from shardmill.jobs.line_log import spark_log_hint

if TYPE_CHECKING:
    from pyspark import SparkContext

_POLL_SECONDS = 0.5
_STATUS_SECONDS = 5.0
# What Spark and Python say where an executor has no Python that could work for this driver.
_OTHER_PYTHON = "PYTHON_VERSION_MISMATCH|^ModuleNotFoundError: |^ImportError: |Cannot run program "
Value = TypeVar("Value")


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
