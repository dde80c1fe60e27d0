"""Garbage collection under faults: killed, raced, with a wrong clock, in a wrong folder, on S3."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from shardmill.dataset import commit
from shardmill.dataset.leases import reading, writing
from shardmill.dataset.maintenance.gc import collect_garbage, plan_gc
from shardmill.dataset.maintenance.retention import Retention
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import CommitConflict, IntegrityError, UsageError
from shardmill.failpoints import FAILPOINTS, VARIABLE
from shardmill.stores import open_store
from tests.lab.datasets import build_here
from tests.polling import polled
from tests.services.faulty_store import FaultyStore
from tests.services.s3 import s3_client
from tests.shardmill.collecting import build, config_of, files_of, gc_now, leave_orphans, read_all, with_images

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_images(tmp_path)


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
def test_another_clock_than_the_store_s_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, skew_seconds: float
):
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
