"""A Spark context for either application, the same from the command line, `spark-submit` and Airflow.

PySpark alone would put every setting on the JVM's command line, where all users of the machine can read it, and would
print Spark's own lines between those of the progress bar. So the JVM gets its settings in a private file, and its
output goes to the run's `spark.log` (shardmill/jobs/line_log.py).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.errors import ShardmillError, StorageError, UsageError
from shardmill.jobs.config import (
    SparkConfig,
    call_master,
    check_master,
    is_local_master,
    is_loopback,
    is_under_spark_submit,
    may_have_other_hosts,
    properties_file,
)
from shardmill.jobs.line_log import open_spark_log, spark_log_hint
from shardmill.jobs.process import SAFE_PATH, UTF8_MODE, environment_variable, python_path
from shardmill.jobs.redact import SPARK_REDACTION
from shardmill.registry import install_hint

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

# On an executor this file may be in an archive with a relative path.
_QUIET_LOG = Path(__file__).absolute().with_name("spark-log4j2.properties")

# Where driver and executors are one JVM on this machine, nobody else has to reach it.
_ON_LOOPBACK = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
# If we start that JVM: start faster, log to the run.
_LOCAL_CONF = {
    **_ON_LOOPBACK,
    "spark.driver.extraJavaOptions": (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={_QUIET_LOG.as_uri()}"
    ),
}


# What Spark itself hides on its pages, in its logs and in its event log; Spark's own defaults miss keys, DSNs and SAS.
REDACTION = {
    "spark.redaction.regex": SPARK_REDACTION,
    "spark.sql.redaction.options.regex": rf"(?i:url)|{SPARK_REDACTION}",
}


# Java's errors for a value that it cannot use (spark.executor.memory = "much") and for a class that is not there.
_JAVA_USAGE_ERRORS = frozenset({"java.lang.IllegalArgumentException", "java.lang.ClassNotFoundException"})


# For a context that runs nothing.
_WITHOUT_EXECUTORS = {
    "spark.executor.instances": "0",
    "spark.dynamicAllocation.enabled": "false",
    "spark.ui.enabled": "false",
}
_shared: _Shared | None = None
_was_opened = False
"""Whether this process has started a context."""


@dataclass(slots=True)
class _Shared:
    """The context of a `one_spark` block, if it has been opened."""

    stack: ExitStack
    context: SparkContext | None = None


@contextmanager
def one_spark() -> Iterator[None]:
    """Every `spark_context` that is opened inside is the first one again, which is stopped at the end of the block.

    An application whose driver runs on the cluster can have no second one (YARN gives it no executors), and anywhere
    else it would be queued anew.
    """
    global _shared
    with ExitStack() as stack:
        _shared = _Shared(stack)
        try:
            yield
        finally:
            _shared = None


@contextmanager
def spark_for_retries() -> Iterator[None]:
    """Let work reopen a Spark context after a fault: a fresh one, unless the driver can have only one."""
    with one_spark() if _driver_is_on_cluster() else nullcontext():
        yield


def _driver_is_on_cluster() -> bool:
    """Whether `spark-submit --deploy-mode cluster` started this process."""
    return is_under_spark_submit() and _submitted_settings().get("spark.submit.deployMode") == "cluster"


@contextmanager
def spark_application() -> Iterator[None]:
    """What a job does under `spark-submit`. If it has opened no context by its end, one is opened in YARN's cluster
    mode: YARN calls an application without one failed ("User did not initialize spark context!"), also a job that has
    found its results and had nothing to do.
    """
    yield
    if not _was_opened and _driver_is_on_cluster() and _submitted_settings().get("spark.master") == "yarn":
        with _started("nothing to do", SparkConfig(), _WITHOUT_EXECUTORS):
            pass


@contextmanager
def spark_context(app_name: str, spark: SparkConfig, conf: Mapping[str, str]) -> Iterator[SparkContext]:
    """Start (or under `spark-submit` join) a context with `conf` passed through, and stop it at the end.

    Inside a `one_spark` block the first call decides, and the end of the block is the end. Raises as `_started` does.
    """
    if _shared is None:
        with _started(app_name, spark, conf) as context:
            yield context
        return
    if _shared.context is None:
        _shared.context = _shared.stack.enter_context(_started(app_name, spark, conf))
    yield _shared.context


@contextmanager
def _started(app_name: str, spark: SparkConfig, conf: Mapping[str, str]) -> Iterator[SparkContext]:
    """A context of its own.

    No session: neither application needs Spark SQL, which takes seconds to start.

    Raises UsageError if pyspark, Java or YARN's settings are missing, or if Spark refuses the settings; StorageError,
    which schedulers retry, if the machine or the cluster is at fault (no master answers, a port is taken).
    """
    global _was_opened
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkRuntimeError
    except ImportError:
        raise UsageError("Spark needs the package pyspark", "", install_hint("spark")) from None
    check_master(spark.master)
    # Spark's progress bar would overwrite ours.
    settings = {"spark.ui.showConsoleProgress": "false", **REDACTION}
    submitted = _submitted_settings() if is_under_spark_submit() else None
    master = spark.master if submitted is None else submitted.get("spark.master", "")
    if master.startswith("spark://"):
        call_master(master)
    if submitted is not None:
        # Its JVM runs, but listens to nobody before the context starts. What was given to spark-submit stays.
        loopback = _ON_LOOPBACK if is_local_master(master) else {}
        settings |= {name: value for name, value in loopback.items() if name not in submitted}
    elif is_local_master(master):
        settings |= _LOCAL_CONF
        # Java does not ask TMPDIR: what Spark leaves there goes with this process's own temporary folder.
        settings["spark.local.dir"] = tempfile.gettempdir()
        settings["spark.driver.extraJavaOptions"] += f' "-Djava.io.tmpdir={tempfile.gettempdir()}"'
        # Spark's own default is whatever `python3` is on the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    try:
        context = _start_context(app_name, spark.master if submitted is None else None, {**settings, **conf})
    except PySparkRuntimeError as error:
        raise UsageError(
            f"Spark does not start: {str(error).splitlines()[0]}",
            "expected Java 17 or 21 on the PATH or in JAVA_HOME, and settings that its JVM accepts",
            spark_log_hint() or "`shardmill doctor` shows what is missing",
        ) from error
    except Py4JError as error:
        raise _start_error(error) from error
    _was_opened = True
    # Spark's Python processes get it with each task.
    context.environment |= _worker_environment(context)
    for warns in (loopback_warning, protection_warning):
        if warning := warns(str(context.master), context.getConf().get):
            sys.stderr.write(f"WARNING: {warning}\n")
    try:
        yield context
    except BaseException:
        # Stopping fails if the JVM is gone (a signal to the process group, out of memory); the first error counts.
        with suppress(Exception):
            context.stop()
        raise
    context.stop()


def as_submitted(spark: SparkConfig, settings: Collection[str]) -> SparkConfig:
    """Under `spark-submit`, the section with its master, and with what it was given of these `settings` for training.

    Without it, `spark` itself. The config's own settings win, as they do once the context starts.
    """
    if not is_under_spark_submit():
        return spark
    given = _submitted_settings()
    conf = {name: given[name] for name in settings if name in given} | spark.train.conf
    train = spark.train.model_copy(update={"conf": conf})
    return spark.model_copy(update={"master": given.get("spark.master", spark.master), "train": train})


def _submitted_settings() -> dict[str, str]:
    """Return the settings passed to `spark-submit`."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # pyright: ignore[reportPrivateUsage]
    return dict(SparkConf().getAll())


def _start_error(error: Py4JError) -> ShardmillError:
    """Why Spark does not start: UsageError if a setting is wrong, StorageError for a fault that may pass."""
    from py4j.protocol import Py4JJavaError

    if not isinstance(error, Py4JJavaError):
        return StorageError(
            "Spark does not start: its JVM ended", "expected it to run until the job ends", spark_log_hint()
        )
    causes = list(_causes(error.java_exception))
    kinds = {name for cause in causes for name in _java_classes(cause)}
    # Its own text is a stack trace. The innermost cause names the fault; those around it, what Spark was doing.
    line = f"Spark does not start: {causes[0].getMessage()}"
    if causes[-1].getMessage() not in (None, causes[0].getMessage()):
        line += f" ({causes[-1].getMessage()})"
    wrong_master = re.search("parse Master URL|Invalid master URL|master URL must be set", line)
    if wrong_master or kinds & _JAVA_USAGE_ERRORS:
        return UsageError(line, "expected a master URL and settings that Spark accepts", spark_log_hint())
    return StorageError(line, "expected a master that answers and a machine with free ports", spark_log_hint())


def _causes(throwable: Any) -> Iterator[Any]:
    while throwable is not None:
        yield throwable
        throwable = throwable.getCause()


def _java_classes(throwable: Any) -> Iterator[str]:
    kind = throwable.getClass()
    while kind is not None:
        yield kind.getName()
        kind = kind.getSuperclass()


def _start_context(app_name: str, master: str | None, settings: Mapping[str, str]) -> SparkContext:
    from pyspark import SparkConf, SparkContext

    # The context replaces the handler of Ctrl-C by one that calls the JVM from inside the call that it interrupts, and
    # then fails with a Py4JError where a KeyboardInterrupt should be.
    before = signal.getsignal(signal.SIGINT)
    is_first = SparkContext._gateway is None and not is_under_spark_submit()
    named = {"spark.app.name": app_name, **({"spark.master": master} if master is not None else {}), **settings}
    gateway = start_jvm(named) if is_first else None
    conf = SparkConf().setAll(list(named.items()))
    context = SparkContext.getOrCreate(conf) if gateway is None else SparkContext(conf=conf, gateway=gateway)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)
    return context


def _worker_environment(context: SparkContext) -> dict[str, str]:
    if not is_local_master(str(context.master)):
        return SAFE_PATH | UTF8_MODE
    given = context.environment.get("PYTHONPATH", "")
    return {**SAFE_PATH, **UTF8_MODE, "PYTHONPATH": os.pathsep.join(filter(None, (given, python_path())))}


def loopback_warning(master: str, setting: Callable[[str, str], str | None]) -> str:
    """A warning if executors and ranks on other hosts cannot call this driver, or ""."""
    if not may_have_other_hosts(master):
        return ""
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        if (host := setting(name, "")) and is_loopback(host):
            return (
                f"{name} = {host} is a loopback address: executors of {master} on other hosts cannot call this "
                f"driver; set {name} to this host's address on their network (its default comes from SPARK_LOCAL_IP)"
            )
    return ""


def protection_warning(master: str, setting: Callable[[str, str], str | None]) -> str:
    """A warning if other hosts of the network can run code in this application, or ""."""
    if is_local_master(master) or setting("spark.authenticate", "false") == "true":
        return ""
    return (
        f"spark.authenticate is off at {master}: anyone who reaches its ports can run code in it; set "
        "spark.authenticate and spark.network.crypto.enabled, or keep its network closed"
    )


def start_jvm(settings: Mapping[str, str]) -> JavaGateway:
    """Start Spark's JVM; its settings are in no command line, and in no file once it runs."""
    from pyspark.java_gateway import launch_gateway

    output = open_spark_log()
    given = os.environ.get("PYSPARK_SUBMIT_ARGS") or "pyspark-shell"
    try:
        with properties_file(settings) as file:
            arguments = f"--properties-file {file} --load-spark-defaults {given}"
            with environment_variable("PYSPARK_SUBMIT_ARGS", arguments):
                return launch_gateway(popen_kwargs={"stdout": output, "stderr": output})
    finally:
        if output is not None:
            output.close()
