"""Helpers that HDFS and YARN tests share: jars beside pyspark's, settings as XML, a Java server as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.services.marked import QUICK_JVM
from tests.services.servers import CACHE, fetching, start_server

# Of the release that pyspark 4.0 brings; fetched once, into the user's cache, by the Ivy inside pyspark.
MINICLUSTER = "org.apache.hadoop:hadoop-client-minicluster:3.4.1"
_FETCH_SECONDS = 300.0
_FETCH = """
import sys
from pyspark.sql import SparkSession
SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config(
    "spark.jars.packages", sys.argv[2]).config("spark.jars.ivy", sys.argv[1]).config(
    "spark.jars.excludes", "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime,"
    "junit:junit,org.hamcrest:hamcrest-core").getOrCreate().stop()
"""


def jars(*coordinates: str, cache: Path = CACHE) -> list[Path]:
    """These of Maven Central's, from the folder `jars` of the cache or fetched with what they need."""
    folder = cache / "jars"

    def missing() -> list[str]:
        # Ivy names them group_name-version.jar.
        files = {each: f"{each.replace(':', '_', 1).replace(':', '-')}.jar" for each in coordinates}
        return [each for each, file in files.items() if not (folder / file).exists()]

    # A jar that is still copied is none.
    with fetching("jars"):
        if missing():
            command = [sys.executable, "-c", _FETCH, str(cache), ",".join(coordinates)]
            subprocess.run(command, check=True, timeout=_FETCH_SECONDS)
    assert not missing(), f"{missing()} are not in {folder}; they come from Maven Central"
    return sorted(folder.glob("*.jar"))


def class_path(conf: Path) -> str:
    """Of a server with its settings in `conf`, of the minicluster's one jar beside pyspark's."""
    return ":".join(map(str, (conf, *jars(MINICLUSTER), f"{pyspark_jars()}/*")))


def pyspark_jars() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent / "jars"


def write_settings(file: Path, settings: Mapping[str, str]) -> None:
    rows = (f"<property><name>{key}</name><value>{value}</value></property>" for key, value in settings.items())
    file.write_text(f"<configuration>{''.join(rows)}</configuration>")


def start_java(
    log: Path, class_path: str, name: str, *arguments: str, options: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[bytes]:
    """The main class `name`, as `start_server` does."""
    java = f"{os.environ['JAVA_HOME']}/bin/java" if "JAVA_HOME" in os.environ else "java"
    command = [java, "-Xmx512m", *QUICK_JVM, *options, "-cp", class_path, name, *arguments]
    return start_server(command, log, {**os.environ, **environment})
