"""Readers of a remote dataset keep nothing on their host: no room is needed, none is in another's way, nothing stales.

Rows S5 and S6 of the fault matrix, which a cache will have to pass too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etl.config import EtlConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import IntegrityError
from shardmill.stores import open_store
from tests.lab.datasets import build_here, read_all, upload, write_images

_CONFIG = EtlConfig(image_size=16, formats=("parquet",), encoding="png", chunk_bytes=4_000, unit_min_images=20)


@pytest.fixture
def dataset_uri(s3_bucket: str, tmp_path: Path) -> str:
    write_images(tmp_path / "images", num_images=60)
    return build_here(upload(tmp_path / "images", f"{s3_bucket}/images"), f"{s3_bucket}/dataset", _CONFIG)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """All that a process would keep or spool lies here."""
    folder = tmp_path / "host"
    folder.mkdir()
    return folder


def begin_to_read(uri: str, host: Path, *step: str) -> subprocess.Popen[str]:
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"), str(host))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.programs.read_without_room", uri, *step],
        env={**os.environ, **places, "PYTHONDONTWRITEBYTECODE": "1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def read(uri: str, host: Path, *step: str) -> tuple[str, int]:
    """What it printed, and its exit code."""
    reader = begin_to_read(uri, host, *step)
    return reader.communicate(timeout=120)[0], reader.returncode


def objects(uri: str) -> dict[str, bytes]:
    store = open_store(uri)
    return {file.path: store.read(file.path) for file in store.list("")}


@pytest.mark.drill
def test_four_readers_of_one_host_need_no_room_and_leave_nothing(dataset_uri: str, host: Path):
    before = objects(dataset_uri)
    expected, exit_code = read(dataset_uri, host)
    assert exit_code == 0 and expected
    readers = [begin_to_read(dataset_uri, host) for _ in range(4)]
    assert [reader.communicate(timeout=120)[0] for reader in readers] == [expected] * 4
    assert not list(host.rglob("*"))
    assert objects(dataset_uri) == before


@pytest.mark.drill
def test_neither_a_killed_reader_nor_a_new_version_changes_what_a_version_gives(dataset_uri: str, host: Path, tmp_path):
    expected, _ = read(f"{dataset_uri}@1", host)
    assert read(f"{dataset_uri}@1", host, "2") == ("", -signal.SIGKILL)
    write_images(tmp_path / "others", num_images=60, seed=1)
    build_here(str(tmp_path / "others"), dataset_uri, _CONFIG)
    assert open_dataset(dataset_uri).pin.version == 2
    assert read(f"{dataset_uri}@1", host) == (expected, 0)
    assert read(dataset_uri, host)[0] not in ("", expected)
    assert not list(host.rglob("*"))


def test_what_was_damaged_is_refused_and_read_again_once_it_is_whole(dataset_uri: str):
    store = open_store(dataset_uri)
    shard = next(file.path for file in store.list("shards"))
    whole = store.read(shard)
    num_rows = read_all(dataset_uri, "parquet")
    store.put(shard, whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    for _ in range(2):
        with pytest.raises(IntegrityError, match=shard):
            read_all(dataset_uri, "parquet")
    store.put(shard, whole)
    assert read_all(dataset_uri, "parquet") == num_rows
