"""Spark that does not start ends with exit 2 if a setting is wrong, and with exit 4, which is tried again, if not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.errors import StorageError, UsageError
from tests.processes import LOCAL
from tests.services.marked import MARK

ROOT = Path(__file__).parents[2]


def start(master: str, *settings: str, **variables: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.start_spark", master, *settings],
        env=environment | variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return " ".join(done.stdout.split())


@pytest.mark.drill
@pytest.mark.parametrize(
    ("master", "setting", "said"),
    [
        # The JVM itself refuses this one.
        ("nonsense://here", "spark.ui.enabled=false", "settings that its JVM accepts"),
        ("local[1]", "spark.driver.maxResultSize=much", "Failed to parse byte string: much"),
    ],
)
def test_a_wrong_setting_is_the_users(master: str, setting: str, said: str):
    line = start(master, setting)
    assert line.startswith(UsageError.__name__) and said in line, line


@pytest.mark.drill
def test_a_fault_of_the_machine_may_pass():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = start("local[1]", f"spark.driver.port={taken.getsockname()[1]}", "spark.port.maxRetries=0")
    assert line.startswith(StorageError.__name__) and "Address already in use" in line, line


@pytest.mark.drill
def test_a_local_master_of_spark_submit_is_reached_from_this_machine_alone(tmp_path: Path):
    """As Airflow's DAG starts a job for `spark.master = "local[2]"`."""
    command = [Path(sys.executable).with_name("spark-submit"), "--master", "local[2]", "where_spark_listens.py"]
    environment = {**os.environ, MARK: f"listens-{tmp_path.name}-{os.getpid()}"}
    done = subprocess.run(
        command, cwd=ROOT / "tests" / "programs", env=environment, capture_output=True, text=True, timeout=120
    )
    found = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("address ")}
    assert done.returncode == 0 and found and found <= LOCAL, (found, done.stderr[-2000:])


@pytest.mark.starts("program")
def test_yarn_without_its_settings_is_reported_before_any_jvm_starts(tmp_path: Path):
    line = start("yarn", JAVA_HOME=str(tmp_path))
    assert line.startswith("UsageError spark.master = 'yarn', but neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set"), (
        line
    )
    # Where Spark's own script sets it, there is nothing to refuse here: it is the missing Java that is told.
    (tmp_path / "spark-env.sh").touch()
    assert "expected Java 17 or 21" in start("yarn", JAVA_HOME=str(tmp_path), SPARK_CONF_DIR=str(tmp_path))
    assert "expected Java 17 or 21" in start("yarn", JAVA_HOME=str(tmp_path), YARN_CONF_DIR=str(tmp_path))
