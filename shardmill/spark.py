"""A Spark session for either application, the same from the command line, `spark-submit` and Airflow."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.config import SparkConfig
from shardmill.errors import UsageError
from shardmill.import_path import SAFE_PATH, python_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_QUIET_LOG = Path(__file__).with_name("spark-log4j2.properties")

# Only where driver and executors are one JVM on this machine: start faster, open no port, log errors only.
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

    Raises UsageError where pyspark or Java is missing.
    """
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError:
        raise UsageError("Spark needs the package pyspark", "", "pip install 'shardmill[spark]'") from None
    # Nobody reads Spark's progress bar between ours.
    settings = {"spark.ui.showConsoleProgress": "false"}
    settings |= {f"spark.executorEnv.{name}": value for name, value in SAFE_PATH.items()}
    submitted = is_under_spark_submit()
    if not submitted and spark.master.startswith("local"):
        settings |= {**_LOCAL_CONF, "spark.executorEnv.PYTHONPATH": python_path()}
        # Spark's own default is whatever `python3` is on the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    try:
        _start_context(app_name, None if submitted else spark.master, {**settings, **conf})
        session = SparkSession.builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise UsageError(
            f"Spark does not start: {str(error).splitlines()[0]}",
            "expected Java 17 or 21 on the PATH or in JAVA_HOME",
            "`shardmill doctor` shows what is missing",
        ) from error
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

    conf = SparkConf().setAppName(app_name).setAll(list(settings.items()))
    if master is not None:
        conf.setMaster(master)
    # The context replaces the handler of Ctrl-C by one that calls the JVM from inside the call that it interrupts, and
    # then fails with a Py4JError where a KeyboardInterrupt should be.
    before = signal.getsignal(signal.SIGINT)
    SparkContext.getOrCreate(conf)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)


def is_under_spark_submit() -> bool:
    """Whether `spark-submit` started this process, so that its master and settings hold."""
    return "PYSPARK_GATEWAY_PORT" in os.environ
