"""Spark's JVM prints nothing on the terminal, and receives no secret where others can read it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.canaries import files_with_canaries, write_config
from tests.lab.commands import BIN
from tests.lab.datasets import write_images
from tests.lab.terminal import SPARK_LINES, Terminal
from tests.processes import processes_of_session


@pytest.mark.drill
def test_a_live_spark_session_shows_no_secret_and_no_line_of_its_own(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60, num_classes=3)
    (tmp_path / "spark-events").mkdir()
    plain = {"enabled": "true", "dir": (tmp_path / "spark-events").as_uri(), "compress": "false"}
    events = {f"spark.eventLog.{name}": value for name, value in {**plain, "rolling.enabled": "false"}.items()}
    config = write_config(tmp_path, **events)
    terminal = Terminal(BIN / "shardmill", "etl", config, "--workdir", "work", "--run-id", "r", cwd=tmp_path)
    seen: dict[int, str] = {}
    while terminal.process.poll() is None:
        seen |= processes_of_session(terminal.process.pid)
        time.sleep(0.1)
    shown = terminal.text()
    assert terminal.process.returncode == 0, shown

    # Other users of the machine read command lines.
    assert any("org.apache.spark.deploy.SparkSubmit" in line for line in seen.values())
    assert [line for line in seen.values() if "canary" in line.lower()] == []

    # The event log was really written, with a setting that is no secret.
    [log] = list((tmp_path / "spark-events").glob("local-*"))
    assert b"SparkListenerEnvironmentUpdate" in log.read_bytes() and b"spark.eventLog.enabled" in log.read_bytes()
    assert files_with_canaries(tmp_path / "spark-events", tmp_path / "work", tmp_path / "dataset") == []

    # The progress bar is one line that is drawn over again, and nothing came between.
    lines = shown.replace("\r\n", "\n").split("\n")
    assert any(line.count("\r") > 3 for line in lines)
    assert [line for line in lines if "━" in line.rpartition("\r")[2]] in ([], [lines[-1]], [lines[-2]])

    # The person saw our lines alone; Spark's are in the run's log.
    assert not SPARK_LINES.search(shown), shown
    assert "canary" not in shown and "etl: done" in shown
    lines = (tmp_path / "work" / "runs" / "r" / "spark.log").read_text().splitlines()
    levels = [line for line in lines if re.search(r"\b(INFO|WARN|ERROR)\b", line)]
    # In our own layout, set by shardmill/jobs/spark-log4j2.properties.
    assert levels and all(re.match(r"\d\d:\d\d:\d\d spark (WARN|ERROR) ", line) for line in levels), lines


@pytest.mark.drill
@pytest.mark.parametrize(
    ("setting", "value"), [("spark.driver.memory", "1x"), ("spark.serializer", "no.such.Serializer")]
)
def test_settings_that_spark_refuses_are_one_line_that_names_the_log(setting: str, value: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=60, num_classes=3)
    config = write_config(tmp_path, **{setting: value})
    terminal = Terminal(BIN / "shardmill", "etl", config, "--workdir", "work", "--run-id", "r", cwd=tmp_path)
    terminal.process.wait(100)
    shown = terminal.text().rstrip().splitlines()
    assert terminal.process.returncode == 2, shown
    assert shown[-1].startswith("ERROR 2: Spark does not start: "), shown
    assert not [line for line in shown if SPARK_LINES.search(line)], shown
    log = tmp_path / "work" / "runs" / "r" / "spark.log"
    assert f"Spark's own report is in {log}" in " ".join(shown)
    assert value in log.read_text()
    assert "canary" not in log.read_text()
