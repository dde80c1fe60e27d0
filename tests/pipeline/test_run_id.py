"""The names that a run may have, on every command and on the jobs; a named run records why it has no config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.train import train
from pipeline.config import load_for_dataset
from pipeline.tree import PipelineTree
from shardmill.errors import CommitConflict, UsageError
from shardmill.jobs.run_files import StageRecord
from shardmill.jobs.run_record import RunRecord, recording
from shardmill.stores import open_store
from tests.lab.commands import ENVIRONMENT, ROOT, in_process

BAD_RUN_IDS = [
    "../x", "..", ".", "/etc", "a/b", "a/../b", "a\\b", ".hidden", "~root", "C:x", "s3://b/x", "%2e%2e%2fx", "x\ty",
    "x\ny", "n" * 256, "\udce4",
]  # fmt: skip


@pytest.mark.parametrize("run_id", BAD_RUN_IDS)
def test_a_bad_run_id_is_a_usage_error(run_id: str, tmp_path: Path):
    with pytest.raises(UsageError, match="run id .*expected a name of at most 255 bytes.*give --run-id a name"):
        RunRecord(str(tmp_path), run_id)
    assert not list(tmp_path.iterdir())


@pytest.mark.starts("program")
def test_every_command_refuses_a_bad_run_id_before_it_works(tmp_path: Path):
    for command in ("run", "etl", "train", "compact", "gc", "inspect", "report", "doctor"):
        done = in_process(command, *([] if command == "report" else [str(tmp_path)]), "--run-id", "../x", cwd=tmp_path)
        assert done.returncode == 2 and "ERROR 2: run id '../x'; expected a name" in done.stderr, (command, done.stderr)
    job = [sys.executable, str(ROOT / "etl" / "job.py"), "--config", str(tmp_path / "none.toml"), "--run-id", "../x"]
    done = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 2 and "ERROR 2: run id '../x'" in done.stderr, done.stderr
    assert not list(tmp_path.parent.glob("x"))


def test_a_run_is_that_of_one_process_at_a_time(tmp_path: Path):
    with recording(RunRecord(str(tmp_path), "r")) as first:
        first.stage("etl", lambda: 1, lambda value: StageRecord(stage="etl"))
        with pytest.raises(CommitConflict, match="run 'r' of .* is at work in another process.*give another --run-id"):
            with recording(RunRecord(str(tmp_path), "r")) as second:
                second.stage("train", lambda: 2, lambda value: StageRecord(stage="train"))
        with recording(RunRecord(str(tmp_path), "another")):
            pass
    assert set(read_run(tmp_path, "r")["stages"]) == {"etl"}
    # Its next stage is another process's.
    with recording(RunRecord(str(tmp_path), "r")) as later:
        later.stage("train", lambda: 2, lambda value: StageRecord(stage="train"))
    assert set(read_run(tmp_path, "r")["stages"]) == {"etl", "train"}


@pytest.mark.starts("server")
def test_a_run_on_s3_is_that_of_one_process_at_a_time(s3_bucket: str):
    with recording(RunRecord(s3_bucket, "r")):
        with pytest.raises(CommitConflict, match="run r on .* is at work.*its lease .* lapses 30 s after"):
            with recording(RunRecord(s3_bucket, "r")):
                pass
    with recording(RunRecord(s3_bucket, "r")):
        pass
    assert not list(open_store(s3_bucket).list("running"))


def read_run(workdir: Path, run_id: str) -> dict[str, Any]:
    return json.loads((workdir / "runs" / run_id / "summary.json").read_text())


@pytest.mark.parametrize("is_named", [False, True])
def test_train_loads_its_config_once_and_records_for_who_named_the_run_that_it_cannot(
    is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded: list[str] = []

    def counted(named: str, overrides: tuple[str, ...], workdir: str) -> PipelineTree:
        loaded.append(named)
        return load_for_dataset(named, overrides, workdir)

    monkeypatch.setattr("pipeline.commands.stage.load_for_dataset", counted)
    options = [str(tmp_path / "c.toml"), "--workdir", str(tmp_path / "work"), *(["--run-id", "r"] if is_named else [])]
    with pytest.raises(SystemExit) as ended:
        train.main(options, standalone_mode=False)
    assert ended.value.code == 2
    assert (tmp_path / "work/runs/r/summary.json").exists() == is_named
    (tmp_path / "c.toml").write_text(f'[dataset]\nuri = "{tmp_path}/none"\n')
    with pytest.raises(SystemExit):
        train.main(options, standalone_mode=False)
    assert len(loaded) == 2
