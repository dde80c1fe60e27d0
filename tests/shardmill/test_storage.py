"""Stores: one body of tests over a folder and over an S3 server; a name below a root cannot leave it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etl.sources import SOURCES
from shardmill.errors import SecurityRefusal, StorageError, UsageError
from shardmill.storage import S3Store, Store, check_relative_path, open_store


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return open_store(tmp_path)
    return open_store(f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}")


def test_what_is_put_is_read(store: Store, tmp_path: Path):
    store.put("a/b c%20#?é.bin", b"0123456789")
    spooled = tmp_path / "spooled"
    spooled.write_bytes(b"spooled")
    store.put_file("a/file", spooled)
    assert store.read("a/b c%20#?é.bin") == b"0123456789"
    assert store.read("a/file") == b"spooled"
    assert store.read_range("a/b c%20#?é.bin", 3, 4) == b"3456"
    assert store.read_range("a/b c%20#?é.bin", 8, 10) == b"89"
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


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../../b", "a/./b", "a//b", "..\\x", "C:\\x", "%2e%2e/x", "file:///x", "s3://b/x",
     "a/\0b", "a\nb", "~/x"],
)  # fmt: skip
def test_a_hostile_path_is_refused(path: str):
    with pytest.raises(SecurityRefusal, match="does not stay under its root"):
        check_relative_path(path)


def test_an_unknown_scheme_names_the_known_ones():
    with pytest.raises(UsageError, match=r"no storage for gs://.*file://, s3://"):
        open_store("gs://bucket/x")


def test_a_full_disk_is_one_line_with_path_and_bytes(tmp_path: Path):
    # A file size limit makes write() fail as a full disk does, in a process of its own.
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from shardmill.storage import open_store\n"
        "from shardmill.errors import StorageError\n"
        "try: open_store(sys.argv[1]).put('shard', b'x' * 5000)\n"
        "except StorageError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert f"no room to write {tmp_path}/shard (5000 bytes)" in out
    assert os.listdir(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot access"):
        open_store(tmp_path / "file").put("x", b"1")


def test_a_missing_bucket_is_a_storage_error_and_as_a_source_a_usage_error(s3_server: str):
    store = open_store("s3://nobody-made-this/x")
    for attempt in (lambda: list(store.list("")), lambda: store.put("a", b"1"), lambda: store.put_if_absent("a", b"1")):
        with pytest.raises(StorageError, match="no bucket 'nobody-made-this'"):
            attempt()
    with pytest.raises(UsageError, match="source s3://nobody-made-this/x does not exist"):
        SOURCES["folders"]("s3://nobody-made-this/x", 10**6)


def test_folder_markers_of_s3_consoles_are_not_files(s3_bucket: str):
    import boto3

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    for key, body in (("cats/", b""), ("cats/1.jpg", b"x")):
        client.put_object(Bucket=s3_bucket.removeprefix("s3://"), Key=key, Body=body)
    listing = SOURCES["folders"](s3_bucket, 10**6)
    assert [image.key for image in listing.images] == ["cats/1.jpg"] and listing.num_listed == 1


def test_a_server_that_ignores_conditional_puts_can_be_read_but_not_committed_to(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
):
    store = open_store(s3_bucket)
    store.put("a", b"1")
    monkeypatch.setattr(S3Store, "_create", lambda self, path, data: self.put(path, data) or True)
    with pytest.raises(StorageError, match="ignores `If-None-Match"):
        store.put_if_absent("manifest", b"1")
    assert store.read("a") == b"1" and [file.path for file in store.list("")] == ["a"]
