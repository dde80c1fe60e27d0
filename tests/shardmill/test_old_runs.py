"""`gc WORKDIR` deletes old records of runs, never those of a run at work."""

import os
import time
from pathlib import Path

import pytest

from shardmill.dataset.maintenance.gc import Retention
from shardmill.jobs.old_runs import RunsReport, collect_runs, is_workdir, plan_runs
from shardmill.jobs.run_files import StageRecord
from shardmill.jobs.run_record import RunRecord, recording
from shardmill.stores import open_store
from tests.lab.commands import in_process

_HOUR = 3600.0


def run(workdir: Path, run_id: str, hours: float) -> None:
    """A run that ended so many hours ago."""
    with recording(RunRecord(str(workdir), run_id)) as record:
        record.stage("etl", lambda: 1, lambda _: StageRecord(stage="etl"))
    then = time.time() - hours * _HOUR
    for path in (workdir / "runs" / run_id).rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    for run_id, hours in (("a", 9), ("b", 5), ("c", 3), ("d", 1)):
        run(tmp_path, run_id, hours)
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/notes/mine.txt").touch()
    return tmp_path


def collect(workdir: Path, keep: int | None, hours: float) -> RunsReport:
    return collect_runs(open_store(workdir), Retention(keep, hours * _HOUR))


def left(workdir: Path) -> set[str]:
    return {each.name for each in (workdir / "runs").iterdir()}


@pytest.mark.parametrize(
    ("keep", "hours", "expired"),
    [(None, 0, ""), (1, 0, "cba"), (2, 0, "ba"), (2, 7, "a"), (1, 100, ""), (9, 0, "")],
)
def test_runs_beyond_the_newest_go_if_they_are_old(workdir: Path, keep: int | None, hours: float, expired: str):
    planned = plan_runs(open_store(workdir), Retention(keep, hours * _HOUR), time.time())
    assert "".join(planned.expired) == expired and left(workdir) == {*"abcd", "notes"}
    assert collect(workdir, keep, hours) == planned
    assert left(workdir) == {*"abcd", "notes"} - {*expired}


def test_a_run_at_work_stays_however_old_it_is(workdir: Path):
    with recording(RunRecord(str(workdir), "a")) as at_work:
        old = time.time() - 99 * _HOUR
        for path in (workdir / "runs/a").rglob("*"):
            os.utime(path, (old, old))
        found = collect(workdir, 1, 0)
        assert (found.expired, found.retained) == (("c", "b"), ("a", "d"))
        at_work.event("still", {})
    assert left(workdir) == {"a", "d", "notes"}


def test_the_command_lists_and_then_deletes(workdir: Path):
    assert is_workdir(open_store(workdir)) and not is_workdir(open_store(workdir / "runs"))
    listed = in_process("gc", str(workdir), "--keep", "1", "--older-than", "2h", cwd=workdir)
    assert "runs to delete" in listed.stdout and left(workdir) == {*"abcd", "notes"}, listed.stderr
    done = in_process("gc", str(workdir), "--keep", "1", "--older-than", "2h", "--delete", "--json", cwd=workdir)
    assert '"expired_runs": [' in done.stdout and "expired_exports" not in done.stdout, done.stderr
    assert left(workdir) == {"d", "notes"}
