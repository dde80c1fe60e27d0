"""The launcher of `horovod.spark.run`: one Spark task per rank, which starts the rank's process on its executor.

Driver and executors share nothing but the network: task, reports and result travel over the watchdog's connection.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from shardmill.environments.rank_environment import HOROVODS, read_rank_environment
from shardmill.jobs.config import SparkConfig, is_on_this_machine
from shardmill.jobs.open_spark import check_own_context
from shardmill.jobs.process import SAFE_PATH
from shardmill.jobs.spark import spark_context
from shardmill.jobs.spark_tasks import ContextTasks
from train.api import Launcher
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.launching.connection import ADDRESS_VARIABLE, TOKEN_VARIABLE
from train.launching.processes import keep_rank
from train.launching.rank import DEFAULT_WORKER
from train.launching.spark_slots import (
    SparkJob,
    assigns_gpus,
    check_configured_slots,
    driver_addresses,
    ranks_on_this_machine,
    text_of,
    wait_for_slots,
)
from train.launching.watchdog import Watchdog
from train.reporting.observer import TrainObserver
from train.strategies.horovod import (
    GLOO_ADDRESS,
    GLOO_PORT,
    GLOO_TIMEOUT_SECONDS,
    GuardedRendezvous,
    address_variables,
    derive,
    guarded_mapper,
    listening_on,
)

TOKEN_PURPOSE, PATH_PURPOSE = "shardmill watchdog", "shardmill rendezvous"
APPLICATION_NAME = "shardmill-train"


def launch_horovod_spark(
    task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = DEFAULT_WORKER
) -> TrainResult:
    """Run every rank in a Spark task. Raises UsageError at once if Spark cannot run them all at the same time."""
    check_horovod_spark(task.config.num_workers, spark)
    with spark_context(APPLICATION_NAME, spark, spark.train.conf) as context:
        cluster = ContextTasks(context)
        wait_for_slots(task.config.num_workers, cluster, task.config.watch.start_timeout_seconds)
        secret = secrets.token_bytes(32)
        token = derive(secret, TOKEN_PURPOSE)
        with Watchdog(task, worker, observer, *driver_addresses(cluster), token) as watchdog:
            stop, output = threading.Event(), _Tail()
            is_local = is_on_this_machine(cluster.master)
            run = partial(_run_horovod, task, watchdog, secret, stop, output, is_local=is_local)
            cancel = context.cancelAllJobs
            return SparkJob("horovod.spark.run", run, cancel, watchdog, stop=stop.set, output=output.text).watch()


def check_horovod_spark(world_size: int, spark: SparkConfig) -> None:
    """Check the config: a Spark context of its own, and slots for all ranks. Raises UsageError."""
    check_own_context("train.launcher = 'horovod_spark'", "set train.launcher = 'spark_barrier'", spark)
    check_configured_slots(world_size, spark)


def keep_rank_of_horovod() -> int:
    """The function that Horovod runs in the process of each rank, on the executor.

    Horovod's key came with Spark's task. The token and the path to the rendezvous follow from it, and cross no wire.
    """
    from horovod.runner.common.util import codec, secret
    from horovod.spark.task import get_available_devices

    # Taken out: user code may print its environment.
    key = codec.loads_base64(os.environ.pop(secret.HOROVOD_SECRET_KEY))
    os.environ[TOKEN_VARIABLE] = derive(key, TOKEN_PURPOSE)
    host, port = os.environ[GLOO_ADDRESS], int(os.environ[GLOO_PORT])
    os.environ.update(address_variables(host, port, derive(key, PATH_PURPOSE)))
    # What Spark assigned to the task that this process belongs to.
    return keep_rank(read_rank_environment(HOROVODS), dict(os.environ), get_available_devices() or None)


def _run_horovod(
    task: WorkerTask, watchdog: Watchdog, secret: bytes, stop: threading.Event, output: _Tail, *, is_local: bool
) -> None:
    """`horovod.spark.run`, which raises plain Exceptions with texts."""
    # Not the token: Horovod sends this over the network as it is.
    environment = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_SECONDS),
        ADDRESS_VARIABLE: watchdog.environment()[ADDRESS_VARIABLE],
        **SAFE_PATH,
    }
    nics = set(task.config.nics) or None
    executable = os.environ.get("PYSPARK_PYTHON", sys.executable)
    if is_local:
        nics, executable = nics or {"lo"}, sys.executable
    with _patched_horovod(stop, output, secret), listening_on(nics):
        import horovod.spark as horovod_spark

        horovod_spark.run(
            keep_rank_of_horovod,
            num_proc=task.config.num_workers,
            start_timeout=int(task.config.watch.start_timeout_seconds) + 1,
            use_gloo=True,
            env=environment,
            stdout=output,
            stderr=output,
            verbose=0,
            nics=nics,
            executable=executable,
        )


class _Tail:
    """A text stream that keeps the end of what was written."""

    MAX_CHARACTERS = 8000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text = ""

    def write(self, text: str) -> int:
        with self._lock:
            self._text = (self._text + text)[-self.MAX_CHARACTERS :]
        return len(text)

    def write_if_empty(self, text: str) -> None:
        """Without Java's stack trace; nothing is written if there is output of a rank already."""
        with self._lock:
            self._text = self._text or " ".join(text.split("\tat ")[0].split())

    def flush(self) -> None:
        return

    def text(self) -> str:
        with self._lock:
            return self._text.strip()


@contextmanager
def _patched_horovod(stop: threading.Event, output: _Tail, secret: bytes) -> Iterator[None]:
    """Patch `horovod.spark.run` so that it works in a thread and accepts only this job's ranks; undone on exit.

    - `launch_gloo` installs handlers for SIGINT and SIGTERM, which Python allows in the main thread only, and which
      would take Ctrl-C away from the command line: it waits for `stop` instead.
    - `run_controller` forks this process, JVM connection and all, to import TensorFlow and see whether Gloo was built
      in: the ranks find that out themselves.
    - Its own thread dies of an exception when Spark's job is cancelled: that goes to `output`, not to the terminal.
    - Its rendezvous and its tasks are the guarded ones; its key is `secret`.
    """
    import horovod.runner.common.util.secret as horovod_secret
    import horovod.runner.gloo_run as gloo_run
    import horovod.runner.launch as launch
    import horovod.spark.gloo_run as spark_gloo_run
    import horovod.spark.runner as runner

    opened: list[GuardedRendezvous] = []
    launch_gloo = spark_gloo_run.launch_gloo

    def launch_guarded(*arguments: Any) -> None:
        # The last argument is the address at which the ranks look for the rendezvous.
        opened.append(GuardedRendezvous(arguments[-1], derive(secret, PATH_PURPOSE)))
        launch_gloo(*arguments)

    def write_thread_error(args: threading.ExceptHookArgs) -> None:
        output.write_if_empty(text_of(args.exc_value or args.exc_type()))

    with ExitStack() as stack:
        for module, name, replacement in (
            (gloo_run, "register_shutdown_event", lambda: stop),
            (gloo_run, "RendezvousServer", lambda verbose: opened[-1]),
            (launch, "gloo_built", lambda verbose=False: True),
            (runner, "_make_mapper", guarded_mapper),
            (spark_gloo_run, "launch_gloo", launch_guarded),
            (horovod_secret, "make_secret_key", lambda: secret),
            (threading, "excepthook", write_thread_error),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        try:
            yield
        finally:
            for rendezvous in opened:
                rendezvous.stop()


HOROVOD_SPARK = Launcher(
    launch_horovod_spark,
    check=check_horovod_spark,
    # Horovod tells its ranks where the others are; other strategies ask their driver, but this is Horovod's own way.
    strategies=("single", "horovod"),
    ranks_here=ranks_on_this_machine,
    assigns_devices=assigns_gpus,
    chooses_nics=True,
    starts_helpers=False,
)
