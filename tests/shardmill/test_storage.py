"""Stores: one body of tests over every scheme; a name below a root cannot leave it."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardmill.checksummed import check_relative_path
from shardmill.errors import SecurityRefusal, StorageError, UsageError
from shardmill.storage import Store
from shardmill.stores import STORES, open_store, scheme_of

# tests/shardmill/test_read_only_stores.py has those.
READ_ONLY = ("http", "fsspec")
_MARKS = {"s3": pytest.mark.starts("server"), "hdfs": pytest.mark.drill}


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, ())) for name in STORES if name not in READ_ONLY])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A root for tests in each scheme; a new one says here where it may write."""
    roots = {
        "file": lambda: tmp_path,
        "s3": lambda: f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}",
        "hdfs": lambda: request.getfixturevalue("hdfs_root"),
    }
    return open_store(roots[request.param]())


def test_published_files_are_read(store: Store, tmp_path: Path):
    store.put("a/b c%20#?é.bin", b"0123456789")
    spooled = tmp_path / "spooled"
    spooled.write_bytes(b"spooled")
    store.put_file("a/file", spooled)
    assert store.read("a/b c%20#?é.bin") == b"0123456789"
    assert store.read("a/file") == b"spooled"
    assert store.read_range("a/b c%20#?é.bin", 3, 4) == b"3456"
    assert store.read_range("a/b c%20#?é.bin", 8, 10) == b"89"
    assert store.read_range("a/b c%20#?é.bin", 10, 1) == store.read_range("a/b c%20#?é.bin", 99, 1) == b""
    # No more is allocated than the file holds: a size may come from an index that somebody forged.
    assert store.read_range("a/b c%20#?é.bin", 4, 1 << 50) == b"456789"
    store.put("empty", b"")
    assert store.read_range("empty", 0, 1) == b""
    with pytest.raises(FileNotFoundError):
        store.read_range("nothing", 0, 1)
    assert {(file.path, file.size_bytes) for file in store.list("a")} == {("a/b c%20#?é.bin", 10), ("a/file", 7)}
    found = store.stat("a/file")
    assert found is not None and found.size_bytes == 7


def test_put_replaces_and_delete_removes(store: Store):
    store.put("x", b"one")
    store.put("x", b"three")
    assert store.read("x") == b"three"
    store.delete("x")
    store.delete("x")
    assert store.stat("x") is None and list(store.list("nothing")) == []
    with pytest.raises(FileNotFoundError):
        store.read("x")


def test_of_many_writers_one_makes_the_file(store: Store):
    for round_number in range(5):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda n, r=round_number: store.put_if_absent(f"m/{r}", b"writer %d" % n), range(8)))
        assert made.count(True) == 1
        assert store.read(f"m/{round_number}") == b"writer %d" % made.index(True)


def test_nothing_temporary_is_left_or_listed(tmp_path: Path):
    store = open_store(tmp_path)
    store.put("a/x", b"1")
    assert not store.put_if_absent("a/x", b"2")
    assert os.listdir(tmp_path / "a") == ["x"]


def test_new_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path):
    store = open_store(tmp_path)
    before = os.umask(0o027)
    try:
        for umask in (0o022, 0o077, 0o002, 0o000):
            os.umask(umask)
            store.put(f"{umask}/put", b"1")
            store.put_file(f"{umask}/put_file", tmp_path / f"{umask}/put")
            store.put_if_absent(f"{umask}/put_if_absent", b"1")
            modes = {stat.S_IMODE(os.stat(file).st_mode) for file in (tmp_path / str(umask)).iterdir()}
            assert modes == {0o666 & ~umask}
    finally:
        os.umask(before)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the file system is told, in order: (call, path relative to `tmp_path`; the file's new name for links)."""
    seen: list[tuple[str, str]] = []

    def record(name: str, path_of: Callable[..., str]) -> None:
        real = getattr(os, name)

        def recorded(*arguments, **options):
            path = path_of(*arguments)
            outcome = real(*arguments, **options)
            # The names of folders above are synced once, and may be before.
            if not os.path.relpath(path, tmp_path).startswith(".."):
                seen.append((name, os.path.relpath(path, tmp_path)))
            return outcome

        monkeypatch.setattr(os, name, recorded)

    record("fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    record("mkdir", lambda path, *_: path)
    record("replace", lambda _, target: target)
    record("link", lambda _, target: target)
    return seen


@pytest.mark.parametrize(
    ("publish", "appears"), [("put", "replace"), ("put_file", "replace"), ("put_if_absent", "link")]
)
def test_data_is_synced_before_its_name_appears_and_every_new_name_after(
    publish: str, appears: str, tmp_path: Path, calls: list[tuple[str, str]]
):
    (tmp_path / "spooled").write_bytes(b"1")
    content = tmp_path / "spooled" if publish == "put_file" else b"1"
    getattr(open_store(tmp_path / "root"), publish)("a/b/file", content)
    [(data_synced, temporary)] = [pair for pair in enumerate(calls) if ".tmp-" in pair[1][1]]
    assert temporary[0] == "fsync" and os.path.dirname(temporary[1]) == "root/a/b"
    in_order = [
        *(("mkdir", "root"), ("fsync", "."), ("mkdir", "root/a"), ("fsync", "root")),
        *(("mkdir", "root/a/b"), ("fsync", "root/a"), temporary, (appears, "root/a/b/file"), ("fsync", "root/a/b")),
    ]
    assert calls == in_order and data_synced == 6
    # A folder whose name is synced costs nothing more; that of one that another process has made may not be.
    for folder, num_more in (("a/b", 0), ("a/other", 1), ("a/other", 0)):
        (tmp_path / "root" / folder).mkdir(exist_ok=True)
        calls.clear()
        getattr(open_store(tmp_path / "root"), publish)(f"{folder}/more", content)
        names = [name for name, _ in calls if name != "mkdir"]
        assert names == ["fsync"] * num_more + ["fsync", appears, "fsync"]
        (tmp_path / "root" / folder / "more").rename(tmp_path / "root" / folder / "kept")


def test_folders_go_with_their_last_file(tmp_path: Path):
    store = open_store(tmp_path / "root")
    for name in ("a/b/c/1", "a/b/2", "x"):
        store.put(name, b"1")
    store.delete("a/b/c/1")
    assert not (tmp_path / "root/a/b/c").exists() and store.read("a/b/2") == b"1"
    store.delete("a/b/2")
    store.delete("x")
    assert os.listdir(tmp_path / "root") == []


def test_a_put_and_a_delete_in_one_folder_do_not_disturb_each_other(tmp_path: Path):
    store = open_store(tmp_path)

    def come_and_go(writer: int) -> None:
        for number in range(200):
            store.put(f"deep/folder/{writer}", b"%d" % number)
            assert store.read(f"deep/folder/{writer}") == b"%d" % number
            store.delete(f"deep/folder/{writer}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert os.listdir(tmp_path) == []


def test_only_an_absent_folder_is_empty(tmp_path: Path):
    store = open_store(tmp_path)
    assert list(store.list("manifests")) == []
    (tmp_path / "manifests").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot access .*manifests: Not a directory; check the path"):
        list(store.list("manifests"))
    (tmp_path / "manifests").unlink()
    (tmp_path / "manifests").symlink_to("manifests")
    with pytest.raises(StorageError, match=r"cannot access .*manifests: Too many levels"):
        list(store.list("manifests"))
    with pytest.raises(StorageError, match=r"cannot access .*manifests: Too many levels"):
        store.stat("manifests")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_folder_that_cannot_be_read_is_never_a_shorter_listing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = open_store(tmp_path)
    for name in ("a/1", "a/deep/2", "a/other/3"):
        store.put(name, b"1")
    real = os.scandir

    def faulty(path):
        # What the kernel answers for a disk or server that fails; no test may break a real one.
        if str(path).endswith("deep"):
            raise OSError(code, os.strerror(code), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", faulty)
    with pytest.raises(StorageError, match=r"cannot access .*a/deep"):
        list(store.list("a"))


def test_a_folder_that_goes_while_it_is_listed_is_no_fault(tmp_path: Path):
    store = open_store(tmp_path)
    for name in ("a/0", "a/deep/1"):
        store.put(name, b"1")
    listing = store.list("a")
    assert next(listing).path == "a/0"
    shutil.rmtree(tmp_path / "a/deep")
    assert list(listing) == []


def test_a_folder_is_not_a_file(store: Store):
    store.put("a/b", b"1")
    assert store.stat("a") is None and store.stat("nothing") is None


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../../b", "a/./b", "a//b", "..\\x", "C:\\x", "%2e%2e/x", "file:///x", "s3://b/x",
     "a/\0b", "a\nb", "~/x"],
)  # fmt: skip
def test_a_hostile_path_is_refused(path: str):
    with pytest.raises(SecurityRefusal, match="leaves its root folder"):
        check_relative_path(path)


def test_an_unknown_scheme_names_the_known_ones():
    with pytest.raises(
        UsageError, match=r"no storage for s4:// .*one of file, s3, hdfs, http, fsspec; did you mean 's3'\?"
    ):
        open_store("s4://bucket/x")


@pytest.mark.starts("program")
def test_a_full_disk_is_one_line_with_path_and_bytes(tmp_path: Path):
    command = [sys.executable, "-m", "tests.programs.put_on_a_full_disk", str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"no space to write {tmp_path}/shard (5000 bytes)" in out
    assert os.listdir(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot access"):
        open_store(tmp_path / "file").put("x", b"1")


def test_the_name_that_hadoop_has_for_s3_is_taken_and_not_kept():
    assert open_store("s3a://bucket/x").uri == open_store("s3://bucket/x").uri == "s3://bucket/x"
    assert scheme_of("s3a://bucket") == "s3"


@pytest.mark.parametrize(
    ("uri", "meant"),
    [
        ("hdfs:/user/x", "hdfs:///user/x"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("s3a:/bucket/x", "s3://bucket/x"),
    ],
)
def test_a_scheme_with_one_slash_is_not_a_folder_of_that_name(uri: str, meant: str):
    with pytest.raises(UsageError, match=f"no storage for '.*'; expected two slashes; did you mean {meant}"):
        open_store(uri)
