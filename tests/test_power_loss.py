"""The power is lost at any moment: what a commit or a checkpoint has said is there, whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import ShardmillError
from shardmill.stores import local, open_store
from shardmill.values import DatasetPin
from tests.lab.datasets import build_here, write_images
from tests.lab.power_loss import RecordedDisk
from tests.shardmill.collecting import config_of
from tests.train.checkpoints import write_checkpoint
from train.checkpoints.checkpoint import (
    AttemptRecord,
    CheckpointFolder,
    TrainingIdentity,
    claim_attempt,
    complete_checkpoints,
)
from train.contracts.values import ModelIdentity, Progress
from train.records import read_record, record_numbers

Returned = Callable[[int], None]
"""Called with the number of what is there from now on: a version, a step, a file."""
IDENTITY = TrainingIdentity(DatasetPin("u", 1, ""), "plan", ModelIdentity("", ""), {})


def commit_versions(work: Path, returned: Returned) -> None:
    write_images(work.parents[1] / "images", num_images=6)
    for version, image_size in enumerate((8, 9), 1):
        build_here(str(work.parents[1] / "images"), str(work), config_of(image_size))
        returned(version)


def newest_version(work: Path) -> int:
    latest = latest_version(open_store(work))
    for version in range(1, latest + 1):
        verify_dataset(open_dataset(f"{work}@{version}"), deep=True).raise_if_failed()
    return latest


def write_checkpoints(work: Path, returned: Returned) -> None:
    folder = CheckpointFolder(claim_attempt(open_store(work), "t", 1), keep_checkpoints=2)
    for step in range(1, 5):
        write_checkpoint(folder, step, IDENTITY, Progress())
        returned(step)


def newest_checkpoint(work: Path) -> int:
    store = open_store(work)
    found = list(complete_checkpoints(store, "t"))
    attempts = [
        read_record(store, "t/attempts", number, AttemptRecord) for number in record_numbers(store, "t/attempts")
    ]
    # Without its record the next attempt would take the same number, and the names of these files.
    assert len(attempts) == 1 or not found
    for checkpoint in found:
        checkpoint.verify(store, {file.path for file in checkpoint.marker.files})
    return found[0].marker.global_step if found else 0


def put_files(work: Path, returned: Returned) -> None:
    (work.parents[1] / "spooled").write_bytes(b"3")
    store = open_store(work)
    store.put("a/b/1", b"1")
    returned(1)
    assert store.put_if_absent("a/c/2", b"2")
    returned(2)
    store.put_file("d/3", work.parents[1] / "spooled")
    returned(3)


def newest_file(work: Path) -> int:
    store = open_store(work)
    found = {file.path.rpartition("/")[2]: store.read(file.path) for file in store.list("")}
    assert all(data.decode() == name for name, data in found.items()), found
    return max(map(int, found), default=0)


WORK: dict[str, tuple[Callable[[Path, Returned], None], Callable[[Path], int]]] = {
    "versions": (commit_versions, newest_version),
    "checkpoints": (write_checkpoints, newest_checkpoint),
    "files": (put_files, newest_file),
}
SYNCS = [(kind, f"put{how}") for kind in ("sync file", "sync folder") for how in ("", "_file", "_if_absent")]


@pytest.mark.parametrize("name", list(WORK))
def test_what_has_returned_is_there_after_any_loss_of_power_and_not_if_any_sync_is_left_out(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    do, newest = WORK[name]
    disk, work = RecordedDisk(tmp_path / "disk"), tmp_path / "disk" / "work"
    disk.root.mkdir()
    monkeypatch.setattr(local, "_synced_names", {})
    returns: list[tuple[int, int]] = [(0, 0)]
    with monkeypatch.context() as patched:
        disk.record(patched)
        # By another process, which has not synced their names.
        for folder in (work, work / "a", work / "manifests", work / "t"):
            os.mkdir(folder)
        do(work, lambda number: returns.append((len(disk.calls), number)))

    def first_loss(without: tuple[str, str] | None = None) -> str:
        for num_calls, files in disk.after_losses(without):
            last = disk.calls[num_calls - 1]
            found = found_in(frozenset(files.items()))
            promised = max(number for since, number in returns if since <= num_calls)
            if isinstance(found, str) or found < promised:
                return f"after {last}: {found} where {promised} was promised"
        return ""

    @cache
    def found_in(files: frozenset[tuple[Path, bytes]]) -> int | str:
        after = tmp_path / f"lost-{len(list(tmp_path.iterdir()))}"
        for path, data in files:
            (after / path).parent.mkdir(parents=True, exist_ok=True)
            (after / path).write_bytes(data)
        try:
            return newest(after / "work")
        except (ShardmillError, AssertionError) as error:
            return str(error)

    assert not first_loss()
    used = {(call.kind, call.by) for call in disk.calls if call.kind != "name"}
    assert used <= {*SYNCS, ("sync folder", "_sync_name")} and (name != "files" or len(used) == 7)
    for sync in sorted(used):
        assert first_loss(sync), sync
