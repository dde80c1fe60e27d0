"""Converts Spark settings from TOML to a file for the JVM. Light, because Airflow imports it whenever it parses
a DAG.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardmill.errors import UsageError
from shardmill.jobs.addresses import is_loopback


def is_under_spark_submit() -> bool:
    """Whether `spark-submit` started this process, so that its master and settings hold."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_local_master(master: str) -> bool:
    """Whether Spark's tasks run in processes of this machine."""
    return re.match(r"local(\[|$)", master) is not None


def may_have_other_hosts(master: str) -> bool:
    """Whether executors may be on other hosts."""
    return not master.startswith("local") and not is_loopback(master.removeprefix("spark://").rpartition(":")[0])


def check_master(master: str) -> None:
    """Raises UsageError for YARN without the settings that say where it is, which Spark refuses as its JVM starts."""
    if master != "yarn" or is_under_spark_submit():
        return
    # Spark's start script sets what this one says.
    conf = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", os.devnull), "conf")
    is_set = os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")
    if is_set or os.path.isfile(os.path.join(conf, "spark-env.sh")):
        return
    raise UsageError(
        "spark.master = 'yarn', but neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set",
        "expected the folder of core-site.xml and yarn-site.xml in one of them",
        "export HADOOP_CONF_DIR=/etc/hadoop/conf",
    )


def flat_settings(table: dict[str, Any]) -> dict[str, str]:
    """TOML reads `spark.executor.memory = "2g"` as nested tables; Spark wants flat names, and every value as text."""
    return dict(_flat("", table))


def _flat(prefix: str, table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def properties_file(settings: Mapping[str, str]) -> Iterator[str]:
    """The path of a file for `spark-submit --properties-file`: its owner alone can read it, and it is removed after."""
    descriptor, path = tempfile.mkstemp(prefix="shardmill-", suffix=".properties")
    try:
        # mkstemp makes it 0600, whatever the umask is.
        with open(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{_escaped(name)}={_escaped(value)}\n" for name, value in settings.items())
        yield path
    finally:
        os.unlink(path)


def _escaped(text: str) -> str:
    # java.util.Properties would otherwise read these as separators, comments, line ends or blanks to strip.
    ends = {"\n": "n", "\r": "r", "\f": "f"}
    return re.sub(r"[\\\s=:#!]", lambda found: "\\" + ends.get(found[0], found[0]), text)
