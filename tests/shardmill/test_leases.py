"""Leases: gc and writers never work at once, and a lease ends with its holder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

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
from shardmill.errors import CommitConflict, StorageError
from shardmill.stores import open_store
from tests.lab.clock import SetClock
from tests.services.faulty_store import FaultyStore

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
def test_a_lease_is_renewed_in_real_time(tmp_path: Path):
    with writing(open_store(tmp_path), "etl", ttl_seconds=3) as lease:
        time.sleep(7)
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
    store, clock, waited = open_store(tmp_path), time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: clock() + sum(waited))
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
                with pytest.raises(CommitConflict, match="was not renewed for 90"):
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
    assert Lease("leases/x", LeaseKind.WRITER, "x", None, age_seconds, 10.0).is_live == is_live


@pytest.mark.parametrize("is_renewed", [False, True])
def test_one_of_another_host_is_waited_for_until_it_lapses_or_is_seen_to_live(tmp_path: Path, is_renewed: bool):
    store, said, waited = open_store(tmp_path), list[str](), list[float]()
    other = tmp_path / "leases" / "writer-0.json"
    store.put("leases/writer-0.json", json.dumps(
        {"kind": "writer", "holder": "run r on elsewhere, process 1", "version": None, "ttl_seconds": 30}
    ).encode())  # fmt: skip

    def wait(ended: threading.Event, seconds: float) -> bool:
        if seconds != 1.0:
            return ended.wait()
        waited.append(seconds)
        now = time.time() + (10 if is_renewed else -10 * len(waited))
        os.utime(other, (now, now))
        return False

    def enter() -> None:
        with alone(store, "run r", ttl_seconds=30, on_wait=said.append, clock=Clock(wait=wait)):
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
    holder = f"run r on {socket.gethostname()}, process"
    for process_id, is_refused in ((2**22 + 1, False), (os.getpid(), True)):
        body = {"kind": "writer", "holder": f"{holder} {process_id}", "version": None, "ttl_seconds": 30}
        store.put("leases/writer-0.json", json.dumps(body).encode())
        with pytest.raises(CommitConflict) if is_refused else nullcontext():
            with alone(store, "run r", ttl_seconds=30, on_wait=pytest.fail):
                pass
