"""Behaviour specific to HDFS: users and permissions, quotas, names, empty folders, unreachable NameNodes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etl.config import EtlConfig, SourceConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, StorageError
from shardmill.storage import TEMPORARY_PREFIX
from shardmill.stores import hdfs, open_store
from tests.etl.building import build_source
from tests.lab.datasets import build_here, read_all, upload, write_images
from tests.programs.use_store import use_store
from tests.services.hadoop import write_settings
from tests.services.hdfs import HdfsServer
from tests.shardmill.races import NUM_ROUNDS, race_of_writers

_SEED = random.SystemRandom().randrange(2**32)

# 255 bytes is the longest name that a NameNode takes by default.
NAMES = ["b%20c#1?.png", " ", "é😀", "x" * 255, "a/b c/%2F"]


def test_names_are_taken_as_they_are(hdfs_root: str):
    store = open_store(hdfs_root)
    for name in NAMES:
        store.put(name, name.encode())
    assert {file.path: store.read(file.path).decode() for file in store.list("")} == {name: name for name in NAMES}
    for name, why in (("a:b", "Invalid path name"), ("y" * 256, "maximum path component name limit")):
        with pytest.raises(StorageError, match=rf"cannot access {hdfs_root}/{name} \(1 bytes\): .*{why}"):
            store.put(name, b"1")


def test_a_table_names_files_of_hdfs_whatever_their_names_are(hdfs_root: str, tmp_path: Path):
    names = [name for name in NAMES if name.strip()]
    write_images(tmp_path / "images", num_images=len(names))
    for name, file in zip(names, sorted((tmp_path / "images").rglob("*.png")), strict=True):
        open_store(hdfs_root).put_file(name, file)
    rows = [{"uri": f"{hdfs_root}/{name}"} for name in (*names, "no such file")]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(uri=f"{tmp_path}/table.jsonl", kind="table")
    manifest = build_source(source, tmp_path / "dataset", max_reject_fraction=0.2)
    assert (manifest.counts.accepted, manifest.counts.by_reason) == (len(names), {"missing": 1})


@pytest.mark.drill
def test_a_delegation_token_says_who_asks_also_for_worker_processes(hdfs_server: HdfsServer, hdfs_root: str, tmp_path):
    """Without the token the NameNode takes this job for somebody else's, who may not write here."""
    write_images(tmp_path / "images", num_images=8)
    hdfs_server.fetch_token(tmp_path / "token")
    security = {"fs.defaultFS": hdfs_server.uri, "hadoop.security.authentication": "kerberos"}
    (tmp_path / "conf").mkdir()
    write_settings(tmp_path / "conf" / "core-site.xml", security)
    options = ("--set", f"dataset.uri={hdfs_root}/dataset", "--set", "etl.image_size=16", "--set", "etl.engine=local")
    command = [
        sys.executable, "-m", "pipeline.cli", "etl", str(tmp_path / "images"), "--workdir", str(tmp_path / "work"),
    ]  # fmt: skip
    open_store(hdfs_root).put("made/by", b"the owner of the token")
    for token, exit_code in ((tmp_path / "none", 4), (tmp_path / "token", 0)):
        environment = {
            **os.environ, "HADOOP_CONF_DIR": str(tmp_path / "conf"), "HADOOP_USER_NAME": "somebody",
            "HADOOP_TOKEN_FILE_LOCATION": str(token),
        }  # fmt: skip
        done = subprocess.run(
            [*command, *options], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == exit_code, done.stderr[-3000:]
        assert exit_code == 0 or "Permission denied: user=somebody" in done.stderr
    assert read_all(f"{hdfs_root}/dataset", "parquet") == 8


@pytest.mark.drill
def test_a_dataset_has_one_winner_for_each_version_and_no_unseen_damage(hdfs_root: str, tmp_path: Path):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    write_images(tmp_path / "images", num_images=60)
    config = EtlConfig(
        image_size=16, formats=("parquet", "tfrecord"), encoding="png", chunk_bytes=8_000, unit_min_images=40
    )
    root = build_here(upload(tmp_path / "images", f"{hdfs_root}/images"), f"{hdfs_root}/dataset", config)
    store = open_store(root)
    shards = sorted(file.path for file in store.list("shards"))
    files = shards + sorted(file.path for kind in ("rows", "indexes", "manifests") for file in store.list(kind))
    # DataNodes keep checksums of their own: a bit is flipped by whoever wrote the file, not on its way.
    for path in rng.choices(files, k=NUM_ROUNDS):
        whole = store.read(path)
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        store.put(path, bytes(damaged))
        with pytest.raises(IntegrityError, match=path.rpartition("/")[2]):
            verify_dataset(open_dataset(root), deep=True).raise_if_failed()
        store.put(path, whole)
    path = rng.choice(shards)
    whole = store.read(path)
    store.put(path, whole[: len(whole) // 2])
    with pytest.raises(IntegrityError, match=f"{path.rpartition('/')[2]} (does not have|was altered)"):
        [read_all(root, name) for name in config.formats]
    store.put(path, whole)
    assert [read_all(root, name) for name in config.formats] == [60, 60]
    race_of_writers(root)


def test_what_a_killed_writer_left_is_found_and_removed(hdfs_root: str):
    store = open_store(hdfs_root)
    store.put("kept/file", b"1")
    store.put(f"cut/{TEMPORARY_PREFIX}0123", b"half")
    store.put("emptied/deep/x", b"1")
    store.put("emptied/y", b"1")
    store.delete("emptied/deep/x")
    assert {file.path for file in store.list_unpublished("")} == {f"cut/{TEMPORARY_PREFIX}0123"}, "folders went too"
    for file in list(store.list_unpublished("")):
        store.delete_unpublished(file)
    assert not list(store.list_unpublished("")) and {file.path for file in store.list("")} == {"kept/file", "emptied/y"}
    store.delete_unpublished(next(store.list("kept")))
    assert {file.path for file in store.list("")} == {"emptied/y"}


class AnswersAreLost:
    """A client whose renames are done, asked for again as hdfs-native does when the answer is lost, and not found."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def rename(self, *arguments: Any, **options: Any) -> None:
        for _ in range(2):
            self._client.rename(*arguments, **options)


def test_a_rename_whose_answer_was_lost_is_done(hdfs_root: str, monkeypatch: pytest.MonkeyPatch):
    connected = hdfs.connected
    monkeypatch.setattr(hdfs, "connected", lambda *place: AnswersAreLost(connected(*place)))
    store = open_store(hdfs_root)
    store.put("x", b"1")
    store.put("x", b"23")
    assert store.read("x") == b"23" and store.put_if_absent("y", b"4") and not store.put_if_absent("y", b"5")
    assert {file.path for file in store.list("")} == {"x", "y"} and not list(store.list_unpublished(""))


def test_another_users_files_are_refused_with_the_path(hdfs_root: str):
    # Folders of a store are readable to all and writable to their owner.
    open_store(hdfs_root).put("a", b"1")
    told = use_store(hdfs_root, HADOOP_USER_NAME="stranger")
    assert told["read"] == "b'1'" and told["list again"] == "['a']"
    refused = told["put_if_absent"]
    assert refused.startswith(
        f"StorageError: cannot access {hdfs_root}/manifest (1 bytes): Permission denied: user=stranger"
    )
    assert "\\n" not in refused and "org.apache" not in refused


def test_a_full_quota_is_reported_and_nothing_is_published(hdfs_root: str, hdfs_server: HdfsServer):
    store = open_store(hdfs_root)
    store.put("small", b"1")
    hdfs_server.set_space_quota("/" + hdfs_root.rpartition("/")[2], "1m")
    with pytest.raises(StorageError, match=rf"no space to write {hdfs_root}/large \(10 bytes\): .*quota"):
        store.put("large", b"0123456789")
    assert [file.path for file in store.list("")] == ["small"] and not list(store.list_unpublished(""))


@pytest.mark.starts("program")
def test_a_namenode_that_is_away_is_reported_at_once():
    told = use_store("hdfs://127.0.0.1:1/data")
    assert told["read"].startswith("StorageError: no NameNode answers at 127.0.0.1:1: Connection refused")
    told = use_store("hdfs:///data", HADOOP_CONF_DIR="/nowhere", HADOOP_HOME="/nowhere")
    assert told["read"].startswith("UsageError: no HDFS for hdfs:///") and "HADOOP_CONF_DIR" in told["read"]


def test_the_default_file_system_is_that_of_the_configuration(hdfs_root: str, hdfs_server: HdfsServer):
    open_store(hdfs_root).put("a", b"1")
    folder = hdfs_root.rpartition("/")[2]
    assert use_store(f"hdfs:///{folder}", HADOOP_CONF_DIR=str(hdfs_server.conf))["read"] == "b'1'"


def test_a_name_service_is_the_namenode_that_answers(hdfs_root: str, hdfs_server: HdfsServer, tmp_path: Path):
    """As after a failover; of two NameNodes that share their edits only the client's part is here."""
    open_store(hdfs_root).put("a", b"1")
    folder, address = hdfs_root.rpartition("/")[2], hdfs_server.uri.removeprefix("hdfs://")
    hosts = {f"dfs.namenode.rpc-address.pair.{name}": at for name, at in (("nn1", "127.0.0.1:1"), ("nn2", address))}
    write_settings(tmp_path / "core-site.xml", {"fs.defaultFS": "hdfs://pair"})
    write_settings(
        tmp_path / "hdfs-site.xml", {"dfs.nameservices": "pair", "dfs.ha.namenodes.pair": "nn1,nn2", **hosts}
    )
    told = use_store(f"hdfs://pair/{folder}", HADOOP_CONF_DIR=str(tmp_path))
    assert told["read"] == "b'1'" and told["put_if_absent"] == "True"
