"""Spark Connect, which has no RDDs, and sessions that a caller lends: the datasets and weights of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardmill
from etl.engines import spark
from etl.job import build_dataset
from shardmill.applications import OnExecutor
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import StorageError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.open_spark import open_spark
from shardmill.jobs.spark_connect import connected
from shardmill.jobs.spark_tasks import Tasks
from tests.etl.building import COLLIDING, ETL, digests, tree_for
from tests.lab.datasets import build_here, write_images
from tests.services.marked import free_ports
from train.launching.horovod_spark import check_horovod_spark

pytestmark = pytest.mark.drill
ON_SPARK = ETL.model_copy(update={"engine": "spark"})
NUMBERS = {"number": "bigint", "place": "bigint"}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", num_images=160)
    (tmp_path / "images" / "class_0" / "broken.jpg").write_bytes(b"<html>not found</html>")
    return tmp_path


def test_a_server_makes_the_dataset_that_this_machine_makes(images: Path, spark_connect: str, monkeypatch):
    """Also with two keys of one hash, which a group-by must find."""
    monkeypatch.setattr(spark, "MIN_ROWS", 0)
    (images / "images" / "a").mkdir()
    for key in COLLIDING:
        (images / "images" / key).write_bytes((images / "images" / "class_0" / "00000.png").read_bytes())
    here = open_dataset(build_here(str(images / "images"), str(images / "here"), ETL)).manifest
    outcome = build_dataset(tree_for(images, "there", SparkConfig(master=spark_connect), ON_SPARK), run_id="r")
    assert (*digests(outcome), outcome.num_task_retries) == (here.content_digest, here.layout_digest, 0)
    assert outcome.num_units > 4

    # Of a task that fails, the error is its own.
    (images / "wrong").mkdir()
    (images / "wrong" / "shards").write_bytes(b"a file where a folder must be")
    with pytest.raises(StorageError, match="cannot access .*/wrong/shards"):
        build_dataset(tree_for(images, "wrong", SparkConfig(master=spark_connect), ON_SPARK), run_id="r")


def test_each_payload_is_a_task_and_a_cancelled_job_leaves_the_session_as_it_was(spark_connect: str, tmp_path: Path):
    begun = str(tmp_path / "begun")

    def where(payloads: Iterable[bytes]) -> Iterator[tuple[int, int]]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from ((int(payload), context.partitionId()) for payload in payloads)

    def stand_still(_: Iterable[bytes]) -> Iterator[tuple[int, int]]:
        with open(begun, "w"):
            time.sleep(600)
        yield 0, 0

    cluster = connected(spark_connect)
    tasks = Tasks(OnExecutor(where), NUMBERS, 37, [b"%d" % number for number in range(37)])
    standing = cluster.start(Tasks(OnExecutor(stand_still), NUMBERS, 1))
    while not Path(begun).exists():
        assert not standing.wait(0.1)
    beside = cluster.start(tasks)
    standing.cancel()
    assert standing.wait(300)
    with pytest.raises(Exception, match=r"(?i)cancel|interrupt"):
        standing.result()
    assert sorted(beside.result()) == [(number, number) for number in range(37)]


def test_what_spark_connect_cannot_do_is_one_line(spark_connect: str):
    there = SparkConfig(master=spark_connect)
    with pytest.raises(UsageError, match=r"horovod_spark' with Spark Connect; .*set train.launcher = 'spark_barrier'"):
        check_horovod_spark(2, there)
    conf = {"spark.executor.memory": "2g"}
    with pytest.raises(UsageError, match=r"sets spark.executor.memory for a Spark that has started already"):
        open_spark("test", there, conf).__enter__()
    [port] = free_ports(1)
    with pytest.raises(StorageError, match=rf"^no server of Spark Connect answers at 127.0.0.1:{port}: .*refused"):
        open_spark("test", SparkConfig(master=f"sc://127.0.0.1:{port}/;token=secret"), {}).__enter__()
    with pytest.raises(UsageError, match=r"^spark.master = 'sc://host:no'; expected sc://HOST:PORT"):
        open_spark("test", SparkConfig(master="sc://host:no"), {}).__enter__()
    with pytest.raises(UsageError, match=r"^spark = 'local'; expected a SparkSession"):
        shardmill.etl("images", spark="local", quiet=True)  # pyright: ignore[reportArgumentType]


@pytest.fixture(params=["context", "connect"])
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    """As a notebook has one."""
    if request.param == "connect":
        from pyspark.sql.connect.session import SparkSession as ConnectSession

        yield ConnectSession.builder.remote(request.getfixturevalue("spark_connect")).create()
    else:
        from pyspark.sql import SparkSession

        found = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        yield found
        found.stop()


def test_a_notebooks_session_does_the_work_and_goes_on(images: Path, session: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(images)
    etl = {"image_size": 16, "encoding": "png", "unit_min_images": 20, "chunk_bytes": 8_000, "formats": ETL.formats}
    found = shardmill.etl("images", spark=session, etl=etl, quiet=True)
    here = open_dataset(build_here(str(images / "images"), str(images / "here"), ETL)).manifest
    assert found.manifest.content_digest == here.content_digest
    assert found.manifest.layout_digest == here.layout_digest
    assert session.range(3).count() == 3

    model = "tests.train.torch_models:smooth"
    train = {"model": model, "strategy": "torch_ddp", "num_workers": 2, "epochs": 1, "global_batch_size": 32}
    trained = [
        shardmill.train("shardmill-work/dataset", workdir=name, quiet=True, train={**train, "launcher": name}, **more)
        for name, more in (("spark_barrier", {"spark": session}), ("local", {}))
    ]
    there, alone = (result.summary["train"] for result in trained)
    assert (there["launcher"], there["world_size"]) == ("spark_barrier", 2)
    assert there["weights_sha256"] == alone["weights_sha256"]
    assert session.range(3).count() == 3
