"""Every row of `shardmill doctor` that no other test provokes: what makes it fail or warn, and its fix."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.config import load_pipeline
from pipeline.doctor.doctor import diagnose, examine, rehearsed
from pipeline.doctor.finding import found_by
from pipeline.doctor.network import network_findings
from pipeline.tree import PipelineTree
from shardmill.calls.results import Finding
from shardmill.errors import ShardmillError, StorageError
from shardmill.jobs.config import SparkConfig, load_tree
from shardmill.jobs.spark import spark_context
from shardmill.registry import Entry, install_hint
from tests.lab.datasets import make_dataset, write_images
from tests.services.faulty_store import FaultyStore
from tests.services.marked import free_ports
from train.backends.frameworks import gpu_problem
from train.launching.devices import CUDA_VARIABLE
from train.optimizers import OPTIMIZERS
from train.planning.setup import resolve

NOT_OURS = "198.51.100.7"
"""An address of nobody's (RFC 5737)."""
READ_ONLY = "/proc/work"
"""A folder that root may not make, either."""
MASTER = "spark.master=spark://127.0.0.1:1"


def rows(*overrides: str) -> dict[str, Finding]:
    """By subject, without a config file. Where nothing can be written, nothing waits for the disk either."""
    return {each.subject: each for each in examine(load_tree(PipelineTree, None, overrides), READ_ONLY)}


def network_rows(*overrides: str) -> dict[str, Finding]:
    tree = load_tree(PipelineTree, None, overrides)
    return {each.subject: each for each in network_findings(tree, resolve(tree.train, tree.spark))}


def rows_of_images(folder: Path, *overrides: str) -> dict[str, Finding]:
    """By subject, for a source of images."""
    write_images(folder / "images", num_images=20, num_classes=2)
    tree = load_pipeline(str(folder / "images"), overrides, str(folder / "work"))
    return {each.subject: each for each in examine(tree, str(folder / "work"))}


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port of loopback on which another process might listen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def java_of(folder: Path, script: str) -> Path:
    """A JAVA_HOME whose `java` is this shell script."""
    java = folder / "bin/java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return folder


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'openjdk version \"11.0.2\" 2019-01-15' >&2",
            'openjdk version "11.0.2" 2019-01-15; Spark 4 needs 17 or',
        ),
        ("exit 1", "unknown; Spark 4 needs 17 or 21"),
    ],
)
def test_a_java_that_spark_cannot_use_is_reported(script: str, said: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(java_of(tmp_path, script)))
    # With the last, the engine and the launcher, both `auto`, are Spark's.
    for overrides, status in ([], "ok"), (["etl.engine=spark"], "fail"), ([MASTER, "train.num_workers=2"], "fail"):
        found = rows(*overrides)["java"]
        assert found.status == status and said in found.found and "JAVA_HOME" in found.fix


@pytest.mark.starts("program")
def test_a_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = rows()["g++"]
    assert (found.status, found.fix) == ("ok", "apt-get install -y g++") and "Horovod" in found.found


@pytest.mark.starts("program")
def test_a_package_that_only_another_choice_needs_is_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = Entry("no_such_package:X", "", extra="brand_new", packages=("no_such_package",))
    monkeypatch.setitem(OPTIMIZERS.entries, "brand_new", entry)
    found = rows()["no_such_package"]
    assert found.status == "ok" and found.found.endswith("only needed by train.optimizer = brand_new")
    assert found.fix == install_hint("brand_new")
    chosen = rows("train.optimizer=brand_new")
    assert chosen["train.optimizer"].status == "fail" and "no_such_package" not in chosen


@pytest.mark.starts("program")
def test_two_releases_in_one_folder_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours = metadata.version("pyspark")
    for version, status in (ours, "ok"), ("4.2.0", "warn"):
        client = tmp_path / version / f"pyspark_client-{version}.dist-info"
        client.mkdir(parents=True)
        (client / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pyspark-client\nVersion: {version}\n")
        (client / "top_level.txt").write_text("pyspark\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(client.parent)
            found = rows()["pyspark"]
        assert found.status == status and f"pyspark {ours}, pyspark-client {version}" in found.found
    assert f"pip install --force-reinstall --no-deps pyspark=={ours}" in found.fix


@pytest.mark.starts("program")
def test_with_pytorch_alone_the_default_model_is_that_module(monkeypatch: pytest.MonkeyPatch):
    for name in ("tensorflow", "keras"):
        # As for `import`, there is no such package.
        monkeypatch.setitem(sys.modules, name, None)
    for overrides, status, said in (
        ([], "ok", "small_cnn: the same model in PyTorch"),
        (
            ["train.backend=keras"],
            "fail",
            "small_cnn (a few convolutions, for small images and CPUs) needs keras, which is",
        ),
    ):
        found = examine(load_tree(PipelineTree, None, tuple(overrides)), READ_ONLY)
        first = next(each for each in found if each.subject == "train.model")
        assert (first.status, first.found.startswith(said)) == (status, True), first


@pytest.mark.starts("program")
def test_a_workdir_that_cannot_be_written_to_is_reported():
    found = {each.subject: each for each in diagnose("", (), READ_ONLY)}["--workdir"]
    assert found.status == "fail" and READ_ONLY in found.found and found.fix


@pytest.mark.starts("program")
@pytest.mark.parametrize("place", ["dataset", "models"])
def test_a_store_that_cannot_be_committed_to_is_reported(place: str, tmp_path: Path, faulty):
    def both_win(store: FaultyStore, path: str, data: bytes) -> bool:
        store.sound.put(path, data)
        return True

    def gone(store: FaultyStore, path: str) -> None:
        raise StorageError(f"no answer about {path}")

    where = f"{place}.uri=faulty://{tmp_path / place}"
    faulty["put_if_absent"] = both_win
    found = rows_of_images(tmp_path, where)[f"{place}.uri"]
    assert (
        found.status == "fail"
        and ("let a second writer replace a file") in found.found
        and "If-None-Match" in found.fix
    )

    del faulty["put_if_absent"]
    faulty["stat"] = gone
    clock = rows_of_images(tmp_path, where)[f"clock of {place}.uri"]
    assert clock.status == "fail" and "no answer about " in clock.found and clock.fix
    assert rows(f"{place}.uri=/proc/nowhere")[f"{place}.uri"].status == "fail"


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("overrides", "subject", "said", "fix"),
    [
        (["etl.resize_mode=shorter"], "etl.resize_mode", "one shape", "crop, pad or stretch"),
        (["etl.engine=absent:ENGINE"], "etl", "absent", ""),
        (
            ["train.num_workers=4", "train.launcher=spark_barrier", "spark.master=local[2]"],
            "train.num_workers",
            "runs 2 task(s) at a time; expected at least 4 slots",
            'set spark.master = "local[4]"',
        ),
        (['train.nics=["lo", "nosuch0"]'], "train.nics", "no interface 'nosuch0'", "leave train.nics empty"),
    ],
)
def test_impossible_settings_have_a_row_with_their_fix(overrides: list[str], subject: str, said: str, fix: str):
    found = rows(*overrides)[subject]
    assert found.status == "fail" and said in found.found and fix in found.fix, found


@pytest.mark.starts("program")
def test_more_ranks_than_cores_are_reported():
    num_workers = (os.cpu_count() or 1) + 1
    sizes = (f"train.num_streams={num_workers}", f"train.global_batch_size={num_workers}")
    found = rows("train.launcher=local", f"train.num_workers={num_workers}", *sizes)["slots"]
    assert found.status == "warn" and f"{num_workers} ranks" in found.found and "fewer workers" in found.fix
    assert rows()["slots"].status == "ok"


@pytest.mark.starts("program")
def test_fewer_gpus_than_ranks_are_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CUDA_VARIABLE, "0")
    how = ("train.strategy=torch_ddp", "train.launcher=local", "train.num_workers=2")
    found = rows(*how)["devices"]
    said = gpu_problem("torch") or "ranks 0 and 1 would share GPU 0"
    found = found if not gpu_problem("torch") else rows(*how, "train.devices=gpu")["devices"]
    assert found.status == "fail" and said in found.found and "train.devices" in found.fix + found.found


def test_the_gate_of_attached_ranks_is_tried(monkeypatch: pytest.MonkeyPatch, taken: socket.socket):
    def row(port: int, host: str, rank: int | None) -> Finding:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
            monkeypatch.delenv(name, raising=False)
            if rank is not None:
                monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        where = (f"train.attach.port={port}", f"train.attach.host={host}")
        return network_rows("train.launcher=attach", "train.num_workers=2", *where)["train.attach.port"]

    free, busy = free_ports(1)[0], taken.getsockname()[1]
    assert row(free, "127.0.0.1", None).status == row(free, "", None).status == "ok"
    # Another rank than 0 calls that port, and does not listen there. Neither host reaches the other so.
    for found in row(free, "127.0.0.1", 0), row(busy, "127.0.0.1", 1):
        assert found.status == "warn" and "a loopback address" in found.found and "train.attach.host" in found.fix
    for rank in None, 0:
        found = row(busy, "127.0.0.1", rank)
        assert found.status == "fail" and f"127.0.0.1:{busy}: Address already in use" in found.found
        assert "train.attach.port" in found.fix
    assert row(busy, "", None).status == "warn"
    assert row(free, NOT_OURS, None).status == "ok" and row(free, NOT_OURS, 0).status == "fail"
    assert row(free, "no-such-host.invalid", 1).status == "fail"
    silent = row(free, "", 0)
    assert (
        silent.status == "fail" and "rank 0's host is unknown" in silent.found and silent.fix == "set train.attach.host"
    )


def on_spark(settings: dict[str, object], *overrides: str) -> dict[str, Finding]:
    conf = ", ".join(f'"{name}" = "{value}"' for name, value in settings.items())
    return network_rows("etl.engine=spark", f"spark.etl.conf={{{conf}}}", *overrides)


def test_ports_that_spark_is_to_listen_on_are_tried(taken: socket.socket):
    busy = taken.getsockname()[1]
    name = "spark.driver.port"

    def row(port: int, **settings: object) -> Finding:
        return on_spark({name: port, **settings})[f"spark.etl.conf: {name}"]

    assert row(free_ports(1)[0]).status == "ok"
    moved = row(busy)
    assert moved.status == "warn" and f"{busy} of 127.0.0.1 is taken: Spark would listen on " in moved.found
    stuck = row(busy, **{"spark.port.maxRetries": 0})
    assert stuck.status == "fail" and stuck.found == f"{busy} of 127.0.0.1 is taken" and "maxRetries" in stuck.fix
    assert row(80).status == row(70_000).status == "fail"
    assert f"spark.etl.conf: {name}" not in on_spark({name: 0})


@pytest.mark.starts("program")
def test_a_driver_that_cannot_be_called_is_reported():
    def row(*overrides: str, **settings: object) -> Finding:
        named = {f"spark.driver.{name}": value for name, value in settings.items()}
        return on_spark(named, *overrides)["spark.etl.conf: driver"]

    assert rows("etl.engine=spark")["spark.etl.conf: driver"] == row(), "doctor shows these rows"
    assert row().found == "listens on 127.0.0.1 and is reachable at 127.0.0.1 (127.0.0.1)"
    assert row(MASTER, host="127.0.0.1").status == "ok", "the master is on this machine, too"
    unknown = row(MASTER, host="no-such-host.invalid")
    assert unknown.status == "fail" and "has no address" in unknown.found and "spark.driver.host" in unknown.fix
    foreign = row(MASTER, host=NOT_OURS)
    assert foreign.status == "fail" and f"cannot listen on {NOT_OURS}" in foreign.found
    # Only loopback answers, on another of its addresses than the one that is listened on.
    deaf = row(MASTER, host="127.0.0.2", bindAddress="127.0.0.1")
    assert deaf.status == "warn" and "cannot be reached from here at 127.0.0.2" in deaf.found
    itself = row(f"spark.master=spark://{NOT_OURS}:7077", host="127.0.0.1")
    assert itself.status == "warn" and "on another host is that host itself" in itself.found


def test_a_spark_master_that_is_not_there_is_reported(taken: socket.socket):
    def row(addresses: str) -> Finding:
        return network_rows("etl.engine=spark", f"spark.master=spark://{addresses}")["spark.master"]

    there, gone = f"127.0.0.1:{taken.getsockname()[1]}", f"127.0.0.1:{free_ports(1)[0]}"
    assert row(there).status == row(f"{gone},{there}").status == "ok"
    for wrong, why, fix, code in (
        (gone, f"no Spark master answers at {gone}: Connection refused", "start it, ", 4),
        (f"{gone},{gone}", f"no Spark master answers at {gone},{gone}: Connection refused", "start it, ", 4),
        ("127.0.0.1", "spark.master = 'spark://127.0.0.1'; expected spark://HOST:PORT", "correct the address", 2),
        ("127.0.0.1:x", "spark.master = 'spark://127.0.0.1:x'; expected spark://HOST:PORT", "correct the address", 2),
        ("no-such-host.invalid:7077", "no Spark master answers at no-such-host.invalid:7077: ", "start it, ", 4),
    ):
        found = row(wrong)
        assert found.status == "fail" and found.found.startswith(why) and found.fix.startswith(fix)
        # A run asks before it starts a JVM, which would try for a minute.
        with pytest.raises(ShardmillError) as refused, spark_context("x", SparkConfig(master=f"spark://{wrong}"), {}):
            pass
        assert (refused.value.exit_code, found_by(refused.value)) == (code, found.found)


def test_local_paths_that_executors_on_other_hosts_would_need_are_reported(tmp_path: Path):
    there = f"spark.master=spark://{NOT_OURS}:7077"
    paths = (f"source.uri={tmp_path}", f"dataset.uri={tmp_path / 'd'}")

    def shown(*overrides: str) -> dict[str, Finding]:
        return {name: each for name, each in network_rows(*overrides).items() if "on other hosts need" in each.found}

    found = shown(there, *paths)
    assert set(found) == {"source.uri on executors", "dataset.uri on executors"}
    source = found["source.uri on executors"]
    assert source.status == "warn" and source.found.endswith(f" {tmp_path}") and "s3://" in source.fix
    assert not shown(there, "source.uri=s3://bucket/images", "dataset.uri=hdfs:///d")
    # All executors are here.
    assert not shown(*paths) and not shown(MASTER, *paths) and not shown("spark.master=local-cluster[2,1,1024]", *paths)
    # No task reads or writes there.
    assert set(shown(there, *paths, "etl.engine=local", "train.num_workers=2")) == {"dataset.uri on executors"}
    assert not shown(there, *paths, "etl.engine=local", "train.num_workers=1")


@pytest.mark.starts("program")
def test_the_cores_of_this_machine_are_shown_only_for_ranks_that_run_on_it():
    on_cluster = rows("spark.master=spark://a:7077", "train.num_workers=2", "train.launcher=spark_barrier")["slots"]
    assert (on_cluster.status, on_cluster.found) == ("ok", "2 ranks by launcher spark_barrier")
    assert "cores here" in rows()["slots"].found


@pytest.mark.drill
@pytest.mark.parametrize("launcher", ["spark_barrier", "horovod_spark"])
def test_ranks_meet_on_spark_for_one_step(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    how = (f"train.launcher={launcher}", "train.num_workers=2", "spark.master=local[2]", "train.strategy=horovod")
    sizes = ("train.global_batch_size=12", "train.num_streams=12")
    where = (f"dataset.uri={make_dataset(tmp_path, num_images=60, num_classes=3)}", "models.uri=models")
    found = rehearsed([], "", (*how, *sizes, *where), "work")
    assert found.status == "ok" and found.found.startswith(f"2 ranks by {launcher}, strategy horovod: "), found
    assert not [path for path in Path("models").rglob("*") if path.is_file()]
