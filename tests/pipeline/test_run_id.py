"""The names that a run may have, on every command and on the jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.run_record import RunRecord
from tests.pipeline.command import ENVIRONMENT, ROOT, shardmill

BAD_RUN_IDS = [
    "../x", "..", ".", "/etc", "a/b", "a/../b", "a\\b", ".hidden", "~root", "C:x", "s3://b/x", "%2e%2e%2fx", "x\ty",
    "x\ny", "n" * 256, "\udce4",
]  # fmt: skip


@pytest.mark.parametrize("run_id", BAD_RUN_IDS)
def test_a_bad_run_id_is_a_usage_error(run_id: str, tmp_path: Path):
    with pytest.raises(UsageError, match="run id .*expected a name of at most 255 bytes.*give --run-id a name"):
        RunRecord(str(tmp_path), run_id)
    assert not list(tmp_path.iterdir())


def test_every_command_refuses_a_bad_run_id_before_it_works(tmp_path: Path):
    for command in ("run", "etl", "train", "compact", "gc", "inspect", "report", "doctor"):
        done = shardmill(command, *([] if command == "report" else [str(tmp_path)]), "--run-id", "../x", cwd=tmp_path)
        assert done.returncode == 2 and "ERROR 2: run id '../x'; expected a name" in done.stderr, (command, done.stderr)
    job = [sys.executable, str(ROOT / "etl" / "job.py"), "--config", str(tmp_path / "none.toml"), "--run-id", "../x"]
    done = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 2 and "ERROR 2: run id '../x'" in done.stderr, done.stderr
    assert not list(tmp_path.parent.glob("x"))
