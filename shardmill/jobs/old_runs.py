"""Old runs of a work directory, `WORKDIR/runs/<run id>`: which ones `gc` deletes, by number and age."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

from shardmill.dataset.maintenance.gc import Garbage, Retention
from shardmill.errors import CommitConflict
from shardmill.jobs.run_files import EVENTS, RUNS
from shardmill.jobs.run_record import alone_in_run
from shardmill.storage import Store, StoredFile


@dataclass(frozen=True, slots=True)
class RunsReport:
    """The runs that `collect_runs` deleted, or would delete."""

    expired: tuple[str, ...]
    retained: tuple[str, ...]
    garbage: tuple[Garbage, ...]


def is_workdir(store: Store) -> bool:
    """Whether runs have left their records here."""
    return any(True for _ in store.list(RUNS))


def plan_runs(store: Store, retention: Retention, now: float) -> RunsReport:
    """Return the runs that `collect_runs` would delete at the time `now`; changes nothing.

    The newest `retention.keep` stay, and those with a file younger than `retention.older_than_seconds`.
    """
    files, newest = defaultdict[str, list[StoredFile]](list), dict[str, float]()
    for file in store.list(RUNS):
        run_id = _run_of(file)
        files[run_id].append(file)
        newest[run_id] = max(newest.get(run_id, 0.0), file.mtime_ns / 1e9)
    # A folder without events is not of a run.
    runs = [each for each in files if any(file.path.startswith(f"{RUNS}/{each}/{EVENTS}") for file in files[each])]
    by_age = sorted(runs, key=lambda run_id: (newest[run_id], run_id), reverse=True)
    num_kept = len(by_age) if retention.keep is None else retention.keep
    expired = [each for each in by_age[num_kept:] if now - newest[each] > retention.older_than_seconds]
    garbage = [Garbage(RUNS, file) for each in expired for file in _in_deletion_order(files[each])]
    return RunsReport(tuple(expired), tuple(each for each in by_age if each not in expired), tuple(garbage))


def collect_runs(store: Store, retention: Retention) -> RunsReport:
    """Delete what `retention` does not keep, but for runs that are at work; returns what was done.

    Killed at any point, it is run again. Ages are by this machine's clock.
    """
    planned, deleted = plan_runs(store, retention, time.time()), dict[str, list[Garbage]]()
    for run_id, files in itertools.groupby(planned.garbage, lambda each: _run_of(each.file)):
        with suppress(CommitConflict, FileNotFoundError), alone_in_run(store, run_id):
            found = list(files)
            for each in found:
                store.delete(each.file.path)
            deleted[run_id] = found
    at_work = (each for each in planned.expired if each not in deleted)
    return RunsReport(tuple(deleted), (*at_work, *planned.retained), tuple(itertools.chain(*deleted.values())))


def _run_of(file: StoredFile) -> str:
    return file.path.split("/")[1]


def _in_deletion_order(files: list[StoredFile]) -> list[StoredFile]:
    """The records of stages first: half of a run never looks like one. Its events, which lock it, last."""
    return sorted(files, key=lambda file: (not file.path.endswith(".json"), f"/{EVENTS}" in file.path, file.path))
