"""All stages of a run work on the version that its `verify` has checked, also if a newer one is there by then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab.commands import in_process
from tests.lab.datasets import make_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With two versions, the second of which has lost a shard, and a config."""
    make_dataset(tmp_path, num_images=60)
    first = set((tmp_path / "dataset").rglob("shards/*/*"))
    make_dataset(tmp_path, num_images=90)
    for shard in set((tmp_path / "dataset").rglob("shards/*/*")) - first:
        shard.unlink()
    (tmp_path / "c.toml").write_text(
        f'[dataset]\nuri = "{tmp_path}/dataset"\n[train]\nepochs = 1\nglobal_batch_size = 16\n'
    )
    return tmp_path


def run(folder: Path, command: str, *arguments: str, expected: int = 0) -> str:
    done = in_process(command, "c.toml", "--workdir", "work", "--run-id", "r", *arguments, cwd=folder)
    assert done.returncode == expected, done.stderr
    return done.stderr


def summary(folder: Path) -> dict:
    return json.loads((folder / "work/runs/r/summary.json").read_text())


@pytest.mark.timeout(300)
def test_a_version_that_verify_was_given_is_checked_trained_on_and_evaluated(folder: Path):
    run(folder, "verify", expected=3)
    run(folder, "verify", "--dataset-version", "1")
    assert summary(folder)["dataset"]["version"] == 1
    run(folder, "train")
    run(folder, "gate")
    run(folder, "evaluate")
    found = summary(folder)
    assert (found["dataset"]["version"], found["exit_code"]) == (1, 0)
    [training] = (folder / "work/models/trainings").rglob("result.json")
    assert training.parents[1].name.startswith("v00000001-")
    # Asked again, without a version, the check is of the latest: an earlier answer is not repeated.
    run(folder, "verify", expected=3)


def test_an_invalid_version_is_named_in_the_error(folder: Path):
    assert "has no version 7" in run(folder, "verify", "--dataset-version", "7", expected=2)
    assert "--dataset-version" in run(folder, "verify", "--dataset-version", "-1", expected=2)
    done = in_process("verify", f"{folder}/dataset", "--dataset-version", "1", "--json", cwd=folder)
    assert (done.returncode, json.loads(done.stdout)["version"]) == (0, 1)
