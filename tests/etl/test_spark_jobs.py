"""What is told of a task that failed on its executor: the cause, whatever it is called, and whose fault it is."""

from __future__ import annotations

import pytest

from etl.engines.spark_jobs import start_job, until_done
from shardmill.errors import CommitConflict, ShardmillError, StorageError, UsageError

# As PySpark 4.0 reports it.
FAILED = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent \
failure: Lost task 0.3 in stage 0.0 (TID 3) (worker-7.example executor 0): {cause}
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.$anonfun$abortStage$3(DAGScheduler.scala:2935)
\t... 1 more
"""
PYTHON = """org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1239, in main
    func, profiler, deserializer, serializer = read_command(pickleSer, infile)
{raised}
"""


class _Context:
    """Of a job that has ended nothing is asked but its stages."""

    def statusTracker(self):
        return self

    def getActiveStageIds(self):
        return []


def told_of(cause: str) -> ShardmillError:
    def fail() -> None:
        raise RuntimeError(FAILED.format(cause=cause))

    with pytest.raises(ShardmillError) as raised:
        list(until_done(_Context(), start_job(fail)))  # pyright: ignore[reportArgumentType]
    return raised.value


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        ("botocore.exceptions.ClientError: An error", StorageError, "botocore.exceptions.ClientError: An error"),
        ("pyarrow.lib.ArrowInvalid: no footer", StorageError, "try: pyarrow.lib.ArrowInvalid: no footer; nothing"),
        ("KeyError: 'x'", StorageError, "on every try: KeyError: 'x'; nothing was committed"),
        ("some.lib.Timeout\n", StorageError, "on every try: some.lib.Timeout; nothing"),
        ("shardmill.errors.CommitConflict: another; was first", CommitConflict, "another; was first"),
        ("ModuleNotFoundError: No module named 'cv2'", UsageError, "worker-7.example cannot .*'cv2'; expected Py"),
        (
            "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has "
            "different version: 3.9 than that in driver: 3.11, PySpark cannot run with different minor versions.",
            UsageError,
            "host worker-7.example cannot run our tasks: .*3.9 than that in driver.*set spark.pyspark.python",
        ),
    ],
)  # fmt: skip
def test_the_cause_is_pythons_last_line(raised: str, kind: type[ShardmillError], said: str):
    error = told_of(PYTHON.format(raised=raised))
    assert type(error) is kind
    with pytest.raises(kind, match=said):
        raise error


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        ('java.io.IOException: Cannot run program "python3.9": error=2, No such file', UsageError, "3.9.*set spark"),
        ("ExecutorLostFailure (executor 0 exited caused by one of the running tasks)", StorageError, "on every try: "),
    ],
)  # fmt: skip
def test_a_cause_of_java_is_told_without_its_stack(cause: str, kind: type[ShardmillError], said: str):
    error = told_of(cause)
    assert type(error) is kind and "\tat " not in str(error) and "more" not in str(error).split("; ")[0]
    with pytest.raises(kind, match=said):
        raise error
