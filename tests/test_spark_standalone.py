"""A Spark standalone cluster: ETL and training through spark-submit, executors that are killed, too few slots."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.maintenance.gc import Retention, collect_garbage
from shardmill.dataset.verify import verify_dataset
from shardmill.kernel import KERNEL_VERSION
from shardmill.stores import open_store
from tests.lab.commands import BIN, ENVIRONMENT
from tests.lab.datasets import write_images
from tests.lab.terminal import SPARK_LINES, Terminal
from tests.processes import LOCAL, listeners
from tests.services.lost_executor import (
    GATED_TORCH,
    MAY_RESTART,
    STOPS_IN_SECOND_UNIT,
    behind_gate,
    check_it_went_on,
    kill_an_executor,
    replace_an_executor,
    steps_of,
    wait_for_both_stopped,
)
from tests.services.marked import free_ports
from tests.services.slowed_attempt import SlowedAttempt
from tests.services.spark_standalone import NUM_SLOTS, SparkCluster, start_worker
from tests.services.spark_submit import Submitter, make_bundle, summary_of, to_standalone

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]

CONFIG = """
[source]
uri = "{folder}/images"
[dataset]
uri = "{folder}/{dataset}"
[etl]
image_size = 16
encoding = "png"
unit_min_images = 8
chunk_bytes = 8000
[train]
epochs = 4
global_batch_size = 24
num_streams = 6
num_workers = 2
label_smoothing = 0.1
record_samples = true
nics = ["lo"]
"""
# Without listed sizes: units of 15 images, and a shard for each image, so that a unit takes a while to publish.
SMALL_SHARDS = (
    "--set", "etl.resize_mode=none", "--set", "etl.unit_min_images=24", "--set", "etl.chunk_bytes=1",
    "--set", "etl.shard_max_bytes=40000",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, configs, our bundle, and `local`: the dataset that the local engine makes of the images."""
    folder = tmp_path_factory.mktemp("cluster")
    write_images(folder / "images", num_images=240)
    for dataset in ("local", "quiet", "killed"):
        (folder / f"{dataset}.toml").write_text(CONFIG.format(folder=folder, dataset=dataset))
    shutil.copy(GATED_TORCH, folder)
    make_bundle(folder)
    shardmill(folder, "etl", "local.toml", "--set", "etl.engine=local")
    return folder


@pytest.fixture
def submitter(folder: Path, spark_cluster: SparkCluster) -> Submitter:
    return to_standalone(spark_cluster, folder, folder / "shardmill.zip", GATED_TORCH)


def shardmill(folder: Path, *arguments: str) -> dict:
    done = subprocess.run(
        [BIN / "shardmill", *arguments, "--json"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_killed_executor_costs_the_etl_time_and_nothing_else(
    folder: Path, submitter: Submitter, spark_cluster: SparkCluster
):
    etl = submitter.start(
        "etl/job.py", "--config", "killed.toml", "--workdir", "work", "--run-id", "killed", **STOPS_IN_SECOND_UNIT
    )
    wait_for_both_stopped(spark_cluster, etl)
    assert len(list(folder.glob("killed/pending/*.json"))) > 1
    # Executors have our code as the bundle, and nowhere else.
    roots = {Path(arguments[4]).name for arguments in spark_cluster.processes("etl.engines.unit_worker").values()}
    assert roots == {"shardmill.zip"}
    # Everybody on a node can read command lines.
    assert spark_cluster.processes("org.apache.spark") and not spark_cluster.processes(spark_cluster.secret)
    replace_an_executor(spark_cluster, etl)
    assert etl.wait() == 0, etl.output

    summary = summary_of(folder / "work", "killed")
    assert summary["etl"]["num_task_retries"] >= 1
    assert summary["dataset"]["content_digest"] == open_dataset(f"{folder}/local").manifest.content_digest


def test_of_two_attempts_at_a_unit_one_is_committed_and_gc_removes_the_other(
    folder: Path, submitter: Submitter, spark_cluster: SparkCluster
):
    """Speculation: Spark tries again, beside it, what takes much longer than the other tasks."""
    write_images(folder / "large", num_images=240, image_size=128)
    # A table tells no sizes, so that units are planned by a guess: each then fills many shards.
    images = sorted((folder / "large").rglob("*.*"))
    rows = "".join(f"{each.relative_to(folder)},{each.parent.name}\n" for each in images)
    (folder / "large.csv").write_text("path,label\n" + rows)
    chosen = (*SMALL_SHARDS, "--set", f"source.uri={folder}/large.csv", "--set", "source.kind=table")
    shardmill(folder, "etl", "local.toml", *chosen, "--set", f"dataset.uri={folder}/once", "--set", "etl.engine=local")
    slowed = SlowedAttempt(spark_cluster, folder / "slowed")
    # It does so on another host only.
    other_host = start_worker(spark_cluster, NUM_SLOTS, *free_ports(1), host="127.0.0.2")
    try:
        etl = submitter.start(
            "etl/job.py", "--config", "local.toml", "--workdir", "work", "--run-id", "twice", *chosen,
            "--set", f"dataset.uri={folder}/twice", **slowed.settings(),
            spark__speculation="true", spark__speculation__interval="50ms", spark__speculation__quantile="0.5",
        )  # fmt: skip
        first, second = slowed.slow_down(folder / "twice", etl)
        assert etl.wait() == 0, etl.output
    finally:
        os.killpg(other_host.pid, signal.SIGKILL)
        other_host.wait()
    assert (first["Speculative"], second["Speculative"]) == (False, True) and first["Host"] != second["Host"]
    assert not spark_cluster.processes("etl.engines.unit_worker")
    # Spark ended the lost attempt itself: nothing has failed.
    assert summary_of(folder / "work", "twice")["etl"]["num_task_retries"] == 0

    dataset = open_dataset(f"{folder}/twice")
    assert dataset.manifest.content_digest == open_dataset(f"{folder}/once").manifest.content_digest
    verify_dataset(dataset, deep=True).raise_if_failed()
    store, named = (
        open_store(dataset.pin.uri),
        {path for each in dataset.shards for path in (each.path, each.rows_path)},
    )
    assert named < {file.path for name in ("shards", "rows") for file in store.list(name)}
    collect_garbage(store, Retention(None, 0.0), "gc")
    assert named == {file.path for name in ("shards", "rows") for file in store.list(name)}
    assert not list(store.list("pending"))
    verify_dataset(dataset, deep=True).raise_if_failed()


@pytest.fixture
def on_cluster(folder: Path, spark_cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options with which a command of the command line builds on the cluster."""
    monkeypatch.setitem(ENVIRONMENT, "SPARK_CONF_DIR", str(spark_cluster.conf))
    monkeypatch.setitem(ENVIRONMENT, "SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setitem(ENVIRONMENT, "PYSPARK_PYTHON", sys.executable)
    conf = {"submit.pyFiles": str(folder / "shardmill.zip"), "executor.memory": "512m"}
    settings = {"spark.master": spark_cluster.master, **{f"spark.etl.conf.spark.{key}": conf[key] for key in conf}}
    return [part for item in settings.items() for part in ("--set", "=".join(item))]


@pytest.mark.exhaustive
def test_the_command_line_on_a_cluster_shows_nothing_of_sparks(folder: Path, on_cluster: list[str]):
    terminal = Terminal(BIN / "shardmill", "etl", "quiet.toml", "--run-id", "quiet", *on_cluster, cwd=folder)
    terminal.process.wait(200)
    shown = terminal.text()
    assert terminal.process.returncode == 0, shown
    assert "etl: done" in shown and not SPARK_LINES.search(shown), shown
    digests = {open_dataset(f"{folder}/{name}").manifest.content_digest for name in ("quiet", "local")}
    assert len(digests) == 1
    assert "WARN" in (folder / "shardmill-work/runs/quiet/spark.log").read_text()


@pytest.mark.exhaustive
def test_executors_without_the_drivers_kernel_are_named_before_any_work(folder: Path, on_cluster: list[str]):
    # Modules of the kernel's name: on the driver one that stands for it, on executors one that cannot be imported.
    driver = f"KERNEL_ID = 'native-{KERNEL_VERSION}+drill'"
    for place, text in {"driver": driver, "executors": "raise ImportError('not built')"}.items():
        (folder / place).mkdir()
        (folder / place / "shardmill_native.py").write_text(text)
    elsewhere = [f"dataset.uri={folder}/refused", f"spark.etl.conf.spark.executorEnv.PYTHONPATH={folder}/executors"]
    options = [*on_cluster, *(part for each in elsewhere for part in ("--set", each))]
    done = subprocess.run(
        [BIN / "shardmill", "etl", "quiet.toml", "--run-id", "refused", *options], cwd=folder, capture_output=True,
        env={**ENVIRONMENT, "PYTHONPATH": f"{folder}/driver:{ENVIRONMENT['PYTHONPATH']}"}, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"kernel is missing on {socket.gethostname()}: " in done.stderr and "etl.kernel = wheels" in done.stderr
    assert not list((folder / "refused").glob("pending/*"))


def test_horovod_on_the_cluster_gives_the_weights_of_local_ranks(
    folder: Path, submitter: Submitter, spark_cluster: SparkCluster
):
    """A rank on each executor is what `auto` chooses for a training that is long enough."""
    chosen = ["--set", "train.strategy=horovod", "--set", "train.model=small_cnn", "--set", "train.epochs=13"]
    train = submitter.start(
        "train/job.py", "--config", "local.toml", "--workdir", "work", "--run-id", "horovod", "--until", "train",
        *chosen, "--set", "train.launcher=horovod_spark", "--set", "train.num_workers=0",
        spark__cores__max="2", spark__executor__cores="1",
    )  # fmt: skip
    seen = set()
    while train.process.poll() is None:
        seen |= listeners(spark_cluster.mark)
        time.sleep(0.3)
    assert train.wait() == 0, train.output
    # Executors, the driver's own services, its watchdog, and of the ranks what was seen of them.
    assert {each.is_spark for each in seen} == {True, False} and {each.address for each in seen} <= LOCAL, seen

    shardmill(folder, "train", "local.toml", "--run-id", "here", *chosen, "--set", "train.launcher=local")
    there, here = (summary_of(folder / work, run)["train"]
                   for work, run in (("work", "horovod"), ("shardmill-work", "here")))  # fmt: skip
    assert (there["launcher"], there["world_size"]) == ("horovod_spark", 2)
    assert "has slots for 2 ranks" in there["strategy_reason"]
    assert there["weights_sha256"] == here["weights_sha256"]
    assert steps_of(folder / "work", "horovod") == steps_of(folder / "shardmill-work", "here")


@pytest.mark.exhaustive
def test_a_training_continues_after_its_executor_was_killed(
    folder: Path, submitter: Submitter, spark_cluster: SparkCluster
):
    chosen = ["--set", "train.strategy=torch_ddp", "--set", "train.model=gated_torch:net"]
    train = submitter.start(
        "train/job.py", "--config", "local.toml", "--workdir", "work", "--run-id", "barrier", "--until", "train",
        *chosen, *MAY_RESTART, **behind_gate(submitter, "barrier"),
    )  # fmt: skip
    kill_an_executor(spark_cluster.mark, train, folder / "work", "barrier")
    shardmill(
        folder, "train", "local.toml", "--run-id", "alone", *chosen, "--set", "train.num_workers=1",
        "--set", "train.strategy=single",
    )  # fmt: skip
    assert train.wait() == 0, train.output
    # The launcher was not named: spark-submit's master is a cluster, whatever the config says.
    alone = steps_of(folder / "shardmill-work", "alone")
    check_it_went_on(folder / "work", "barrier", "spark_barrier", alone)


def test_more_ranks_than_slots_are_refused_with_both_numbers(folder: Path, submitter: Submitter):
    line = refusal(submitter, "few", "horovod_spark", "--set", "train.num_workers=4")
    assert line.startswith("ERROR 2: a training of 4 ranks, but Spark at 'spark://127.0.0.1")
    assert "has 2 slot(s)" in line and "more executors or cores" in line


@pytest.mark.exhaustive
def test_dynamic_allocation_is_refused_under_a_barrier(folder: Path, submitter: Submitter):
    dynamic = {
        "spark__dynamicAllocation__enabled": "true",
        "spark__dynamicAllocation__shuffleTracking__enabled": "true",
    }
    line = refusal(submitter, "dynamic", "spark_barrier", **dynamic)
    assert line.startswith("ERROR 2:") and "set spark.dynamicAllocation.enabled = false" in line


def refusal(submitter: Submitter, run_id: str, launcher: str, *chosen: str, **conf: str) -> str:
    """The one line with which a training ends that cannot start."""
    train = submitter.run(
        "train/job.py", "--config", "local.toml", "--workdir", "work", "--run-id", run_id, "--until", "train",
        "--fresh", "--set", "train.strategy=horovod", "--set", f"train.launcher={launcher}", *chosen, **conf,
    )  # fmt: skip
    assert train.process.returncode == 2, train.output
    [line] = [line for line in train.our_lines() if line.startswith("ERROR")]
    return line


@pytest.mark.exhaustive
def test_a_worker_with_another_secret_is_not_let_in(spark_cluster: SparkCluster, tmp_path: Path):
    stranger = replace(spark_cluster, folder=tmp_path, secret="guessed")
    stranger.write_conf()
    worker = start_worker(stranger, 0, *free_ports(1))
    said = tmp_path / "servers.log"
    try:
        deadline = time.monotonic() + 120
        is_over = False
        while "Exception while bootstrapping client" not in said.read_text():
            assert not is_over, said.read_text()[-3000:]
            is_over = time.monotonic() > deadline or worker.poll() is not None
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    assert "Successfully registered" not in said.read_text()
    assert spark_cluster.num_workers() == NUM_SLOTS
