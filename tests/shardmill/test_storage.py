"""Stores: what every one promises; read-only ones; damage on the way."""

from __future__ import annotations

import datetime
import errno
import http.server
import ipaddress
import os
import random
import re
import resource
import shutil
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etl.config import EtlConfig, SourceConfig
from shardmill.checksummed import check_relative_path
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import CannotList, SecurityRefusal, StorageError, UsageError
from shardmill.jobs.process import log_to_stderr
from shardmill.storage import Store
from shardmill.stores import STORES, open_store, retries, scheme_of
from shardmill.stores import http as http_store
from shardmill.stores.object_stores import AzureStore
from tests.lab.commands import in_process, last_line
from tests.lab.datasets import build_here, make_dataset, read_all, write_images
from tests.services.fault_proxy import Fault, at_the_deadline, end_patience_with, in_turn, proxying
from tests.services.web import serving

# They have tests of their own below.
READ_ONLY = ("http", "fsspec")
_MARKS = {"s3": pytest.mark.starts("server"), **dict.fromkeys(("gs", "az", "hdfs"), pytest.mark.drill)}


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, ())) for name in STORES if name not in READ_ONLY])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A root for tests in each scheme; a new one says here where it may write."""
    roots = {
        "file": lambda: tmp_path,
        "s3": lambda: f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}",
        "gs": lambda: f"{request.getfixturevalue('gcs_bucket')}/{tmp_path.name}",
        "az": lambda: f"{request.getfixturevalue('azure_container')}/{tmp_path.name}",
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
def test_a_folder_that_cannot_be_read_is_never_a_shorter_listing(code: int, tmp_path: Path, monkeypatch):
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
        UsageError, match=r"no storage for s4:// .*one of file, s3, gs, az, hdfs, http, fsspec; did you mean 's3'\?"
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


def test_names_that_other_tools_have_for_a_scheme_are_taken_and_not_kept():
    assert open_store("s3a://bucket/x").uri == open_store("s3://bucket/x").uri == "s3://bucket/x"
    assert [scheme_of(f"{name}://x") for name in ("s3a", "gcs", "abfs", "abfss")] == ["s3", "gs", "az", "az"]
    hadoops = open_store("abfss://photos@account.dfs.core.windows.net/x")
    assert hadoops.uri == "az://photos@account.dfs.core.windows.net/x"
    of_account = AzureStore.open_bucket("photos@account.dfs.core.windows.net", {}, {})
    assert of_account.config == {"account_name": "account", "container_name": "photos"}  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("uri", "meant"),
    [
        ("hdfs:/user/x", "hdfs:///user/x"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("s3a:/bucket/x", "s3://bucket/x"),
        ("abfs:/photos/x", "az://photos/x"),
    ],
)
def test_a_scheme_with_one_slash_is_not_a_folder_of_that_name(uri: str, meant: str):
    with pytest.raises(UsageError, match=f"no storage for '.*'; expected two slashes; did you mean {meant}"):
        open_store(uri)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("gs://", "no Google Cloud Storage bucket can be called ''"),
        ("gs://Upper/x", "expected gs://BUCKET/PATH with 3 or more lowercase letters"),
        ("az:///x", "no Azure Blob Storage container can be called ''"),
        ("abfs://photos@elsewhere.org/x", "expected az://CONTAINER/PATH"),
    ],
)
def test_a_bucket_that_cannot_be_is_refused_before_any_request(uri: str, said: str):
    with pytest.raises(UsageError, match=said):
        open_store(uri)


CONFIG = EtlConfig(image_size=16, encoding="png", chunk_bytes=4_000)


@pytest.fixture(params=("http", "fsspec"))
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store over the folder `tmp_path`, in each scheme that can be read only."""
    with serving(tmp_path) as address:
        yield open_store({"http": address, "fsspec": f"local://{tmp_path}"}[request.param])


def test_objects_of_other_clients_are_read(reader: Store, tmp_path: Path):
    writer, name = open_store(tmp_path / "a"), "b c%20#?é.bin"
    for path, data in ((name, b"0123456789"), ("d/x", b"1"), ("d/empty", b""), ("e" * 255, b"2")):
        writer.put(path, data)
        assert reader.read(f"a/{path}") == data
        found = reader.stat(f"a/{path}")
        assert found is not None and (found.path, found.size_bytes) == (f"a/{path}", len(data))
        assert abs(found.mtime_ns - os.stat(tmp_path / "a" / path).st_mtime_ns) < 10**9
    assert reader.read_range(f"a/{name}", 3, 4) == b"3456" and reader.read_range(f"a/{name}", 8, 10) == b"89"
    assert reader.read_range(f"a/{name}", 10, 1) == reader.read_range(f"a/{name}", 99, 1) == b""
    assert reader.read_range(f"a/{name}", 4, 1 << 50) == b"456789" and reader.read_range("a/d/empty", 0, 1) == b""
    for nothing in ("nothing", "a/nothing"):
        assert reader.stat(nothing) is None
        with pytest.raises(FileNotFoundError):
            reader.read(nothing)
        with pytest.raises(FileNotFoundError):
            reader.read_range(nothing, 0, 1)
    try:
        listed = {(file.path, file.size_bytes) for file in reader.list("a")}
    except CannotList:
        assert reader.uri.startswith("http")
    else:
        assert listed == {(f"a/{name}", 10), ("a/d/x", 1), ("a/d/empty", 0), ("a/" + "e" * 255, 1)}
        assert list(reader.list("nothing")) == []


def test_a_committed_dataset_is_read_from_a_web_server(tmp_path: Path):
    dataset = make_dataset(tmp_path, num_images=30)
    with serving(tmp_path) as address:
        remote = f"{address}/dataset"
        assert [read_all(remote, name) for name in ("parquet", "tfrecord")] == [30, 30]
        # The newest of its versions is found without a list of them, at any number.
        for version in range(2, 7):
            write_images(tmp_path / "images", num_images=3 * version, seed=version)
            build_here(str(tmp_path / "images"), dataset, CONFIG)
            assert open_dataset(remote).pin.version == open_dataset(dataset).pin.version == version
        assert open_dataset(f"{remote}@3").manifest == open_dataset(f"{dataset}@3").manifest
        with pytest.raises(UsageError, match=f"{remote} has no version 9; expected one of 1 to 6"):
            open_dataset(f"{remote}@9")
        with pytest.raises(UsageError, match=f"there is no dataset at {address}/nowhere"):
            open_dataset(f"{address}/nowhere")
        checked = in_process("verify", remote, cwd=tmp_path)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("scheme", ["http", "local"])
def test_nothing_is_committed_to_a_store_that_is_read_only(scheme: str, tmp_path: Path):
    """`local` is a scheme of fsspec's own."""
    write_images(tmp_path / "images", num_images=6)
    with serving(tmp_path) as address:
        root = address if scheme == "http" else f"local://{tmp_path}"
        done = in_process(
            "etl", tmp_path / "images", "--set", f"dataset.uri={root}/dataset", "--set", "etl.image_size=16",
            "--workdir", tmp_path / "work", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 4 and not (tmp_path / "dataset").exists()
        said = last_line(done)
        assert f"cannot write {root}/dataset/" in said and f"{scheme}:// is read only" in said and "s3://" in said
        for write in (
            lambda store: store.put_if_absent("x", b"1"),
            lambda store: store.put("x", b"1"),
            lambda store: store.put_file("x", tmp_path / "images"),
            lambda store: store.delete("x"),
        ):
            with pytest.raises(StorageError, match=f"cannot write {root}/x: {scheme}:// is read only"):
                write(open_store(root))


def test_images_come_from_a_web_server_by_their_names(tmp_path: Path):
    write_images(tmp_path / "images", num_images=12)
    first = next((tmp_path / "images" / "class_0").iterdir())
    first.rename(first.with_name("a b%20c#1?é.png"))
    files = sorted(str(file.relative_to(tmp_path / "images")) for file in (tmp_path / "images").rglob("*.png"))
    rows = "".join(f'"{name}",{name[:7]}\n' for name in files)
    (tmp_path / "images" / "table.csv").write_text(f"uri,label\n{rows}")
    with serving(tmp_path) as address:
        with pytest.raises(
            CannotList, match="images .HTTP 404., and it cannot be listed: .*source.kind = 'table'"
        ) as caught:
            build_here(f"{address}/images", str(tmp_path / "none"), CONFIG)
        assert caught.value.exit_code == 4
        with pytest.raises(CannotList, match=r"there is no http.*/none\.zip \(HTTP 404\), and it cannot be listed"):
            build_here(f"{address}/none.zip", str(tmp_path / "none"), CONFIG)
        digests = set()
        for root in (f"{address}/images", str(tmp_path / "images"), f"local://{tmp_path}/images"):
            source = SourceConfig(uri=f"{root}/table.csv", kind="table")
            built = build_here(source, f"{tmp_path}/{len(digests)}-{root[:5]}", CONFIG)
            manifest = open_dataset(built).manifest
            assert manifest.counts.accepted == 12, manifest.counts
            digests.add(manifest.content_digest)
        assert len(digests) == 1


def test_a_server_that_is_not_there_is_a_storage_error():
    # FTP's file system connects as soon as it is made.
    store = open_store("ftp://127.0.0.1:9/x")
    for use in (lambda: list(store.list("")), lambda: store.read("y"), lambda: store.stat("y")):
        with pytest.raises(StorageError, match=r"cannot access ftp://127\.0\.0\.1:9/x"):
            use()


def test_a_web_server_that_has_never_answered_is_given_up_soon_and_one_that_has_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.1)
    (tmp_path / "a").write_bytes(b"1")
    for use in (lambda store: store.read("a"), lambda store: store.stat("a")):
        with pytest.raises(StorageError, match="cannot access http://.*/a: .*refused; check the address, its server"):
            use(open_store("http://127.0.0.1:1"))
    with serving(tmp_path) as address:
        store = open_store(address)
        assert store.read("a") == b"1"
    monkeypatch.setattr(http_store, "DEADLINE_SECONDS", 2.0)
    began = time.monotonic()
    with pytest.raises(StorageError, match="cannot access http://127.*/a: .*refused"):
        store.read("a")
    assert time.monotonic() - began > 1.0


@pytest.mark.parametrize("address", ["http://user:pass@host/x", "http://host/x?sig=a", "https://host/x#y", "http:///x"])
def test_an_address_holds_nothing_but_its_place(address: str):
    with pytest.raises(UsageError, match="no store at https?://(host)?/x; expected scheme://host/folder, without user"):
        open_store(address)


def test_who_watches_is_told_what_is_waited_for_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    log_to_stderr(others=True)
    monkeypatch.setattr(http_store, "DEADLINE_SECONDS", 1600.0)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(retries, "TELL_AFTER_SECONDS", 1000.0)
    (tmp_path / "a").write_bytes(b"1")

    def warnings_of_an_outage() -> list[str]:
        proxy.choose = in_turn(*[Fault.SLOW_DOWN] * 6)
        assert open_store(proxy.endpoint).read("a") == b"1"
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")]

    with serving(tmp_path) as upstream, proxying(upstream) as proxy:
        assert warnings_of_an_outage() == [], "it was short"
        monkeypatch.setattr(retries, "TELL_AFTER_SECONDS", 0.0)
        monkeypatch.setattr(retries, "_next_warning", 0.0)
        (warning,) = warnings_of_an_outage()
        assert re.fullmatch(
            r"WARNING: a request to storage has failed for \d+ s, and is repeated for up to 1600 s: HTTP 503", warning
        )
        assert warnings_of_an_outage() == [], "there was one a moment ago"


def test_the_last_request_before_the_deadline_is_answered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_bytes(b"1")

    def slow(method: str, path: str) -> Fault:
        time.sleep(0.1)
        return Fault.SLOW_DOWN

    with serving(tmp_path) as upstream, proxying(upstream) as proxy:
        proxy.choose = slow
        store = open_store(proxy.endpoint)
        monkeypatch.setattr(http_store, "patiently", at_the_deadline)
        for use in (lambda: store.read("a"), lambda: store.stat("a")):
            with pytest.raises(StorageError, match="cannot access .*/a: HTTP 503"):
                use()
        proxy.choose = in_turn()
        assert store.read("a") == b"1", "it is whole, however late"
        monkeypatch.setattr(http_store, "_BLOCK_BYTES", 1)
        (tmp_path / "a").write_bytes(b"12")
        with pytest.raises(StorageError, match=r"cannot access .*/a: it took longer than"):
            store.read("a")


@pytest.mark.drill
def test_a_spoiled_answer_is_never_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_store, "PIECE_BYTES", 3000)
    data = bytes(range(256)) * 40
    (tmp_path / "a").write_bytes(data)
    with serving(tmp_path) as upstream, proxying(upstream) as proxy:
        store, generator = open_store(proxy.endpoint), random.getstate()
        for fault in (Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, Fault.DROPPED, Fault.RESET, Fault.CUT, Fault.SHORT):
            for use in (
                lambda: store.read("a") == data,
                lambda: store.read_range("a", 7, 5000) == data[7:5007],
                lambda: store.stat("a").size_bytes == len(data),  # pyright: ignore[reportOptionalMemberAccess]
            ):
                proxy.choose = in_turn(None, fault)
                assert use()
                proxy.choose = in_turn(fault) if fault is not Fault.SHORT else in_turn()
                assert use()
            assert proxy.told[fault] >= 2
        # As of S3.
        assert random.getstate() == generator
        # A refusal is told once; what never works, when the deadline has come.
        before = proxy.told.total()
        proxy.choose = lambda method, path: Fault.FORBIDDEN
        with pytest.raises(StorageError, match="cannot access .*/a: HTTP 403"):
            store.read("a")
        assert proxy.told.total() == before + 1
        before = proxy.told[Fault.SLOW_DOWN]
        end_patience_with(3, monkeypatch)
        proxy.choose = lambda method, path: Fault.SLOW_DOWN
        with pytest.raises(StorageError, match="cannot access .*/a: HTTP 503"):
            store.read("a")
        assert proxy.told[Fault.SLOW_DOWN] == before + 3
        proxy.choose = in_turn()
        with pytest.raises(FileNotFoundError):
            store.read("nothing")


class WithoutRanges(http.server.SimpleHTTPRequestHandler):
    """Python's own, which sends the whole file whatever is asked for; and a redirect."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data?token=secret")
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        return


def test_servers_that_redirect_or_know_no_ranges_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(http_store, "PIECE_BYTES", 3000)
    data = bytes(range(256)) * 40
    (tmp_path / "a").write_bytes(data)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WithoutRanges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        store = open_store(f"http://127.0.0.1:{server.server_port}")
        assert store.read("a") == data and store.read_range("a", 0, 10) == data[:10]
        with pytest.raises(StorageError, match="cannot access .*/a: its server does not support range requests"):
            store.read_range("a", 5, 10)
        with pytest.raises(StorageError, match="/moved: HTTP 302: it leads to 169.254.169.254; name that") as caught:
            store.read("moved")
        assert "secret" not in str(caught.value)
    finally:
        server.shutdown()
        server.server_close()


def test_a_certificate_must_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    end_patience_with(2, monkeypatch)
    (tmp_path / "a").write_bytes(b"1")
    certificate = write_certificate(tmp_path / "server.pem")
    with serving(tmp_path, certificate) as address:
        assert address.startswith("https://")
        with pytest.raises(StorageError, match="cannot access https://.*/a: .*certificate verify failed"):
            open_store(address).read("a")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
        http_store.connections.cache_clear()
        assert open_store(address).read("a") == b"1"
    http_store.connections.cache_clear()


def write_certificate(file: Path) -> ssl.SSLContext:
    """A server's own, for loopback, that nobody else has signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(1))
    signed = builder.add_extension(loopback, critical=True).sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context
