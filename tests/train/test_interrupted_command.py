"""A training as a command that a signal ends: its ranks end too, and it says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.lab.scale import exhaustive
from tests.processes import hears_all_signals
from tests.services.marked import MARK
from tests.train.driver_process import ROOT, Driver

COMMANDS = {
    "job.py": (sys.executable, str(ROOT / "train/job.py"), "--config"),
    "shardmill": (str(Path(sys.executable).with_name("shardmill")), "train"),
}


def begun(folder: Path, dataset: str, command: tuple[str, ...], launcher: str) -> Driver:
    """The command with two ranks that have made a step, run `run` of the workdir `work`."""
    file, mark = folder / "config.toml", f"mark-{uuid.uuid4()}"
    file.write_text(
        f"""
        dataset.uri = "{dataset}"
        models.uri = "{folder / "models"}"
        spark.master = "local[2]"
        [train]
        launcher = "{launcher}"
        strategy = "horovod"
        num_workers = 2
        epochs = 100_000
        global_batch_size = 24
        num_streams = 6
        record_samples = true
        """
    )
    temporary = folder / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [*command, str(file), "--workdir", str(folder / "work"), "--run-id", "run"],
        cwd=folder,
        env={**os.environ, MARK: mark, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hears_all_signals,
    )
    driver, steps = Driver(process, mark), folder / "work/runs/run/steps.jsonl"
    try:
        while not (steps.exists() and steps.stat().st_size):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        assert len(driver.processes_left()) >= 2
    except BaseException:
        process.kill()
        raise
    return driver


@pytest.mark.drill
@pytest.mark.parametrize(
    ("command", "launcher", "number", "kill"),
    [
        ("shardmill", "local", signal.SIGINT, os.killpg),
        # Spark's JVM, a member of the group, dies first; what then fails in our clean-up is not why we end.
        ("shardmill", "horovod_spark", signal.SIGTERM, os.killpg),
        exhaustive("job.py", "local", signal.SIGTERM, os.kill),
        exhaustive("job.py", "horovod_spark", signal.SIGTERM, os.kill),
        exhaustive("job.py", "horovod_spark", signal.SIGINT, os.killpg),
    ],
)
def test_interrupted_command_ends_its_ranks_and_says_so(tmp_path, tiny_uri, command, launcher, number, kill):
    driver = begun(tmp_path, tiny_uri, COMMANDS[command], launcher)
    process = driver.process
    try:
        kill(process.pid, number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + number, errors
    assert errors.rstrip().splitlines()[-1].startswith(f"ERROR {128 + number}: "), errors
    assert "Traceback" not in errors
    summary = json.loads((tmp_path / "work/runs/run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 128 + number)
    driver.assert_nothing_left()
    # Of TensorFlow and of Spark: `spark-*`, `blockmgr-*`, compiled functions.
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.drill
@pytest.mark.parametrize("command", ["shardmill", exhaustive("job.py")])
def test_a_training_whose_shell_is_killed_stops_in_order_and_leaves_nothing(tmp_path, tiny_uri, command):
    script = ("bash", "-c", '"$@"; true', "script", *COMMANDS[command])
    driver = begun(tmp_path, tiny_uri, script, "local")
    os.kill(driver.process.pid, signal.SIGKILL)
    # Until all that hold the pipes are gone.
    _, errors = driver.process.communicate(timeout=60)
    assert errors.rstrip().splitlines()[-1].startswith("ERROR 143: "), errors
    driver.assert_nothing_left()
    summary = json.loads((tmp_path / "work/runs/run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 143)
    assert list((tmp_path / "models").rglob("MARKER.json")), "it ended with a checkpoint"
