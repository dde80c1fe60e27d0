"""Spark's JVM prints nothing on the terminal, and receives no secret where others can read it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.canaries import files_with_canaries
from tests.lab.commands import BIN, ENVIRONMENT
from tests.lab.datasets import write_images
from tests.pipeline.test_secrets import write_config
from tests.processes import processes_of_session

# What Spark, Hadoop and the JVM say when they start, warn or fail.
SPARK_LINES = re.compile(r"\bWARN\b|INFO|ERROR [^0-9]|log4j|default log level|NativeCode|Picked up|\tat |java\.")


class Terminal:
    """A command in a terminal of its own, and what a person would see there."""

    def __init__(self, *command: str | Path, cwd: Path) -> None:
        primary, secondary = pty.openpty()
        environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "150"}
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=environment,
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            start_new_session=True,
        )
        os.close(secondary)
        self._bytes = b""
        self._reader = threading.Thread(target=self._read, args=(primary,), daemon=True)
        self._reader.start()

    def _read(self, primary: int) -> None:
        # At the end of the other side, Linux answers EIO.
        try:
            while data := os.read(primary, 65536):
                self._bytes += data
        except OSError:
            pass
        finally:
            os.close(primary)

    def text(self) -> str:
        """All that was shown, after the command has ended; control sequences removed."""
        self._reader.join(20)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._bytes.decode(errors="replace"))


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
