"""Temporary folders go with their owner, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from shardmill.jobs.process import PREFIX, STALE_SECONDS, Scratch, private_temporary_folder, remove_stale


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(folder: Path) -> None:
    long_ago = folder.stat().st_mtime - 2 * STALE_SECONDS
    os.utime(folder, (long_ago, long_ago))


def test_everything_temporary_is_inside_and_goes_with_it(temporary):
    with private_temporary_folder() as folder:
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        assert os.environ["TMPDIR"] == str(folder)
        assert Path(tempfile.mkdtemp()).parent == folder
    assert tempfile.gettempdir() == str(temporary) and not list(temporary.iterdir())


@pytest.mark.starts("program")
def test_what_a_killed_owner_left_goes_with_the_next_and_nothing_else_does(temporary):
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.programs.own_a_temporary_folder"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None and owner.stdin is not None
    folder = Path(owner.stdout.readline().strip())
    age(folder)
    other = temporary / "somebody-elses"
    other.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(other)
    fresh = temporary / f"{PREFIX}not-locked-yet"
    fresh.mkdir()
    remove_stale()
    assert folder.exists()
    owner.kill()
    owner.communicate()
    remove_stale()
    assert not folder.exists()
    assert other.exists() and fresh.exists()


def test_after_remove_it_is_gone_also_if_another_thread_removes_it(temporary):
    scratch = Scratch()
    for number in range(2000):
        (scratch.path / f"{number}").touch()
    first = threading.Thread(target=scratch.remove)
    first.start()
    scratch.remove()
    assert not scratch.path.exists()
    first.join()
