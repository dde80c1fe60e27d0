"""Garbage collection: what it deletes, what it must keep, and what stops it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset import commit
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.leases import reading, writing
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.gc import GcReport, Retention, as_ranges, collect_garbage, numbers_of, plan_gc
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import CommitConflict, IntegrityError, UsageError
from shardmill.failpoints import FAILPOINTS, VARIABLE
from shardmill.storage import TEMPORARY_PREFIX
from shardmill.stores import open_store
from tests.lab.datasets import build_here
from tests.lab.scale import usually
from tests.polling import polled
from tests.services.faulty_store import FaultyStore
from tests.services.s3 import s3_client
from tests.shardmill.collecting import build, config_of, files_of, gc_now, leave_orphans, read_all, with_images

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


@pytest.mark.starts("program")
@pytest.mark.parametrize("point", ["manifest_put", "post_commit", "gc_delete:1", "gc_delete:5"])
def test_a_killed_gc_harms_nothing_and_is_finished_by_the_next(folder: Path, point: str):
    assert point.partition(":")[0] in FAILPOINTS
    for image_size in (8, 9, 10):
        root = build(folder, image_size)
    leave_orphans(folder, 11)
    command = [sys.executable, "-m", "tests.programs.collect_garbage", root, "2"]

    def look() -> None:
        for uri in (root, f"{root}@2"):
            read_all(open_dataset(uri))

    with polled(look):
        killed = subprocess.run(command, cwd=ROOT, env={**os.environ, VARIABLE: point}, check=False, timeout=300)
        assert killed.returncode == -9
        for version in (2, 3, latest_version(open_store(root))):
            verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()
        # Its lease is live, for all that the next one can know; it is deleted here instead of waiting for it to lapse.
        [lease] = Path(root, "leases").iterdir()
        with pytest.raises(CommitConflict, match="if it was killed"):
            gc_now(root, keep=2)
        lease.unlink()
        gc_now(root, keep=2)
    assert not plan_gc(open_store(root), Retention(2, 0.0), time.time()).garbage
    with pytest.raises(UsageError, match="has expired"):
        open_dataset(f"{root}@1")
    for version in range(2, latest_version(open_store(root)) + 1):
        verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()


def test_what_did_not_expire_by_the_commit_is_not_deleted_after_it(folder: Path, faulty: dict):
    for image_size in (8, 9, 10):
        root = build(folder, image_size)
    store = open_store(f"faulty://{root}")
    with ExitStack() as stack:
        reader = stack.enter_context(ExitStack())
        reader.enter_context(reading(store, 1, "train"))

        def end_the_reader_first(at: FaultyStore, path: str, data: bytes) -> bool:
            reader.close()
            return at.sound.put_if_absent(path, data)

        faulty["put_if_absent"] = end_the_reader_first
        done = collect_garbage(store, Retention(1, older_than_seconds=0.0), "gc")
    assert (done.expired, done.retained) == ((2,), (1, 3, 4))
    verify_dataset(open_dataset(f"{root}@1"), deep=True).raise_if_failed()


@pytest.mark.parametrize("target", [".", "project", "other"])
def test_a_folder_that_is_no_dataset_is_left_as_it_is(tmp_path: Path, target: str):
    """Such as a project with a folder `rows` of its own, or the dataset's parent."""
    for name in ("project/rows/mine.txt", "project/shards/train/mine.txt", "project/.tmp-mine", "mine.txt"):
        Path(tmp_path, name).parent.mkdir(parents=True, exist_ok=True)
        Path(tmp_path, name).write_text("mine")
    before = files_of(str(tmp_path))
    for delete in (False, True):
        with pytest.raises((UsageError, IntegrityError), match="no dataset|not a committed dataset"):
            if delete:
                gc_now(str(tmp_path / target), keep=1)
            else:
                plan_gc(open_store(tmp_path / target), Retention(1, 0.0), time.time())
    assert files_of(str(tmp_path)) == before


@pytest.mark.parametrize("skew_seconds", [-86_400.0, 86_400.0])
def test_another_clock_than_the_store_s_changes_nothing(folder: Path, monkeypatch, skew_seconds: float):
    root = build(folder, 8)
    leave_orphans(folder, 9)
    store, clock = open_store(root), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + skew_seconds)
    with writing(store, "etl"), pytest.raises(CommitConflict, match="etl on .* is at work"):
        collect_garbage(store, Retention(None, older_than_seconds=3600.0), "gc")
    assert not collect_garbage(store, Retention(None, older_than_seconds=3600.0), "gc").garbage
    assert collect_garbage(store, Retention(None, older_than_seconds=0.0), "gc").garbage


@pytest.mark.parametrize("skew_seconds", [-86_400.0, 86_400.0])
def test_versions_are_in_the_order_of_their_commits_whatever_the_clock_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, skew_seconds: float
):
    clock = time.time

    class SkewedDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(seconds=skew_seconds)

    root = build(folder, 8)
    with monkeypatch.context() as skewed:
        skewed.setattr(time, "time", lambda: clock() + skew_seconds)
        skewed.setattr(commit, "datetime", SkewedDatetime)
        build(folder, 9)
    build(folder, 10)
    first, second, third = (open_dataset(f"{root}@{version}").manifest for version in (1, 2, 3))
    assert (second.created_at < first.created_at) == (skew_seconds < 0) and second.created_at != third.created_at
    assert [each.parent_version for each in (first, second, third)] == [None, 1, 2]
    assert open_dataset(root).manifest == third
    # Which ones are the newest two is no matter of the dates in them either.
    assert gc_now(root, keep=2).expired == (1,)
    for version in (2, 3):
        verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()


def test_gc_on_s3_also_aborts_uploads_that_were_killed(folder: Path, s3_bucket: str, s3_server: str):
    for image_size in (8, 9):
        build_here(str(folder / "images"), f"{s3_bucket}/dataset", config_of(image_size))
    bucket = s3_bucket.removeprefix("s3://")
    client = s3_client(s3_server)
    for key in ("dataset/shards/train/half.parquet", "other/half.parquet"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    done = gc_now(f"{s3_bucket}/dataset", keep=1)
    assert done.expired == (1,)
    assert {each.kind for each in done.garbage} == {"shards", "rows", "indexes", "unpublished"}
    [left] = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert left["Key"] == "other/half.parquet"
    verify_dataset(open_dataset(f"{s3_bucket}/dataset"), deep=True).raise_if_failed()
    found = {file.path for file in open_store(f"{s3_bucket}/dataset").list("")}
    assert not found & {each.file.path for each in done.garbage} and not any("leases/" in path for path in found)


def test_a_reader_that_came_just_before_the_expiry_keeps_its_files(folder: Path, faulty: dict):
    for image_size in (8, 9):
        root = build(folder, image_size)
    store = open_store(f"faulty://{root}")
    opened = open_dataset(f"{root}@1")
    with ExitStack() as reader:

        def begin_to_read_first(at: FaultyStore, path: str, data: bytes) -> bool:
            reader.enter_context(reading(at.sound, 1, "train"))
            return at.sound.put_if_absent(path, data)

        faulty["put_if_absent"] = begin_to_read_first
        done = collect_garbage(store, Retention(1, older_than_seconds=0.0), "gc")
        assert done.expired == (1,) and not done.garbage
        verify_dataset(opened, deep=True).raise_if_failed()
        with pytest.raises(UsageError, match="has expired"):
            open_dataset(f"{root}@1")
    assert {each.kind for each in gc_now(root, keep=1).garbage} == {"shards", "rows", "indexes"}
