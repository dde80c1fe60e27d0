"""A writer that is suspended just before its commit, while gc works: no version ever names a file that is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardmill.dataset.commit import publish
from shardmill.dataset.index import write_index
from shardmill.dataset.leases import LEASES
from shardmill.dataset.maintenance.child import child_of
from shardmill.dataset.maintenance.gc import collect_garbage, plan_gc
from shardmill.dataset.maintenance.retention import Retention
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import CommitConflict
from shardmill.failpoints import VARIABLE
from shardmill.stores import open_store
from tests.lab.datasets import build_here, write_images
from tests.programs import write_a_version
from tests.services.faulty_store import FaultyStore
from tests.shardmill.collecting import build, config_of, files_of, gc_now, with_images

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two versions of many small shards, and images to append."""
    for image_size in (8, 9):
        build(with_images(tmp_path), image_size)
    write_images(tmp_path / "tuesday", num_images=12, num_classes=2, seed=1)
    for number in range(2):
        (tmp_path / "tuesday" / f"class_{number}").rename(tmp_path / "tuesday" / f"other_{number}")
    return tmp_path


@contextmanager
def suspended(folder: Path, operation: str) -> Iterator[subprocess.Popen[str]]:
    """A writer that has checked its lease, and has not committed yet. The lease has lapsed since."""
    command = [sys.executable, "-m", "tests.programs.write_a_version", folder, operation]
    environment = {**os.environ, VARIABLE: f"stop:manifest_put@{folder}/stopped"}
    writer = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        with pytest.raises(CommitConflict, match="is at work"):
            gc_now(str(folder / "dataset"), None)
        [lease] = (folder / "dataset" / "leases").iterdir()
        hour_ago = time.time() - 3600
        os.utime(lease, (hour_ago, hour_ago))
        yield writer
    finally:
        writer.kill()
        writer.wait()


def go_on(writer: subprocess.Popen[str]) -> tuple[int, str]:
    writer.send_signal(signal.SIGCONT)
    said, _ = writer.communicate(timeout=120)
    return writer.returncode, said


def all_whole(root: str) -> None:
    newest = open_dataset(root)
    for version in range(1, newest.pin.version + 1):
        if not newest.manifest.has_expired(version):
            verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("operation", ["etl", "append", "compact", "rollback"])
def test_what_gc_has_deleted_is_in_no_version(folder: Path, operation: str, keep: int | None):
    root = str(folder / "dataset")
    with suspended(folder, operation) as writer:
        before = files_of(root)
        done = gc_now(root, keep)
        assert done.garbage and {each.file.path for each in done.garbage} <= before
        assert not list(Path(root, "leases").glob("*"))
        exit_code, said = go_on(writer)
    # An append goes on behind the version of gc, with units of its own that are there.
    expected = (0, "") if operation == "append" else (6, "version 3 was committed by run gc")
    assert exit_code == expected[0] and expected[1] in said, said
    assert open_dataset(f"{root}@3").manifest.operation == "expire"
    all_whole(root)
    # The same command again, which has nothing to do after an append.
    again = write_a_version.main(folder, operation)
    assert again == (2 if operation == "rollback" and keep == 1 else 0)
    all_whole(root)
    assert not plan_gc(open_store(root), Retention(None, 0.0), time.time()).garbage


@pytest.mark.parametrize("operation", ["etl", "append", "compact"])
def test_if_the_writer_commits_first_gc_deletes_nothing_of_it(folder: Path, operation: str, faulty: dict):
    root = str(folder / "dataset")
    with suspended(folder, operation) as writer:
        ended: list[int] = []

        def let_it_go_on_first(at: FaultyStore, path: str, data: bytes) -> bool:
            ended.append(go_on(writer)[0])
            return at.sound.put_if_absent(path, data)

        faulty["put_if_absent"] = let_it_go_on_first
        with pytest.raises(CommitConflict, match="version 3 was committed by run stopped"):
            collect_garbage(open_store(f"faulty://{root}"), Retention(None, older_than_seconds=0.0), "gc")
        assert ended == [0]
    assert latest_version(open_store(root)) == 3
    all_whole(root)


def test_a_killed_writer_costs_one_version_and_no_more(folder: Path):
    root = str(folder / "dataset")
    with suspended(folder, "etl"):
        pass
    planned = plan_gc(open_store(root), Retention(None, 0.0), time.time())
    done = gc_now(root, None)
    assert {each.file.path for each in done.garbage} == {each.file.path for each in planned.garbage}
    assert any(each.kind == "leases" for each in done.garbage)
    assert latest_version(open_store(root)) == 3
    assert not gc_now(root, None).garbage and latest_version(open_store(root)) == 3
    all_whole(root)


@pytest.mark.parametrize("place", ["local", "s3"])
def test_on_every_store_the_number_of_a_suspended_writer_is_taken(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
):
    root = f"{request.getfixturevalue('s3_bucket')}/dataset" if place == "s3" else str(tmp_path / "dataset")
    build_here(str(with_images(tmp_path) / "images"), root, config_of(8))
    store, dataset = open_store(root), open_dataset(root)
    # The lease of a writer that has checked it, an index of its own, and the manifest that it is about to put.
    store.put(
        f"{LEASES}/writer-suspended.json",
        json.dumps({"kind": "writer", "holder": "etl", "version": None, "ttl_seconds": -2.0}).encode(),
    )
    index = write_index(store, reversed(dataset.shards))
    draft = child_of(dataset.manifest, "compact", "suspended", content=dataset.manifest, index_segments=index)
    done = gc_now(root, None)
    assert {each.file.path for each in done.garbage} == {f"{LEASES}/writer-suspended.json", index[0].path}
    draft = draft.model_copy(update={"layout_digest": "0" * 64})
    with pytest.raises(CommitConflict, match="version 2 was committed by run gc"):
        publish(store, draft)
    verify_dataset(open_dataset(root), deep=True).raise_if_failed()
