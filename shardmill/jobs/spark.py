"""A Spark session for either application, the same from the command line, `spark-submit` and Airflow."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import SAFE_PATH, python_path
from shardmill.jobs.spark_jvm import REDACTION, start_jvm, where_spark_says_more
from shardmill.registry import install_hint

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_QUIET_LOG = Path(__file__).with_name("spark-log4j2.properties")

# Only where driver and executors are one JVM on this machine: start faster, open no port, log to the run.
_LOCAL_CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={_QUIET_LOG.as_uri()}"
    ),
}


@contextmanager
def spark_session(app_name: str, spark: SparkConfig, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Start (or under `spark-submit` join) a session with `conf` passed through, and stop it at the end.

    Raises UsageError if pyspark or Java is missing, or if Spark refuses the settings.
    """
    try:
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError:
        raise UsageError("Spark needs the package pyspark", "", install_hint("spark")) from None
    # Nobody reads Spark's progress bar between ours.
    settings = {"spark.ui.showConsoleProgress": "false", **REDACTION}
    submitted = is_under_spark_submit()
    if not submitted and spark.master.startswith("local"):
        settings |= _LOCAL_CONF
        # Java does not ask TMPDIR: what Spark leaves there goes with this process's own temporary folder.
        settings["spark.local.dir"] = tempfile.gettempdir()
        settings["spark.driver.extraJavaOptions"] += f' "-Djava.io.tmpdir={tempfile.gettempdir()}"'
        # Spark's own default is whatever `python3` is on the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    try:
        _start_context(app_name, None if submitted else spark.master, {**settings, **conf})
        session = SparkSession.builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise UsageError(
            f"Spark does not start: {str(error).splitlines()[0]}",
            "expected Java 17 or 21 on the PATH or in JAVA_HOME, and settings that its JVM takes",
            where_spark_says_more() or "`shardmill doctor` shows what is missing",
        ) from error
    except Py4JJavaError as error:
        # Its own text is a stack trace.
        raise UsageError(
            f"Spark does not start: {error.java_exception.getMessage()}",
            "expected a master that answers and settings that Spark takes",
            where_spark_says_more(),
        ) from error
    # Spark's Python processes get it with each task.
    session.sparkContext.environment |= _worker_environment(session.sparkContext)
    if warning := protection_warning(str(session.sparkContext.master), session.sparkContext.getConf().get):
        sys.stderr.write(f"WARNING: {warning}\n")
    try:
        yield session
    except BaseException:
        # A JVM that is gone (a signal to the whole process group, out of memory) is no reason to forget the error.
        with suppress(Exception):
            session.stop()
        raise
    session.stop()


def _start_context(app_name: str, master: str | None, settings: Mapping[str, str]) -> None:
    from pyspark import SparkConf, SparkContext

    # The context replaces the handler of Ctrl-C by one that calls the JVM from inside the call that it interrupts, and
    # then fails with a Py4JError where a KeyboardInterrupt should be.
    before = signal.getsignal(signal.SIGINT)
    is_first = SparkContext._gateway is None and not is_under_spark_submit()
    named = {"spark.app.name": app_name, **({"spark.master": master} if master is not None else {}), **settings}
    gateway = start_jvm(named) if is_first else None
    conf = SparkConf().setAll(list(named.items()))
    if gateway is not None:
        SparkContext(conf=conf, gateway=gateway)
    else:
        SparkContext.getOrCreate(conf)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)


def _worker_environment(context: SparkContext) -> dict[str, str]:
    if not str(context.master).startswith("local"):
        return SAFE_PATH
    given = context.environment.get("PYTHONPATH", "")
    return {**SAFE_PATH, "PYTHONPATH": os.pathsep.join(filter(None, (given, python_path())))}


def protection_warning(master: str, setting: Callable[[str, str], str | None]) -> str:
    """What anyone on the network could do to this application, or "" if that is nobody."""
    if master.startswith("local") or setting("spark.authenticate", "false") == "true":
        return ""
    return (
        f"spark.authenticate is off at {master}: whoever reaches its ports can run code in it; set spark.authenticate "
        "and spark.network.crypto.enabled, or keep its network closed"
    )


def is_under_spark_submit() -> bool:
    """Whether `spark-submit` started this process, so that its master and settings hold."""
    return "PYSPARK_GATEWAY_PORT" in os.environ
