"""Garbage collection: what nothing names goes; what a retained version, a reader or a record needs stays."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset.leases import reading, writing
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.gc import GcReport, collect_garbage, plan_gc
from shardmill.dataset.maintenance.retention import Retention, as_ranges, numbers_of
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import CommitConflict, IntegrityError, UsageError
from shardmill.storage import TEMPORARY_PREFIX
from shardmill.stores import open_store
from tests.lab.scale import usually
from tests.shardmill.collecting import build, files_of, gc_now, leave_orphans, read_all, with_images

ROOT = Path(__file__).parents[2]
_SEED = random.SystemRandom().randrange(2**32)
_NUM_STEPS = usually(8, 60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_images(tmp_path)


def test_a_dry_run_changes_nothing_and_says_what_would_go(folder: Path):
    for image_size in (8, 9, 10):
        root = build(folder, image_size)
    leave_orphans(folder, 11)
    Path(root, "shards", "train", f"{TEMPORARY_PREFIX}1234").write_bytes(b"half a shard")
    before = files_of(root)
    planned = plan_gc(open_store(root), Retention(keep=2, older_than_seconds=0.0), time.time())
    assert files_of(root) == before
    assert (planned.expired, planned.retained) == ((1,), (2, 3))
    kinds = {file.kind for file in planned.garbage}
    assert kinds == {"shards", "rows", "indexes", "pending", "unpublished"}
    assert planned.size_bytes == sum(Path(root, each.file.path).stat().st_size for each in planned.garbage)
    # Young files are left alone, and nothing expires unless a number is given.
    assert not plan_gc(open_store(root), Retention(keep=2), time.time()).expired
    assert not plan_gc(open_store(root), Retention(keep=2), time.time()).garbage
    assert not plan_gc(open_store(root), Retention(None, 0.0), time.time()).expired

    done = gc_now(root, keep=2)
    assert (done.expired, done.garbage) == (planned.expired, planned.garbage)
    assert before - files_of(root) == {each.file.path for each in done.garbage}
    assert files_of(root) - before == {"manifests/00000004.json", "committed/00000004.json"}


def test_a_folder_that_is_no_dataset_is_left_alone(tmp_path: Path, faulty: dict[str, Any]):
    written: list[str] = []
    faulty["put"] = lambda store, path, data: written.append(path)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "mine").write_bytes(b"x")
    store = open_store(f"faulty://{tmp_path}")
    with pytest.raises(IntegrityError, match="not a committed dataset"):
        collect_garbage(store, Retention(None, 0.0), "gc")
    with pytest.raises(IntegrityError, match="not a committed dataset"):
        plan_gc(store, Retention(None, 0.0), time.time())
    # Not even a lease is written.
    assert not written and files_of(str(tmp_path)) == {"shards/mine"}


def test_a_file_is_old_once_more_than_the_age_has_passed(folder: Path):
    root = build(folder, 8)
    orphan = Path(root, "shards", "orphan")
    orphan.write_bytes(b"x")
    os.utime(orphan, (1_000_000, 1_000_000))
    for now, is_garbage in ((1_000_099.5, False), (1_000_100.0, False), (1_000_100.5, True)):
        found = plan_gc(open_store(root), Retention(None, 100.0), now).garbage
        assert [each.file.path for each in found] == (["shards/orphan"] if is_garbage else [])


def test_an_expired_version_says_so_and_the_others_are_whole(folder: Path):
    for image_size in (8, 9, 10):
        root = build(folder, image_size)
    gc_now(root, keep=2)
    with pytest.raises(UsageError, match=r"@1 has expired.*a retained version"):
        open_dataset(f"{root}@1")
    assert Path(root, "manifests", "00000001.json").exists()
    latest = open_dataset(root)
    assert (latest.pin.version, latest.manifest.operation, latest.manifest.parent_version) == (4, "expire", 3)
    assert latest.manifest.content_digest == open_dataset(f"{root}@3").manifest.content_digest
    for version in (2, 3, 4):
        verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()
    # An expiry is no version of its own that would push another one out; and it is not forgotten by later builds.
    assert gc_now(root, keep=2) == GcReport((), (2, 3, 4), ())
    build(folder, 11)
    assert gc_now(root, keep=2).expired == (2,)
    for version in (1, 2):
        with pytest.raises(UsageError, match="has expired"):
            open_dataset(f"{root}@{version}")
    compact_dataset(open_dataset(root), "compacting")
    with pytest.raises(UsageError, match="has expired"):
        open_dataset(f"{root}@1")


def test_gc_refuses_beside_a_writer_and_changes_nothing(folder: Path):
    root = build(folder, 8)
    build(folder, 9)
    leave_orphans(folder, 10)
    before = files_of(root)
    with writing(open_store(root), "etl"):
        with pytest.raises(CommitConflict, match="etl on .* is at work"):
            gc_now(root, keep=1)
        assert {path for path in files_of(root) if not path.startswith("leases/")} == before


def test_records_of_a_run_that_can_be_resumed_keep_their_files(folder: Path):
    root = build(folder, 8)
    leave_orphans(folder, 9)
    young = Path(root, "pending")
    # The shards are old, the records are not: what a record names stays, whatever its age.
    hour_ago = time.time() - 3600
    for path in Path(root).rglob("*"):
        if path.is_file() and young not in path.parents:
            os.utime(path, (hour_ago, hour_ago))
    assert not collect_garbage(open_store(root), Retention(None, 600.0), "gc").garbage
    assert {file.kind for file in gc_now(root, None).garbage} == {"shards", "rows", "pending"}


def test_a_leased_version_stays_until_its_reader_has_ended(folder: Path):
    root = build(folder, 8)
    build(folder, 9)
    with reading(open_store(root), 1, "train"):
        dataset = open_dataset(f"{root}@1")
        assert gc_now(root, keep=1).expired == ()
        read_all(dataset)
    assert gc_now(root, keep=1).expired == (1,)


def test_numbers_and_ranges_are_the_same():
    rng = random.Random(_SEED)
    print(f"seed {_SEED}")
    for _ in range(50):
        numbers = {rng.randrange(1, 30) for _ in range(rng.randrange(20))}
        assert numbers_of(as_ranges(numbers)) == numbers
    assert [(each.first, each.last) for each in as_ranges([3, 1, 2, 7])] == [(1, 3), (7, 7)]


@contextmanager
def readers(root: str, seed: int) -> Iterator[list[int]]:
    """Threads that lease, open and read random versions until the work inside ends; yields how many they have read."""
    ended, read, problems = threading.Event(), [], []

    def read_on(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while not ended.is_set():
            version = rng.randint(1, latest_version(open_store(root)))
            try:
                with reading(open_store(root), version, "train"):
                    try:
                        dataset = open_dataset(f"{root}@{version}")
                    except UsageError:
                        continue  # it has expired
                    time.sleep(rng.random() * 0.2)
                    read_all(dataset)
                    read.append(version)
            except Exception as error:  # whatever it is, the test must show it
                problems.append(error)
                return

    threads = [threading.Thread(target=read_on, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield read
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not problems, problems


def test_random_commits_and_collections_never_harm_a_reader(folder: Path):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    root, image_size = build(folder, 8), 8
    store = open_store(root)
    expired: set[int] = set()
    with readers(root, _SEED) as read:
        for _ in range(_NUM_STEPS):
            step = rng.choice(["build", "build", "compact", "orphans", "gc", "gc"])
            if step == "build":
                image_size += 1
                build(folder, image_size)
            elif step == "compact":
                compact_dataset(open_dataset(root), "compacting")
            elif step == "orphans":
                leave_orphans(folder, image_size + 1)
            else:
                expired |= set(gc_now(root, rng.choice([None, 1, 2, 3])).expired)
    assert read
    # Nobody reads any more: one more collection leaves exactly what the retained versions name, and every manifest.
    expired |= set(gc_now(root, 2).expired)
    named = set()
    for version in range(1, latest_version(store) + 1):
        named |= {f"manifests/{version:08d}.json", f"committed/{version:08d}.json"}
        if version in expired:
            with pytest.raises(UsageError, match="has expired"):
                open_dataset(f"{root}@{version}")
            continue
        dataset = open_dataset(f"{root}@{version}")
        verify_dataset(dataset, deep=True).raise_if_failed()
        segments = (*dataset.manifest.index_segments, *dataset.manifest.ledger_segments)
        named |= {segment.path for segment in segments}
        named |= {path for shard in dataset.shards for path in (shard.path, shard.rows_path)}
    assert files_of(root) == named
