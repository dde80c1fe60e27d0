"""A training on a cluster of tests that loses an executor, and what must be true of it then."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardmill.failpoints import VARIABLE
from shardmill.jobs.line_log import read_lines
from shardmill.stores import open_store
from tests.lab.commands import ROOT
from tests.processes import is_stopped
from tests.services.marked import marked
from tests.services.spark_standalone import NUM_SLOTS, SparkCluster
from tests.services.spark_submit import Submitted, Submitter, summary_of

GATED_TORCH, GATED_KERAS = (ROOT / "tests" / "programs" / f"gated_{framework}.py" for framework in ("torch", "keras"))
# The restart comes from a checkpoint, and does steps again.
MAY_RESTART = ("--set", "train.max_restarts=1", "--set", "train.checkpoint_every_steps=4")
_STEPS_BEFORE = 6
UNIT_WORKER = "etl.engines.unit_worker"
# Spark settings that stop each unit process once, after the record of its second unit.
STOPS_IN_SECOND_UNIT = {f"spark__executorEnv__{VARIABLE}": "stop:task_report:2"}

Steps = dict[tuple[int, int], dict[str, Any]]
"""Of a run: losses and sample ids, by epoch and step."""


def executors(mark: str) -> list[int]:
    """Process ids of the JVMs that run executors now, not of the shells around them."""
    found = marked(mark).items()
    return [pid for pid, arguments in found if any(each.endswith("ExecutorBackend") for each in arguments)]


def until(is_so: Callable[[], object], submitted: Submitted) -> None:
    deadline = time.monotonic() + 500
    while not is_so():
        assert time.monotonic() < deadline, submitted.output
        if submitted.process.poll() is not None and not is_so():
            raise AssertionError(submitted.output)
        time.sleep(0.02)


def wait_for_both_stopped(cluster: SparkCluster, submitted: Submitted) -> None:
    """Until each executor has stopped in a unit that is recorded and not reported; for `STOPS_IN_SECOND_UNIT`."""
    until(lambda: [is_stopped(pid) for pid in cluster.processes(UNIT_WORKER)] == [True] * NUM_SLOTS, submitted)


def replace_an_executor(cluster: SparkCluster, submitted: Submitted) -> None:
    """Kill one of the stopped executors; continue all processes once the master has replaced it."""
    before = len(cluster.work_folders())
    os.kill(executors(cluster.mark)[0], signal.SIGKILL)
    until(lambda: len(cluster.work_folders()) == before + 1, submitted)
    while submitted.process.poll() is None:
        for pid in cluster.processes(UNIT_WORKER):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


def steps_of(workdir: str | Path, run_id: str) -> Steps:
    lines = read_lines(open_store(str(workdir)), f"runs/{run_id}/steps.jsonl")
    return {(step["epoch"], step["step"]): step for step in map(json.loads, lines)}


def behind_gate(train: Submitter, run_id: str) -> dict[str, str]:
    """Settings of Spark with which the ranks of a gated model wait for `kill_an_executor`."""
    return {"spark__executorEnv__TEST_GATE": str(_gate(train.folder, run_id))}


def _gate(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}-may-go-on"


def kill_an_executor(mark: str, train: Submitted, workdir: str | Path, run_id: str) -> None:
    """Once there is a checkpoint, and steps behind it, where both ranks wait."""
    events = f"runs/{run_id}/events.jsonl"
    until(lambda: any(b'"train.checkpoint"' in line for line in read_lines(open_store(str(workdir)), events)), train)
    until(lambda: len(steps_of(workdir, run_id)) > _STEPS_BEFORE, train)
    os.kill(executors(mark)[-1], signal.SIGKILL)
    _gate(train.folder, run_id).touch()


def check_it_went_on(workdir: str | Path, run_id: str, launcher: str, undisturbed: Steps) -> None:
    """With the rank that was left, as the same training."""
    there = summary_of(workdir, run_id)["train"]
    [restart] = there["restarts"]
    assert re.search(r"rank [01] \(host |rank [01] on ", restart["cause"]), restart
    assert (there["launcher"], there["world_size"], restart["world_size"]) == (launcher, 1, 1)
    assert there["resumed_from"] is not None
    after = steps_of(workdir, run_id)
    assert list(after) == list(undisturbed)
    for place, step in undisturbed.items():
        assert after[place]["sample_ids"] == step["sample_ids"]
        loss = float.fromhex(after[place]["loss_hex"])
        assert loss == pytest.approx(float.fromhex(step["loss_hex"]), rel=1e-5)
