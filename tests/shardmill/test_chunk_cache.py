"""The cache of chunks, its folder, and work that processes share."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shardmill
from shardmill.dataset.chunk_cache import FOLDER, CacheQuota
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.failpoints import VARIABLE
from shardmill.jobs.process import PREFIX, STALE_SECONDS, Scratch, private_temporary_folder, remove_stale
from shardmill.loader.reader import share
from shardmill.stores import STORES
from tests.counting_store import BYTES_READ
from tests.far_store import ENTRY, SCHEME
from tests.lab.datasets import make_dataset, upload
from tests.services.versitygw import gateway, gateway_bucket, versitygw

__all__ = ["gateway", "gateway_bucket", "versitygw"]

BATCH = {"global_batch_size": 16, "seed": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_dataset(tmp_path_factory.mktemp("cached")))


@pytest.fixture
def far(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    return f"{SCHEME}://{root}"


def epoch_of(uri: str, cache: Path | None, **reading: object) -> tuple[list[np.ndarray], shardmill.loader.Loader]:
    reading |= {} if cache is None else {"cache_dir": cache}
    loader = shardmill.open_dataset(uri).batches("train", **BATCH, **reading)
    return [batch.images.copy() for batch in loader], loader


def entries_of(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file() and "-" in path.name)


def num_entries(uri: str, format: str = "parquet") -> int:
    index = shardmill.open_dataset(uri).index("train", format)
    return index.num_chunks + index.num_shards


@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_a_second_epoch_asks_the_storage_for_no_chunk(far: str, tmp_path: Path, format: str):
    expected, plain = epoch_of(far, None, format=format)
    assert plain.report().cache is None
    _, first = epoch_of(far, tmp_path, format=format)
    BYTES_READ.clear()
    found, second = epoch_of(far, tmp_path, format=format)
    assert not [path for path in BYTES_READ if path.startswith("shards/")]
    assert all(map(np.array_equal, found, expected)) and len(found) == len(expected)
    counts, again = first.report().cache, second.report().cache
    assert (counts.hits, counts.misses) == (0, num_entries(far, format)) == (again.misses, again.hits)
    assert counts.missed_bytes == again.hit_bytes == sum(path.stat().st_size for path in entries_of(tmp_path))
    assert "0 misses" in str(second.report())
    for _ in second:
        pass
    assert second.report().cache.hits == again.hits, "a split within the shuffle windows stays in memory"
    second.close()
    for _ in second:
        pass
    num_chunks = shardmill.open_dataset(far).index("train", format).num_chunks
    assert second.report().cache.hits == again.hits + num_chunks, "counted over epochs"


def test_an_altered_entry_is_fetched_once_more_and_never_used(far: str, tmp_path: Path):
    expected, _ = epoch_of(far, tmp_path)
    entries = entries_of(tmp_path)
    for number, path in enumerate(entries):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            del data[len(data) // 2 :]
        elif number % 3 == 1:
            data[len(data) // 3] ^= 1
        else:
            data += b"0"
        path.write_bytes(data)
    found, loader = epoch_of(far, tmp_path)
    assert all(map(np.array_equal, found, expected))
    assert loader.report().cache.damaged == loader.report().cache.misses == len(entries)
    found, loader = epoch_of(far, tmp_path)
    assert all(map(np.array_equal, found, expected)) and loader.report().cache.misses == 0


def test_what_is_altered_in_the_storage_is_an_error_and_is_not_kept(root: Path, far: str, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    uri, cache = f"{SCHEME}://{copy}", tmp_path / "cache"
    expected, _ = epoch_of(uri, cache)
    for path in (copy / "shards" / "train").iterdir():
        path.write_bytes(bytes(len(path.read_bytes())))
    found, _ = epoch_of(uri, cache)
    assert all(map(np.array_equal, found, expected)), "nothing is asked for again"
    damaged = entries_of(cache)[0]
    damaged.write_bytes(bytes(damaged.stat().st_size))
    for _ in range(2):
        with pytest.raises(IntegrityError, match="was altered: CRC-32C"):
            epoch_of(uri, cache)
    assert not damaged.exists()


def test_a_limit_evicts_what_was_not_used_for_longest_and_nothing_else(far: str, tmp_path: Path):
    expected, _ = epoch_of(far, tmp_path / "cache")
    cache = tmp_path / "cache" / FOLDER
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    (tmp_path / "outside").write_text("mine")
    foreign = [cache / "notes.txt", folder / "notes-1", folder / ".tmp-mine", folder / ("0" * 64 + "-1.bak")]
    (cache / "photos").mkdir()
    for path in (*foreign, cache / "photos" / ("0" * 64 + "-1")):
        path.write_text("mine")
    (folder / ("1" * 64 + "-1")).symlink_to(tmp_path / "outside")
    (cache / ("a" * 16)).symlink_to(tmp_path, target_is_directory=True)
    entries = entries_of(folder)
    own = [path for path in entries if path not in foreign and not path.is_symlink()]
    for age, path in enumerate(own):
        os.utime(path, ns=(age, age))
    sizes = [path.stat().st_size for path in own]
    quota = CacheQuota(cache, sum(sizes) - 1)
    assert quota.reserve(0, cache / "none")
    assert own[-1].exists() and not own[0].exists()
    kept = [path.exists() for path in own]
    assert kept == sorted(kept) and quota.held_bytes() <= 0.9 * sum(sizes)
    assert all(path.read_text() == "mine" for path in (*foreign, cache / "photos" / ("0" * 64 + "-1")))
    assert (tmp_path / "outside").exists() and (folder / ("1" * 64 + "-1")).is_symlink()

    limit = sum(shard.size_bytes for shard in shardmill.open_dataset(far).shards_of("train"))
    CacheQuota(cache, 0).reserve(0, cache / "none")
    reading = {"cache_limit_bytes": limit}
    for _ in range(2):
        found, loader = epoch_of(far, tmp_path / "cache", **reading)
        assert all(map(np.array_equal, found, expected))
        assert CacheQuota(cache, limit).held_bytes() <= limit
    assert loader.report().cache.hits > 0


def test_a_limit_below_one_window_is_refused_with_the_number(far: str, tmp_path: Path):
    dataset = shardmill.open_dataset(far)
    needed = int(dataset.index("train").stored_bytes.sum())
    with pytest.raises(
        UsageError, match=f"cache_limit_bytes = 1000; expected at least {needed} bytes, one shuffle win"
    ):
        dataset.batches("train", **BATCH, cache_dir=tmp_path / "cache", cache_limit_bytes=1000)
    assert not (tmp_path / "cache").exists()
    dataset.batches("train", **BATCH, cache_dir=tmp_path / "cache", cache_limit_bytes=needed).close()


def test_settings_that_make_no_cache_are_refused_or_said(root: Path, far: str, tmp_path: Path):
    with pytest.warns(RuntimeWarning, match="cache_dir = .* is not used: .* is a folder of this machine already"):
        _, loader = epoch_of(str(root), tmp_path / "cache")
    assert loader.report().cache is None and not (tmp_path / "cache").exists()
    dataset = shardmill.open_dataset(far)
    with pytest.raises(UsageError, match="cache_limit_bytes = 5 without cache_dir"):
        dataset.batches("train", **BATCH, cache_limit_bytes=5)
    with pytest.raises(UsageError, match="cache_dir = 's3://bucket/cache'; expected a folder on a local disk"):
        dataset.batches("train", **BATCH, cache_dir="s3://bucket/cache")
    (tmp_path / "a_file").touch()
    for unusable in ("/proc/cache", tmp_path / "a_file" / "cache"):
        with pytest.raises(StorageError, match="cannot write to .*; expected a folder on a local disk that"):
            dataset.batches("train", **BATCH, cache_dir=unusable)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "photo.jpg").touch()
    with pytest.raises(StorageError, match="is not a cache of shardmill: it holds other files"):
        dataset.batches("train", **BATCH, cache_dir=tmp_path)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["photo.jpg"]


def test_a_disk_without_room_is_refused_before_the_first_batch(far: str, tmp_path: Path, monkeypatch):
    dataset = shardmill.open_dataset(far)
    needed = int(dataset.index("train").stored_bytes.sum())
    full = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(
        StorageError, match=f"would grow to {needed} bytes, and its disk has 1000 free; expected {needed}"
    ):
        dataset.batches("train", **BATCH, cache_dir=tmp_path, cache_limit_bytes=10 * needed)
    with pytest.raises(
        UsageError, match=r"cache_limit_bytes \(half of what the disk has free\) = 500; expected at least"
    ):
        dataset.batches("train", **BATCH, cache_dir=tmp_path)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of this process cannot grow beyond 1,000 bytes: writing more fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_later_ends_the_caching_and_is_said_once(far: str, tmp_path: Path, small_files: None):
    expected, _ = epoch_of(far, None)
    with pytest.warns(RuntimeWarning, match="stores no more chunks: File too large; reading continues") as said:
        found, loader = epoch_of(far, tmp_path)
        for _ in loader:
            pass
    assert len([each for each in said if "stores no more" in str(each.message)]) == 1
    assert all(map(np.array_equal, found, expected)) and not entries_of(tmp_path)


def read_in_a_process(uri: str, cache: Path, limit: int = 0, epochs: int = 1, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.programs.read_with_cache", uri, str(cache), str(limit), str(epochs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def answer_of(process: subprocess.Popen) -> dict:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(text)


def test_processes_of_a_host_fetch_each_chunk_once_from_s3(root: Path, gateway_bucket: str, tmp_path: Path):
    uri = upload(root, f"{gateway_bucket}/dataset")
    readers = [read_in_a_process(uri, tmp_path / "cache", epochs=2) for _ in range(3)]
    answers = [answer_of(process) for process in readers]
    assert len({(str(each["ids"]), each["pixels"]) for each in answers}) == 1
    assert sum(each["cache"]["misses"] for each in answers) == num_entries(uri) == len(entries_of(tmp_path))
    assert all(each["cache"]["damaged"] == 0 for each in answers)
    with_flips = entries_of(tmp_path)[::4]
    for path in with_flips:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    again = answer_of(read_in_a_process(uri, tmp_path / "cache", epochs=2))
    assert (again["pixels"], again["cache"]["damaged"]) == (answers[0]["pixels"], len(with_flips))


@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.starts("program")
def test_a_killed_process_leaves_no_half_entry_and_no_lock(far: str, tmp_path: Path, nth: int):
    whole = answer_of(read_in_a_process(far, tmp_path / "whole"))
    killed = read_in_a_process(far, tmp_path / "cache", **{VARIABLE: f"cache_keep:{nth}"})
    killed.communicate(timeout=300)
    assert killed.returncode == -9
    assert [path for path in entries_of(tmp_path / "cache") if path.name.startswith(".tmp-")]
    answer = answer_of(read_in_a_process(far, tmp_path / "cache"))
    assert (answer["pixels"], answer["cache"]["damaged"]) == (whole["pixels"], 0)
    assert not [path for path in entries_of(tmp_path / "cache") if path.name.startswith(".tmp-")]


@pytest.mark.starts("program")
def test_what_a_stopped_process_holds_is_fetched_without_it(far: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardmill.dataset.chunk_cache.WAIT_SECONDS", 0.1)
    expected, _ = epoch_of(far, None)
    monkeypatch.setattr("shardmill.dataset.chunk_cache._WAIT_SECONDS", 0.1)
    with read_in_a_process(far, tmp_path, **{VARIABLE: "stop:cache_keep"}) as stopped:
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        found, loader = epoch_of(far, tmp_path)
        stopped.kill()
    # Another thread of the stopped process may have kept a chunk before.
    counts = loader.report().cache
    assert all(map(np.array_equal, found, expected)) and counts.hits + counts.misses == num_entries(far) > counts.hits


def test_a_room_that_stays_locked_ends_the_caching(far: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected, _ = epoch_of(far, None)
    dataset = shardmill.open_dataset(far)
    loader = dataset.batches("train", **BATCH, cache_dir=tmp_path)
    monkeypatch.setattr("shardmill.dataset.chunk_cache._WAIT_SECONDS", 0.1)
    with open(tmp_path / FOLDER / "room") as room, pytest.warns(RuntimeWarning, match="another process keeps it lock"):
        fcntl.flock(room, fcntl.LOCK_EX)
        found = [batch.images for batch in loader]
    assert all(map(np.array_equal, found, expected)) and not entries_of(tmp_path)


LONG_SECONDS = 60


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_the_last_part_finishes_the_work(num_threads: int, num_parts: int):
    done: list[int] = []
    with ThreadPoolExecutor(num_threads) as pool:
        assert share(pool, num_parts, done.append, lambda: sorted(done)).result() == list(range(num_parts))


def test_parts_are_worked_on_at_once():
    both = threading.Barrier(2)

    def meet(part: int) -> None:
        both.wait(LONG_SECONDS)

    with ThreadPoolExecutor(2) as pool:
        # A barrier that is broken, and with it the work, if one part waits for the other to end.
        assert share(pool, 2, meet, lambda: "both").result() == "both"


@pytest.mark.parametrize("num_parts", [1, 4])
def test_the_first_part_that_failed_is_the_fault(num_parts: int):
    is_later_done = threading.Event()

    def work(part: int) -> None:
        if part == 0 and num_parts > 1:
            is_later_done.wait(LONG_SECONDS)
        try:
            raise ValueError(f"part {part}")
        finally:
            if part == 3:
                is_later_done.set()

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="part 0"):
        share(pool, num_parts, work, lambda: pytest.fail("finished without its parts")).result()


@pytest.mark.parametrize("num_parts", [1, 2])
def test_what_finishing_raises_is_the_fault(num_parts: int):
    def finish() -> None:
        raise ValueError("at the end")

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="at the end"):
        share(pool, num_parts, lambda part: None, finish).result()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_cancelled_work_does_not_begin(num_parts: int):
    done, may_go_on = [], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(may_go_on.wait, LONG_SECONDS)
        future = share(pool, num_parts, done.append, lambda: done.append(-1))
        assert future.cancel()
        may_go_on.set()
    assert not done
    with pytest.raises(CancelledError):
        future.result()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_nobody_waits_for_work_that_a_closed_pool_has_given_up(num_parts: int):
    may_go_on = threading.Event()
    pool = ThreadPoolExecutor(1)
    pool.submit(may_go_on.wait, LONG_SECONDS)
    future = share(pool, num_parts, lambda part: None, lambda: None)
    pool.shutdown(wait=False, cancel_futures=True)
    try:
        with pytest.raises(CancelledError):
            future.result(LONG_SECONDS)
    finally:
        may_go_on.set()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(folder: Path) -> None:
    long_ago = folder.stat().st_mtime - 2 * STALE_SECONDS
    os.utime(folder, (long_ago, long_ago))


def test_everything_temporary_is_inside_and_goes_with_it(temporary):
    with private_temporary_folder() as folder:
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        assert os.environ["TMPDIR"] == str(folder)
        assert Path(tempfile.mkdtemp()).parent == folder
    assert tempfile.gettempdir() == str(temporary) and not list(temporary.iterdir())


@pytest.mark.starts("program")
def test_what_a_killed_owner_left_goes_with_the_next_and_nothing_else_does(temporary):
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.programs.own_a_temporary_folder"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None and owner.stdin is not None
    folder = Path(owner.stdout.readline().strip())
    age(folder)
    other = temporary / "somebody-elses"
    other.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(other)
    fresh = temporary / f"{PREFIX}not-locked-yet"
    fresh.mkdir()
    remove_stale()
    assert folder.exists()
    owner.kill()
    owner.communicate()
    remove_stale()
    assert not folder.exists()
    assert other.exists() and fresh.exists()


def test_after_remove_it_is_gone_also_if_another_thread_removes_it(temporary):
    scratch = Scratch()
    for number in range(2000):
        (scratch.path / f"{number}").touch()
    first = threading.Thread(target=scratch.remove)
    first.start()
    scratch.remove()
    assert not scratch.path.exists()
    first.join()
