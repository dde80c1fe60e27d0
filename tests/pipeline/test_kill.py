"""A run that is killed outright and started again ends as if it had not been, and its record has each step once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from subprocess import DEVNULL

import pytest

from tests.lab.commands import shardmill, start
from tests.lab.datasets import make_dataset

OPTIONS = (
    *("--set", "train.epochs=4", "--set", "train.global_batch_size=16", "--set", "train.checkpoint_every_steps=3"),
    *("--set", "train.record_samples=true", "--set", "train.model=small_cnn"),
)


def train(folder: Path, name: str) -> tuple[str, ...]:
    return (
        "train",
        "c.toml",
        *OPTIONS,
        "--workdir",
        "w",
        "--run-id",
        name,
        "--set",
        f"models.uri={folder}/models-{name}",
    )


def steps_of(folder: Path, name: str) -> list[dict]:
    file = folder / "w" / "runs" / name / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.drill
def test_killed_twice_is_as_good_as_never_killed(tmp_path: Path):
    uri = make_dataset(tmp_path, num_images=240, num_classes=3)
    (tmp_path / "c.toml").write_text(f'[dataset]\nuri = "{uri}"\n')
    whole = shardmill(*train(tmp_path, "whole"), "--json", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = json.loads(whole.stdout)["sections"]["train"]
    num_steps = expected["steps"]

    # Inside an epoch, between two checkpoints; then again, further on.
    for enough in (num_steps // 5, num_steps // 2):
        started = start(*train(tmp_path, "killed"), cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL)
        deadline = time.monotonic() + 90
        while len(steps_of(tmp_path, "killed")) < enough and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        summary = json.loads((tmp_path / "w/runs/killed/summary.json").read_text())
        # Nobody could write how it ended.
        assert (summary["status"], summary["exit_code"]) == ("running", None)

    last = shardmill(*train(tmp_path, "killed"), "--json", cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    found = json.loads(last.stdout)["sections"]["train"]
    assert found["resumed_from"] is not None
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["final_loss_hex"] == expected["final_loss_hex"]
    assert steps_of(tmp_path, "killed") == steps_of(tmp_path, "whole")
    assert len(steps_of(tmp_path, "whole")) == num_steps
