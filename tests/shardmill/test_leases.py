"""Leases: who may write and until when; a writer that was away too long is fenced off."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import pytest

from shardmill.dataset import leases
from shardmill.dataset.commit import publish
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.index import write_index
from shardmill.dataset.leases import (
    LEASES,
    TTL_SECONDS,
    Clock,
    Collector,
    Lease,
    LeaseKind,
    alone,
    collecting,
    list_leases,
    reading,
    writing,
)
from shardmill.dataset.maintenance import gc
from shardmill.dataset.maintenance.gc import Retention, collect_garbage, plan_gc
from shardmill.dataset.manifest import child_of
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import COMMITTED, latest_version
from shardmill.errors import CommitConflict, ShardmillError, StorageError
from shardmill.failpoints import VARIABLE
from shardmill.storage import StoredFile
from shardmill.stores import open_store
from tests.lab.clock import SetClock
from tests.lab.datasets import build_here, write_images
from tests.programs import write_a_version
from tests.services.faulty_store import FaultyStore
from tests.shardmill.collecting import build, config_of, files_of, gc_now, leave_orphans, with_images

ROOT = Path(__file__).parents[2]


def live(root: Path) -> list[Lease]:
    return [lease for lease in list_leases(open_store(root), time.time()) if lease.is_live]


def test_gc_and_a_writer_exclude_each_other_and_writers_do_not(tmp_path: Path):
    store = open_store(tmp_path)
    with writing(store, "etl one"), writing(store, "etl two"):
        with pytest.raises(CommitConflict, match="etl (one|two) on .* is at work"), collecting(store, "gc"):
            raise AssertionError("gc began beside writers")
        assert {lease.kind for lease in live(tmp_path)} == {LeaseKind.WRITER}
    with collecting(store, "gc one"):
        with pytest.raises(CommitConflict, match="gc one"), collecting(store, "gc two"):
            raise AssertionError("two gc at once")
        with pytest.raises(CommitConflict, match="gc one"), writing(store, "etl"):
            raise AssertionError("a writer began beside gc")
        with reading(store, 3, "train"):
            assert [lease.version for lease in live(tmp_path) if lease.kind == LeaseKind.READER] == [3]
    assert not live(tmp_path) and not list(store.list(LEASES))


def test_a_lease_is_renewed_for_as_long_as_the_work_lasts(tmp_path: Path, faulty: dict):
    set_clock, renewals = SetClock(), list[str]()

    def renew(at: FaultyStore, path: str, data: bytes) -> None:
        at.sound.put(path, data)
        renewals.append(path)

    faulty["put"] = renew
    clock = Clock(set_clock.now, set_clock.wait)
    with writing(open_store(f"faulty://{tmp_path}"), "etl", clock=clock) as lease:
        num_before = len(renewals)
        for _ in range(8):
            set_clock.advance(TTL_SECONDS / 4)
        lease.check()
        set_clock.advance(0)
        assert len(renewals) - num_before == 8


@pytest.mark.drill
def test_a_lease_is_renewed_in_real_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Renewals are frequent, so that some are seen, and the lease is longer than a machine pauses.
    monkeypatch.setattr(leases, "_RENEWALS_PER_TTL", 1200)
    with writing(open_store(tmp_path), "etl", ttl_seconds=240) as lease:
        for _ in range(3):
            before = (tmp_path / lease.path).stat().st_mtime_ns
            while (tmp_path / lease.path).stat().st_mtime_ns == before:
                time.sleep(0.01)
        lease.check()
        assert len(live(tmp_path)) == 1


@pytest.mark.starts("program")
def test_a_killed_writer_s_lease_lapses(tmp_path: Path):
    command = [sys.executable, "-m", "tests.programs.hold_a_lease", tmp_path]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"held\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    with pytest.raises(CommitConflict, match="if it was killed"), collecting(open_store(tmp_path), "gc"):
        raise AssertionError("the lease was live")
    [lease] = live(tmp_path)
    long_ago = time.time() - TTL_SECONDS - 1
    os.utime(tmp_path / lease.path, (long_ago, long_ago))
    with collecting(open_store(tmp_path), "gc") as collector:
        assert collector.fenced == {lease.path}


def test_a_writer_that_could_not_renew_its_lease_does_not_commit(tmp_path: Path, faulty: dict):
    set_clock = SetClock()
    clock = Clock(set_clock.now, set_clock.wait)
    with writing(open_store(f"faulty://{tmp_path}/dataset"), "etl", clock=clock) as lease:
        lease.check()

        def refuse(*arguments: object) -> None:
            raise StorageError("the disk is away")

        faulty["put"] = refuse
        for _ in range(5):
            set_clock.advance(TTL_SECONDS / 4)
        with pytest.raises(CommitConflict, match="not renewed"):
            lease.check()
        # A later renewal does not undo what `gc` may have done meanwhile.
        faulty.clear()
        with pytest.raises(CommitConflict, match="not renewed"):
            lease.renew()
        with pytest.raises(CommitConflict, match="not renewed"):
            lease.check()


def test_gc_looks_twice_and_never_forgets_a_writer_that_had_lapsed(tmp_path: Path):
    store = open_store(tmp_path)
    with writing(store, "etl") as writer:
        os.utime(tmp_path / writer.path, (0, 0))
        with collecting(store, "gc") as collector:
            assert collector.fenced == {writer.path}
            os.utime(tmp_path / writer.path)
            with pytest.raises(CommitConflict, match="etl on .* is at work"):
                collector.look()
            store.delete(writer.path)
            with reading(store, 3, "train"):
                collector.look()
            assert (collector.fenced, collector.leased_versions) == ({writer.path}, {3})


def test_a_lapsed_lease_is_not_renewed_but_a_reader_s_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reader's keeps what has not expired meanwhile; `gc` may have deleted what a writer's protected."""
    store, waited = open_store(tmp_path), [time.time()]
    monkeypatch.setattr(time, "time", lambda: sum(waited))
    for held in (writing(store, "etl"), collecting(store, "gc"), reading(store, 1, "train")):
        with held as holder:
            lease = holder.lease if isinstance(holder, Collector) else holder
            assert lease is not None
            waited.append(TTL_SECONDS - 1)
            lease.renew()
            lease.check()
            waited.append(TTL_SECONDS + 1)
            if "reader" in lease.path:
                lease.renew()
                continue
            for refused in (lease.renew, lease.check):
                with pytest.raises(CommitConflict, match="was not renewed for 901 s"):
                    refused()


def test_a_renewer_outlives_faults_and_stops_for_good_when_its_lease_has_lapsed(tmp_path: Path, faulty: dict):
    set_clock, times = SetClock(), list[float]()

    def put(at: FaultyStore, path: str, data: bytes) -> None:
        times.append(set_clock.now())
        if len(times) in (3, 4):
            raise StorageError("the disk is away")
        at.sound.put(path, data)

    faulty["put"] = put
    clock = Clock(set_clock.now, set_clock.wait)
    with writing(open_store(f"faulty://{tmp_path}"), "etl", clock=clock) as lease:
        for _ in range(4):
            set_clock.advance(TTL_SECONDS / 4)
        set_clock.advance(0)
        lease.check()
        assert len(times) == 6
        set_clock.advance(TTL_SECONDS + 1)
        [renewer] = [each for each in threading.enumerate() if each.name == "shardmill-lease"]
        renewer.join(60)
        assert not renewer.is_alive() and len(times) == 6
        with pytest.raises(CommitConflict, match="not renewed"):
            lease.check()


def test_a_user_without_write_permission_can_still_read(tmp_path: Path, faulty: dict):
    def refuse(*arguments: object) -> None:
        raise StorageError("read-only")

    faulty["put"] = refuse
    with reading(open_store(f"faulty://{tmp_path}"), 1, "train") as lease:
        assert lease is None
    # An error inside is the reader's own.
    faulty.clear()
    with pytest.raises(StorageError, match="lost"), reading(open_store(f"faulty://{tmp_path}"), 1, "train"):
        raise StorageError("lost")
    assert not live(tmp_path)


def test_the_time_until_a_lease_lapses_is_its_own(tmp_path: Path):
    store = open_store(tmp_path)
    with writing(store, "etl", ttl_seconds=7200):
        with pytest.raises(CommitConflict) as caught, collecting(store, "gc"):
            raise AssertionError("gc began beside a writer")
        assert "lapses 7200 s after its last renewal" in caught.value.fix
        assert [lease.ttl_seconds for lease in live(tmp_path)] == [7200]


def test_a_lease_that_is_released_while_leases_are_listed_is_none(tmp_path: Path, faulty: dict):
    store = open_store(f"faulty://{tmp_path}")
    with writing(store, "first"), reading(store, 4, "gone"), writing(store, "third"):

        def gone(at: FaultyStore, path: str) -> bytes:
            data = at.sound.read(path)
            if b"gone on" in data:
                raise FileNotFoundError(path)
            return data

        faulty["read"] = gone
        now = time.time() + 5
        found = list_leases(store, now)
        assert sorted(each.holder.split()[0] for each in found) == ["first", "third"]
        assert all(4 < each.age_seconds < 60 and each.ttl_seconds == TTL_SECONDS for each in found)
        faulty.clear()
        # One that nobody can read keeps `gc` away as a writer does.
        store.put(f"{LEASES}/damaged.json", b"?")
        [damaged] = [each for each in list_leases(store, now) if each.holder == "an unknown process"]
        assert (damaged.kind, damaged.version, damaged.ttl_seconds) == (LeaseKind.WRITER, None, TTL_SECONDS)


@pytest.mark.parametrize(("age_seconds", "is_live"), [(0.0, True), (10.0, True), (10.5, False)])
def test_a_lease_is_live_until_its_time_is_over(age_seconds: float, is_live: bool):
    assert Lease("leases/x", LeaseKind.WRITER, "x", None, age_seconds, 10.0, "x", 1).is_live == is_live


@pytest.mark.parametrize("is_renewed", [False, True])
def test_one_of_another_host_is_waited_for_until_it_lapses_or_is_seen_to_live(tmp_path: Path, is_renewed: bool):
    store, said, waited = open_store(tmp_path), list[str](), list[float]()
    other = tmp_path / "leases" / "writer-0.json"
    store.put("leases/writer-0.json", json.dumps(
        {"kind": "writer", "holder": "run r on elsewhere, process 1", "version": None, "ttl_seconds": 3000,
         "host": "elsewhere", "process": 1}
    ).encode())  # fmt: skip

    def wait(ended: threading.Event, seconds: float) -> bool:
        if seconds != 1.0:
            return ended.wait()
        waited.append(seconds)
        now = time.time() + (1000 if is_renewed else -1000 * len(waited))
        os.utime(other, (now, now))
        return False

    def enter() -> None:
        with alone(store, "run r", ttl_seconds=3000, on_wait=said.append, clock=Clock(wait=wait)):
            pass

    if is_renewed:
        with pytest.raises(CommitConflict, match="run r on elsewhere, process 1 is at work"):
            enter()
    else:
        enter()
    assert len(waited) == (1 if is_renewed else 3) and len(said) == 1
    assert not [file for file in store.list("leases") if file.path != "leases/writer-0.json"]


def test_of_this_host_it_is_known_whether_a_process_lives(tmp_path: Path):
    store = open_store(tmp_path)
    for process_id, is_refused in ((2**22 + 1, False), (os.getpid(), True)):
        body = {"kind": "writer", "holder": "run r", "version": None, "ttl_seconds": 30}
        body |= {"host": socket.gethostname(), "process": process_id}
        store.put("leases/writer-0.json", json.dumps(body).encode())
        with pytest.raises(CommitConflict) if is_refused else nullcontext():
            with alone(store, "run r", ttl_seconds=30, on_wait=pytest.fail):
                pass


OPERATIONS = ["etl", "append", "compact", "rollback"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two versions of many small shards, and images to append."""
    for image_size in (8, 9):
        build(with_images(tmp_path), image_size)
    write_images(tmp_path / "tuesday", num_images=12, num_classes=2, seed=1)
    for number in range(2):
        (tmp_path / "tuesday" / f"class_{number}").rename(tmp_path / "tuesday" / f"other_{number}")
    return tmp_path


def lapse(root: str) -> None:
    """Of the one writer."""
    [lease] = Path(root, LEASES).glob("writer-*")
    hour_ago = time.time() - 3600
    os.utime(lease, (hour_ago, hour_ago))


def renew(root: str) -> None:
    """What a renewer's request does that was sent before its process was suspended, and arrives now."""
    for lease in Path(root, LEASES).glob("writer-*"):
        os.utime(lease)


Put = Callable[[], bool]


def interrupted(folder: Path, operation: str, faulty: dict, meanwhile: Callable[[Put], None]) -> tuple[int, str]:
    """The operation; `meanwhile` happens between the check of its lease and the PUT of its manifest, which it is given.

    -> how a command would end.
    """

    def put_if_absent(at: FaultyStore, path: str, data: bytes) -> bool:
        put = cache(lambda: at.sound.put_if_absent(path, data))
        del faulty["put_if_absent"]
        meanwhile(put)
        return put()

    faulty["put_if_absent"] = put_if_absent
    try:
        write_a_version.write_version(folder, operation, f"faulty://{folder / 'dataset'}")
    except ShardmillError as error:
        return error.exit_code, str(error)
    return 0, ""


def all_whole(root: str) -> None:
    newest = open_dataset(root)
    for version in range(1, newest.pin.version + 1):
        if not newest.manifest.has_expired(version):
            verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_gc_has_deleted_is_in_no_version(folder: Path, operation: str, keep: int | None, faulty: dict):
    root = str(folder / "dataset")

    def collect(put: Put) -> None:
        with pytest.raises(CommitConflict, match="is at work"):
            gc_now(root, keep)
        lapse(root)
        before = files_of(root)
        done = gc_now(root, keep)
        assert done.garbage and {each.file.path for each in done.garbage} <= before
        assert not list(Path(root, LEASES).glob("*"))

    exit_code, said = interrupted(folder, operation, faulty, collect)
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


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_writer_whose_lapsed_lease_is_renewed_while_gc_begins_ends_gc_or_is_fenced(
    folder: Path, operation: str, keep: int | None, faulty: dict
):
    """Whichever two of gc's listings the renewal falls between."""
    root = str(folder / "dataset")
    outcomes: list[str] = []

    def renewed_after(listings: Iterator[int], at: FaultyStore, prefix: str) -> Iterator[StoredFile]:
        if prefix == LEASES and next(listings, None) is None:
            renew(root)
        return at.sound.list(prefix)

    def collect(put: Put) -> None:
        for num_listings in itertools.count(1):
            lapse(root)
            faulty["list"] = partial(renewed_after, iter(range(num_listings)))
            try:
                collect_garbage(open_store(f"faulty://{root}"), Retention(keep, older_than_seconds=0.0), "gc")
            except CommitConflict as error:
                assert "is at work" in str(error)
                outcomes.append("ended")
            else:
                outcomes.append("fenced")
                return
            finally:
                del faulty["list"]

    exit_code, said = interrupted(folder, operation, faulty, collect)
    all_whole(root)
    assert exit_code == (0 if operation == "append" else 6), said
    assert outcomes == ["ended", "fenced"]


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many as this holds have gone by while the process was suspended."""
    clock, gone = time.time, list[int]()
    monkeypatch.setattr(time, "time", lambda: clock() + 3600 * len(gone))
    return gone


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_writer_whose_lease_lapsed_before_its_last_check_publishes_nothing(
    folder: Path, operation: str, faulty: dict, hours: list[int]
):
    """However live the lease looks by then."""
    root = str(folder / "dataset")

    def suspended_once(method: str, at: FaultyStore, path: str, *data: bytes) -> object:
        if not hours and not path.startswith(LEASES) and list(Path(root).glob(f"{LEASES}/*")):
            hours.append(1)
        return getattr(at.sound, method)(path, *data)

    faulty.update({method: partial(suspended_once, method) for method in ("list", "put", "read", "stat")})
    with pytest.raises(CommitConflict, match="was not renewed for 36"):
        write_a_version.write_version(folder, operation, f"faulty://{root}")
    assert hours and latest_version(open_store(root)) == 2
    assert not list(Path(root, LEASES).glob("*"))


@pytest.mark.parametrize(
    ("keep", "lapses_before", "latest", "num_deleted"),
    [(1, "commit", 2, 0), (1, "second delete", 3, 1), (None, "second delete", 2, 1)],
)
def test_gc_whose_lease_has_lapsed_neither_commits_nor_deletes(
    folder: Path, keep: int | None, lapses_before: str, latest: int, num_deleted: int, faulty: dict, hours: list[int],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """A writer may have started meanwhile."""
    root = str(folder / "dataset")
    leave_orphans(folder, 11)
    monkeypatch.setattr(gc, "_NUM_DELETERS", 1)
    listed: list[str] = []
    deleted: list[str] = []

    def list_files(at: FaultyStore, prefix: str) -> Iterator[StoredFile]:
        listed.append(prefix)
        if lapses_before == "commit" and prefix == COMMITTED and listed.count(LEASES) == 2:
            hours.append(1)
        return at.sound.list(prefix)

    def delete(at: FaultyStore, path: str) -> None:
        if not path.startswith(LEASES):
            deleted.append(path)
            hours.append(1)
        at.sound.delete(path)

    faulty.update(list=list_files, delete=delete)
    with pytest.raises(CommitConflict, match="was not renewed for 36"):
        collect_garbage(open_store(f"faulty://{root}"), Retention(keep, older_than_seconds=-2.0), "gc")
    assert (latest_version(open_store(root)), len(deleted)) == (latest, num_deleted)
    all_whole(root)


@pytest.mark.parametrize("operation", ["etl", "append", "compact"])
def test_if_the_writer_commits_first_gc_deletes_nothing_of_it(folder: Path, operation: str, faulty: dict):
    root = str(folder / "dataset")

    def collect(put: Put) -> None:
        lapse(root)

        def let_it_go_on_first(at: FaultyStore, path: str, data: bytes) -> bool:
            assert put()
            return at.sound.put_if_absent(path, data)

        faulty["put_if_absent"] = let_it_go_on_first
        with pytest.raises(CommitConflict, match="version 3 was committed by run stopped"):
            collect_garbage(open_store(f"faulty://{root}"), Retention(None, older_than_seconds=0.0), "gc")
        del faulty["put_if_absent"]

    assert interrupted(folder, operation, faulty, collect) == (0, "")
    assert latest_version(open_store(root)) == 3
    all_whole(root)


@pytest.mark.parametrize("operation", ["etl", "compact"])
def test_a_commit_that_was_interrupted_does_not_arrive_behind_gc(folder: Path, operation: str, faulty: dict):
    late: list[Put] = []

    def interrupt(put: Put) -> None:
        late.append(put)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(folder, operation, faulty, interrupt)
    gc_now(str(folder / "dataset"), None)
    late[0]()
    all_whole(str(folder / "dataset"))


@pytest.mark.starts("program")
def test_a_suspended_process_may_be_continued_or_killed(folder: Path):
    """One that stops where its lease is checked and its manifest is not published."""
    root = str(folder / "dataset")
    command = [sys.executable, "-m", "tests.programs.write_a_version", folder, "compact"]
    environment = {**os.environ, VARIABLE: f"stop:manifest_put@{folder}/stopped"}
    planned = None
    for ending in (signal.SIGKILL, signal.SIGCONT):
        (folder / "stopped").unlink(missing_ok=True)
        writer = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            _, status = os.waitpid(writer.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), status
            lapse(root)
            if ending == signal.SIGKILL:
                writer.kill()
                writer.wait()
            before = latest_version(open_store(root))
            planned = plan_gc(open_store(root), Retention(None, 0.0), time.time())
            done = gc_now(root, None)
            assert {each.file.path for each in done.garbage} == {each.file.path for each in planned.garbage}
            assert any(each.kind == "leases" for each in done.garbage)
            # One version for each, and no more.
            assert not gc_now(root, None).garbage and latest_version(open_store(root)) == before + 1
            writer.send_signal(signal.SIGCONT)
            said, _ = writer.communicate(timeout=300)
        finally:
            writer.kill()
            writer.wait()
        if ending == signal.SIGCONT:
            assert writer.returncode == 6 and f"version {before + 1} was committed by run gc" in said, said
        all_whole(root)


@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=pytest.mark.starts("server"))])
def test_on_every_store_the_number_of_a_suspended_writer_is_taken(tmp_path: Path, place: str, request):
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
