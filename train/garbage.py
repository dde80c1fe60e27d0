"""Garbage collection of a models folder: old trainings and exports, and leftovers of killed processes.

Never deleted: the current export and those that rollbacks go back to, the newest export, the newest trainings, what a
kept one of them names, the history of the current export, and anything younger than the retention's age.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardmill.dataset.maintenance.gc import UNPUBLISHED, Garbage, Retention
from shardmill.errors import CommitConflict, IntegrityError, UsageError
from shardmill.failpoints import failpoint
from shardmill.jobs.reach import REACH, planted
from shardmill.storage import Store, StoredFile
from train.checkpoints.arrays import MARKER
from train.checkpoints.checkpoint import complete_checkpoints
from train.contracts.values import RESULT
from train.planning.trainings import FRESH, TRAININGS
from train.published.exported import ARTIFACTS, CURRENT, EXPORTS, Export, read_export, read_history
from train.records import record_numbers, record_path
from train.results import read_result

_FOLDERS = (TRAININGS, ARTIFACTS, EXPORTS, CURRENT, REACH)
_FIRST = rf"{TRAININGS}/[0-9a-f]+/v\d{{8}}-[0-9a-f]{{8}}/epochs-\d+-\w+"
# Every file below its folder is a training's: what `train` learns to keep there goes with it.
_TRAINING_FILE = re.compile(rf"({_FIRST}(?:/{FRESH}-\d{{8}})?)/.+")
_FRESH_RECORD = re.compile(rf"({_FIRST})/{FRESH}/(\d{{8}})\.json")

Files = Mapping[str, list[StoredFile]]
"""Files by the folder of their training, their checkpoint, or their export."""


@dataclass(frozen=True, slots=True)
class ModelsReport:
    """The files that `collect_models` deleted, or would delete."""

    expired_exports: tuple[int, ...]
    retained_exports: tuple[int, ...]
    expired_trainings: tuple[str, ...]
    """Their folders, relative to the models' root."""
    retained_trainings: tuple[str, ...]
    garbage: tuple[Garbage, ...]
    """Items in the order of deletion: no remaining item refers to a deleted one."""


def is_models_root(store: Store) -> bool:
    """Whether this is a folder of trainings and exports."""
    return any(next(iter(store.list(folder)), None) is not None for folder in (EXPORTS, TRAININGS))


def plan_models(store: Store, retention: Retention, now: float) -> ModelsReport:
    """Return the files that `collect_models` would delete at the time `now`; changes nothing.

    Raises IntegrityError or UsageError if a record that says what is needed cannot be read: then nothing tells.
    """
    if not is_models_root(store):
        raise UsageError(f"{store.uri} holds no models", "expected a models folder or URI", "check the path")

    def is_old(file: StoredFile) -> bool:
        return now - file.mtime_ns / 1e9 > retention.older_than_seconds

    exports = [read_export(store.uri, number) for number in record_numbers(store, EXPORTS)]
    artifacts = _by_folder(store.list(ARTIFACTS), _matched(rf"({ARTIFACTS}/[^/]+)/.+"))
    trainings = _by_folder(store.list(TRAININGS), _training_of_file)

    # Choose: by number and age, but for what is needed.
    kept_exports = _kept_exports(store, exports, artifacts, retention, now)
    old_exports = [each for each in exports if each not in kept_exports]
    kept_trainings = _kept_trainings(store, trainings, kept_exports, retention, now)
    old_trainings = sorted(trainings.keys() - kept_trainings)

    # Delete: what makes a thing visible first, so that half of it never looks whole.
    garbage = [*_records(store, old_exports)]
    named = {each.record.artifact_dir for each in kept_exports}
    unnamed = (file for folder, files in artifacts.items() if folder not in named for file in files)
    garbage += [Garbage(ARTIFACTS, each) for each in unnamed if is_old(each)]
    for folder in old_trainings:
        garbage += [Garbage(TRAININGS, each) for each in sorted(trainings[folder], key=_deletion_order)]
    garbage += [Garbage("checkpoints", each) for each in _unfinished(trainings, kept_trainings) if is_old(each)]
    garbage += [Garbage(REACH, each) for each in store.list(REACH) if is_old(each)]
    garbage += [Garbage(UNPUBLISHED, e) for folder in _FOLDERS for e in store.list_unpublished(folder) if is_old(e)]
    return ModelsReport(
        tuple(each.number for each in old_exports),
        tuple(each.number for each in kept_exports),
        tuple(old_trainings),
        tuple(sorted(kept_trainings)),
        tuple(garbage),
    )


def collect_models(store: Store, retention: Retention) -> ModelsReport:
    """Delete what `retention` does not keep; returns what was done. Raises as `plan_models` does.

    Killed at any point, it is run again. Trainings hold no lease on a models folder: the age protects them. Raises
    CommitConflict (exit 6) if another run changes the current export meanwhile.
    """
    if not is_models_root(store):
        raise UsageError(f"{store.uri} holds no models", "expected a models folder or URI", "check the path")
    with planted(store) as nonce:
        # By the store's clock.
        stored = store.stat(nonce.path)
        assert stored is not None
        now = stored.mtime_ns / 1e9
        report = plan_models(store, retention, now)
        history = read_history(store)
        for each in report.garbage:
            if each.kind == EXPORTS and read_history(store) != history:
                raise CommitConflict(
                    f"another run has changed the current export of {store.uri}",
                    "expected it to stay unchanged while exports are deleted; no further export was deleted",
                    "run this again",
                )
            failpoint("gc_delete")
            (store.delete_unpublished(each.file) if each.kind == UNPUBLISHED else store.delete(each.file.path))
    return report


def _kept_exports(
    store: Store, exports: list[Export], artifacts: Files, retention: Retention, now: float
) -> list[Export]:
    if retention.keep is None:
        return exports
    history = read_history(store)
    if None in history.pointers:
        raise IntegrityError(
            f"a record in {store.uri}/{CURRENT} cannot be read",
            "the records name the exports that rollbacks need",
            "restore it from a backup; without --keep no export is deleted",
        )
    needed = {*history.stack, *(each.number for each in exports[-max(1, retention.keep) :])}
    is_young = {
        each.number: _age(artifacts.get(each.record.artifact_dir, []), now) <= retention.older_than_seconds
        for each in exports
    }
    return [each for each in exports if each.number in needed or is_young[each.number]]


def _kept_trainings(
    store: Store, trainings: Files, kept_exports: list[Export], retention: Retention, now: float
) -> set[str]:
    if retention.keep is None:
        return set(trainings)
    by_age = sorted(trainings, key=lambda folder: _age(trainings[folder], now))
    kept = {
        *by_age[: retention.keep],
        *(folder for folder in by_age if _age(trainings[folder], now) <= retention.older_than_seconds),
        *(each.record.training_dir for each in kept_exports),
    } & trainings.keys()
    # A training may name checkpoints of the shorter one that it continues, and that one those of another.
    waiting = list(kept)
    while waiting:
        needed = {path.partition("/checkpoints/")[0] for path in _checkpoints_named(store, waiting.pop())}
        waiting += needed & trainings.keys() - kept
        kept |= needed & trainings.keys()
    return kept


def _checkpoints_named(store: Store, folder: str) -> Iterator[str]:
    result = read_result(store, folder)
    if result is not None:
        yield from (result.checkpoint, result.last_checkpoint)
        return
    for found in complete_checkpoints(store, folder):
        if found.marker.progress.best is not None:
            yield found.marker.progress.best.checkpoint


def _unfinished(trainings: Files, kept: set[str]) -> Iterator[StoredFile]:
    """Of checkpoints without a marker in trainings that stay: their writer was killed."""
    for folder in kept:
        checkpoints = _by_folder(trainings[folder], _matched(rf"({re.escape(folder)}/checkpoints/[^/]+)/.+"))
        for path, files in checkpoints.items():
            if not any(file.path == f"{path}/{MARKER}" for file in files):
                yield from files


def _records(store: Store, exports: list[Export]) -> Iterator[Garbage]:
    for each in exports:
        file = store.stat(record_path(EXPORTS, each.number))
        if file is not None:
            yield Garbage(EXPORTS, file)


def _deletion_order(file: StoredFile) -> int:
    """The result, then what else an equal training would obey, then the files of checkpoints."""
    name = file.path.rpartition("/")[2]
    return 0 if name == RESULT else 2 if "/checkpoints/" in file.path and name != MARKER else 1


def _training_of_file(path: str) -> str | None:
    """The folder of the training that a file belongs to, which need not be the folder that it is in."""
    asked = _FRESH_RECORD.fullmatch(path)
    if asked:
        return f"{asked[1]}/{FRESH}-{asked[2]}"
    match = _TRAINING_FILE.fullmatch(path)
    return match[1] if match else None


def _matched(pattern: str) -> Callable[[str], str | None]:
    """The first group of the pattern in a path that matches it."""

    def folder_of(path: str) -> str | None:
        match = re.fullmatch(pattern, path)
        return match[1] if match else None

    return folder_of


def _by_folder(files: Iterable[StoredFile], folder_of: Callable[[str], str | None]) -> Files:
    found: defaultdict[str, list[StoredFile]] = defaultdict(list)
    for file in files:
        folder = folder_of(file.path)
        if folder is not None:
            found[folder].append(file)
    return found


def _age(files: list[StoredFile], now: float) -> float:
    """Seconds since the newest of them was written; infinite if there are none."""
    return now - max((file.mtime_ns / 1e9 for file in files), default=float("-inf"))
