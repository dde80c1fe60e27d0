"""A JAVA_HOME whose `java` gives Spark's JVMs an archive of the classes that they load: they start in half the time.

https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html ("Dynamic CDS Archive"). Other programs of Java,
and Spark behind another class path, run as without it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from tests.services.servers import CACHE

_ROOT = Path(__file__).parents[2]
_CACHE = CACHE.with_name("spark-classes")
_DUMP_SECONDS = 120
# `spark-class` asks a first, short JVM for the command of the second.
_SCRIPT = """#!/bin/sh
case " $* " in
*" org.apache.spark.launcher.Main "*)
    exec '{java}' -XX:TieredStopAtLevel=1 -XX:+UseSerialGC {option}='{home}/launcher.jsa' -Xlog:disable "$@" ;;
*" org.apache.spark.deploy.SparkSubmit "*)
    exec '{java}' {option}='{home}/submit.jsa' -Xlog:disable "$@" ;;
*)
    exec '{java}' "$@" ;;
esac
"""
_SPARK = """
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.spark import spark_context
with spark_context("classes", SparkConfig(master="local[2]"), {}) as spark:
    numbers = spark.broadcast(list(range(10)))
    assert spark.parallelize(range(2), 2).map(lambda each: numbers.value[each]).sum() == 1
"""


def use_archived_classes(*, may_create: bool) -> None:
    """Set JAVA_HOME for all that this process starts, if there is an archive or it may be created (15 seconds)."""
    java = _real_java()
    if java is None:
        return
    program = Path(java).resolve()
    key = f"{program} {program.stat().st_mtime_ns} {version('pyspark')}"
    home = _CACHE / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not home.exists() and may_create:
        _create(home, java)
    if home.exists():
        os.environ["JAVA_HOME"] = str(home)


def _real_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    if home and Path(home).is_relative_to(_CACHE):
        return None
    found = f"{home}/bin/java" if home else shutil.which("java")
    return found if found and os.access(found, os.X_OK) else None


def _create(home: Path, java: str) -> None:
    """The archives appear with their folder, complete: several processes may create it at the same time."""
    unfinished = home.with_name(f"{home.name}.{os.getpid()}")
    _write_script(unfinished, unfinished, java, "-XX:ArchiveClassesAtExit")
    started = subprocess.Popen(
        [sys.executable, "-c", _SPARK], cwd=_ROOT, env={**os.environ, "JAVA_HOME": str(unfinished)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    if started.wait() == 0 and _ends(started.pid):
        _write_script(unfinished, home, java, "-XX:SharedArchiveFile")
        try:
            unfinished.rename(home)
        except OSError:
            # Another process was first.
            shutil.rmtree(unfinished)
    else:
        shutil.rmtree(unfinished)


def _write_script(folder: Path, home: Path, java: str, option: str) -> None:
    script = folder / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_SCRIPT.format(java=java, home=home, option=option))
    script.chmod(0o755)


def _ends(group: int) -> bool:
    """The JVM writes its archive when it ends, after the Python that has started it."""
    deadline = time.monotonic() + _DUMP_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
