"""Opens the Spark whose tasks an application uses: one that a caller lends, a server of Spark Connect, or a context of
this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig, is_connect
from shardmill.jobs.lent_spark import lent_tasks
from shardmill.jobs.spark import spark_context
from shardmill.jobs.spark_tasks import ContextTasks, SparkTasks
from shardmill.words import name_some


@contextmanager
def open_spark(app_name: str, spark: SparkConfig, conf: Mapping[str, str]) -> Iterator[SparkTasks]:
    """The lent session if there is one, else the server that `spark.master` names (`sc://...`), else a context of this
    process, as `spark_context` starts it. Raises as that does.
    """
    lent = lent_tasks()
    if conf and (lent or is_connect(spark)):
        raise UsageError(
            f"the config sets {name_some(list(conf))} for a Spark that has started already",
            "expected settings of the session that was passed, or of the server of Spark Connect",
            "set them where that starts, and remove them from the section spark",
        )
    if lent:
        yield lent
    elif is_connect(spark):
        from shardmill.jobs.spark_connect import connected

        yield connected(spark.master)
    else:
        with spark_context(app_name, spark, conf) as context:
            yield ContextTasks(context)


def check_own_context(what: str, fix: str, spark: SparkConfig) -> None:
    """Raises UsageError if Spark would not be a context of this process, which `what` needs."""
    lent = lent_tasks()
    if lent or is_connect(spark):
        raise UsageError(
            f"{what} with {'the session of a caller' if lent else 'Spark Connect'}",
            "expected a Spark context of this command: it runs RDDs of its own",
            fix,
        )
