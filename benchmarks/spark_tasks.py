"""Measures what Spark adds to the work of tasks: by RDDs, by DataFrames of a context, and by Spark Connect.

    .venv/bin/python benchmarks/spark_tasks.py --units 200 --rounds 3

Each round runs each of them once, in turn, in a process of its own with two slots: three jobs of so many units that do
nothing. The processor time is that of the process and of all that it has started, JVM and Python workers.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmill.applications import OnExecutor
from shardmill.child_process import adopt_orphans
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.spark import spark_context
from shardmill.jobs.spark_connect import ConnectTasks, frame_of
from shardmill.jobs.spark_tasks import ContextTasks, Job, Tasks, ThreadJob

NUM_JOBS = 3
LOCAL = SparkConfig(master="local[2]")


class FrameTasks(ContextTasks):
    """DataFrames where there are RDDs."""

    def start(self, tasks: Tasks) -> Job:
        from pyspark.sql import SparkSession

        def run() -> Sequence[tuple[Any, ...]]:
            return frame_of(SparkSession(self._context), tasks).collect()

        return ThreadJob(run, lambda: 0, lambda: None)


@contextmanager
def tasks_by(way: str) -> Iterator[Any]:
    """What runs the tasks in one of the three ways."""
    if way == "Spark Connect":
        from pyspark.sql import SparkSession

        os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        session = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        yield ConnectTasks(session)
        session.stop()
        return
    with spark_context("benchmark", LOCAL, {}) as context:
        yield (ContextTasks if way == "RDDs" else FrameTasks)(context)


WAYS = ("RDDs", "DataFrames", "Spark Connect")


def nothing(units: Iterable[bytes]) -> Iterator[tuple[int]]:
    """The work of a unit that had no retries."""
    for _ in units:
        pass
    return iter(())


def has_children() -> bool:
    """Whether any process is left below this one."""
    return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def measure(way: str, num_units: int) -> None:
    """Print the seconds until Spark had started, and of each job."""
    tasks = Tasks(OnExecutor(nothing), {"retries": "bigint"}, num_units, [b"x" * 300] * num_units)
    seconds = [time.monotonic()]
    with tasks_by(way) as spark:
        seconds.append(time.monotonic())
        for _ in range(NUM_JOBS):
            spark.start(tasks).result()
            seconds.append(time.monotonic())
    sys.stdout.write(" ".join(f"{end - start:.3f}" for start, end in itertools.pairwise(seconds)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=WAYS, help="measure one way once, in this process")
    chosen = parser.parse_args()
    if chosen.only:
        measure(chosen.only, chosen.units)
        return
    adopt_orphans()
    found: defaultdict[str, list[list[float]]] = defaultdict(list)
    for _ in range(chosen.rounds):
        for way in WAYS:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, __file__, "--only", way, "--units", str(chosen.units)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            # The JVM and the Python workers, which its end leaves behind, count too.
            while has_children():
                os.wait()
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found[way].append([*map(float, done.stdout.splitlines()[-1].split()), cpu])
    sys.stdout.write("way: start, first job, second, third (s); a unit of the third (ms); processor time (s)\n")
    for way, rounds in found.items():
        start, *jobs, cpu = (statistics.median(each) for each in zip(*rounds, strict=True))
        sys.stdout.write(f"{way}: {start:.1f}, {', '.join(f'{job:.2f}' for job in jobs)}; ")
        sys.stdout.write(f"{1000 * jobs[-1] / chosen.units:.1f}; {cpu:.1f}\n")


if __name__ == "__main__":
    main()
