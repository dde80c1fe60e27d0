"""Planted secrets: every file that a run leaves and all that it prints is searched for them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.canaries import files_with_canaries, write_config
from tests.lab.commands import in_process, last_line


@pytest.mark.parametrize("command", ["run", "etl", "train", "config show", "config show --json"])
def test_a_run_that_ends_early_leaves_no_secret(command: str, tmp_path: Path):
    file = write_config(tmp_path)
    before = os.umask(0o027)
    try:
        done = in_process(*command.split(), file, "--workdir", tmp_path / "work", "--debug", cwd=tmp_path)
    finally:
        os.umask(before)
    assert done.returncode == (0 if "show" in command else 2), done.stderr
    assert "canary" not in (done.stdout + done.stderr).lower()
    (tmp_path / "work").mkdir(exist_ok=True)
    assert files_with_canaries(tmp_path / "work") == []
    # Who may read it is for the umask to say, the same for every file.
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert modes <= {0o640}


def test_a_wrong_setting_is_named_without_its_value(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text('[spark.etl]\nconf = "password=canary"\n[train]\nauth_token = "canary"\n')
    done = in_process("run", file, "--set", "train.api_key=canary", cwd=tmp_path)
    assert done.returncode == 2 and last_line(done).startswith("ERROR 2:")
    assert "canary" not in done.stderr + done.stdout
