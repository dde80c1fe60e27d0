"""YARN over HDFS: ETL and training in client and in cluster mode, executors that are killed, what an exit code says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from etl.config import EtlConfig
from shardmill.dataset.dataset import Dataset, open_dataset
from tests.canaries import DRIVERS_OWN, SECRET_SETTINGS, files_with_canaries, toml_table
from tests.lab.commands import shardmill
from tests.lab.datasets import build_here, upload, write_images
from tests.lab.scale import exhaustive
from tests.services.hadoop import pyspark_jars
from tests.services.lost_executor import (
    GATED_KERAS,
    GATED_TORCH,
    MAY_RESTART,
    Steps,
    behind_gate,
    check_it_went_on,
    kill_an_executor,
    steps_of,
)
from tests.services.marked import MARK, QUICK_JVM, free_ports
from tests.services.packed_environment import NAME, pack_environment
from tests.services.spark_submit import Submitter, make_bundle, summary_of
from tests.services.watch import ON_EXECUTORS, watching
from tests.services.yarn import YarnCluster

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]
# Of YARN a drill runs one chain: ETL and training in cluster mode, an executor that is killed, an exit code.

CONFIG = """
[source]
uri = "{root}/images"
[dataset]
uri = "{root}/{dataset}"
[models]
uri = "{root}/models"
[etl]
image_size = 16
encoding = "png"
unit_min_images = 20
chunk_bytes = 8000
[train]
epochs = 2
global_batch_size = 24
num_streams = 6
num_workers = 2
strategy = "horovod"
launcher = "horovod_spark"
nics = ["lo"]
"""
CLUSTER_MODE = ("--deploy-mode", "cluster", "--files", "cluster.toml")
IN_MODE = {"cluster": CLUSTER_MODE, "client": ("--conf", "spark.driver.host=127.0.0.1")}
# Sixteen steps with a loss that stays away from 0, where a relative bound means nothing.
RECORDED = ("train.epochs=4", "train.label_smoothing=0.1", "train.record_samples=true")


@pytest.fixture(scope="module")
def root(yarn_cluster: YarnCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of HDFS with images in it."""
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, num_images=120)
    root = f"{yarn_cluster.hdfs.uri}/yarn"
    upload(folder, f"{root}/images")
    return root


@pytest.fixture(scope="module")
def submitter(root: str, yarn_cluster: YarnCluster, tmp_path_factory: pytest.TempPathFactory) -> Submitter:
    folder = tmp_path_factory.mktemp("submitted")
    (folder / "cluster.toml").write_text(CONFIG.format(root=root, dataset="cluster"))
    for file in (GATED_TORCH, GATED_KERAS):
        shutil.copy(file, folder)
    conf = {
        # The nodes have pyspark where we have it; else every application uploads its jars.
        "spark.yarn.jars": f"local:{pyspark_jars()}/*",
        "spark.executor.instances": "2",
        "spark.driver.memory": "512m",
        "spark.yarn.am.memory": "512m",
        "spark.yarn.am.extraJavaOptions": " ".join(QUICK_JVM),
        "spark.yarn.report.interval": "200ms",
        "spark.yarn.scheduler.heartbeat.interval-ms": "500",
    }
    environment = {"HADOOP_CONF_DIR": str(yarn_cluster.conf), "SPARK_LOCAL_IP": "127.0.0.1", MARK: yarn_cluster.mark}
    return Submitter("yarn", environment, conf, (make_bundle(folder), GATED_TORCH, GATED_KERAS), folder)


@pytest.fixture(scope="module")
def dataset(root: str, submitter: Submitter, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """What the ETL in cluster mode commits: the driver is in a container too; all have the packages that we sent."""
    archive = pack_environment(tmp_path_factory.mktemp("packed"))
    etl = submitter.run(
        "etl/job.py", "--config", "cluster.toml", "--workdir", f"{root}/work", "--run-id", "cluster",
        options=(*CLUSTER_MODE, "--archives", f"{archive}#{NAME}"),
        # Relative to a container's working directory: nothing else has it.
        spark__pyspark__python=f"{NAME}/bin/python",
    )  # fmt: skip
    assert etl.process.returncode == 0, etl.output
    return open_dataset(f"{root}/cluster")


@pytest.mark.exhaustive
def test_the_etl_gives_in_both_modes_what_it_gives_here_and_no_secret_is_shown(
    root: str, dataset: Dataset, submitter: Submitter, yarn_cluster: YarnCluster, tmp_path: Path
):
    """But for the archive of settings that Spark itself puts beside containers, in folders of their user alone."""
    [ui_port] = free_ports(1)
    events = tmp_path / "events"
    events.mkdir()
    conf = {
        # Those of executors' environments are in the scripts with which YARN starts containers.
        **{name: value for name, value in SECRET_SETTINGS.items() if "executorEnv" not in name},
        "spark.ui.enabled": "true",
        "spark.ui.port": str(ui_port),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.logConf": "true",
    }
    config = CONFIG.format(root=root, dataset="client") + f"[spark.etl]\nconf = {toml_table(conf)}\n"
    (tmp_path / "client.toml").write_text(config)
    with_secrets = replace(submitter, environment={**submitter.environment, **DRIVERS_OWN})
    with watching(yarn_cluster.mark, ui_port, DRIVERS_OWN["HF_TOKEN"]) as watch:
        client = with_secrets.run(
            "etl/job.py", "--config", str(tmp_path / "client.toml"), "--workdir", "work", "--run-id", "client",
            "--debug", options=("--verbose",), spark__driver__host="127.0.0.1",
        )  # fmt: skip
    assert client.process.returncode == 0, client.output
    etl = EtlConfig(image_size=16, encoding="png", unit_min_images=20, chunk_bytes=8_000)
    here = build_here(f"{root}/images", str(tmp_path / "here"), etl)
    digests = {open_dataset(uri).manifest.content_digest for uri in (here, f"{root}/client")}
    assert digests == {dataset.manifest.content_digest}
    assert summary_of(f"{root}/work", "cluster")["dataset"]["content_digest"] in digests

    assert watch.has_drivers_key == set()
    seen = "\n".join(sorted(watch.arguments))
    assert all(part in seen for part in ON_EXECUTORS if not part.startswith("train")), seen
    assert "canary" not in seen.lower()
    assert watch.hides_a_key and len(watch.pages) == 4 and watch.pages_with_canaries == set()
    logs = yarn_cluster.container_logs
    assert list(events.rglob("events_*")) and list(logs.rglob("stderr"))
    assert files_with_canaries(events, logs, submitter.folder) == []
    assert "canary" not in (yarn_cluster.folder / "servers.log").read_text().lower()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "launcher", "strategy"),
    [("cluster", "horovod_spark", "horovod"), ("client", "spark_barrier", "torch_ddp")],
)
def test_a_training_runs_on_executors_of_yarn(
    root: str, dataset: Dataset, submitter: Submitter, mode: str, launcher: str, strategy: str
):
    """The other two pairs are those of the drill that kills an executor."""
    run_id = f"whole-{launcher}"
    train = submitter.run(
        "train/job.py", "--config", "cluster.toml", "--workdir", f"{root}/work", "--run-id", run_id, "--until", "train",
        "--set", f"train.launcher={launcher}", "--set", f"train.strategy={strategy}",
        "--set", f"models.uri={root}/{run_id}", options=IN_MODE[mode],
    )  # fmt: skip
    assert train.process.returncode == 0, train.output
    found = summary_of(f"{root}/work", run_id)["train"]
    assert (found["launcher"], found["strategy"], found["world_size"]) == (launcher, strategy, 2)
    assert found["steps"] == 8


@pytest.mark.exhaustive
def test_more_ranks_than_slots_are_refused_with_both_numbers(dataset: Dataset, submitter: Submitter):
    """Without waiting for them; the cores of an executor are Spark's own default."""
    train = submitter.run(
        "train/job.py", "--config", "cluster.toml", "--workdir", "work", "--run-id", "few", "--until", "train",
        "--set", "train.num_workers=4", "--set", "train.num_streams=12",
        # Longer than the test waits.
        "--set", "train.watch.start_timeout_seconds=1200", options=IN_MODE["client"],
    )  # fmt: skip
    assert train.process.returncode == 2, train.output
    [line] = [line for line in train.our_lines() if line.startswith("ERROR")]
    assert line.startswith("ERROR 2: a training of 4 ranks, but Spark at 'yarn' runs 2 task(s) at a time; "), line
    assert "spark.executor.instances" in line


def chosen_for(root: str, models: str, model: str, strategy: str, launcher: str) -> list[str]:
    names = {"strategy": strategy, "launcher": launcher, "model": f"{model}:net"}
    chosen = [f"models.uri={root}/{models}", *RECORDED, *(f"train.{key}={value}" for key, value in names.items())]
    return [part for each in chosen for part in ("--set", each)]


def undisturbed_steps(root: str, folder: Path, model: str) -> Steps:
    """Of the same training, on one rank here."""
    chosen = chosen_for(root, "alone", model, "single", "local")
    done = shardmill("train", "cluster.toml", "--run-id", model, *chosen, "--set", "train.num_workers=1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return steps_of(folder / "shardmill-work", model)


@pytest.mark.parametrize(
    ("mode", "model", "strategy", "launcher"),
    [
        ("cluster", "gated_torch", "torch_ddp", "spark_barrier"),
        exhaustive("client", "gated_keras", "horovod", "horovod_spark"),
    ],
)
def test_a_training_continues_after_its_executor_was_killed(
    root: str, dataset: Dataset, submitter: Submitter, yarn_cluster: YarnCluster,
    mode: str, model: str, strategy: str, launcher: str,
):  # fmt: skip
    run_id = f"{launcher}-{mode}"
    train = submitter.start(
        "train/job.py", "--config", "cluster.toml", "--workdir", f"{root}/work", "--run-id", run_id, "--until", "train",
        *chosen_for(root, run_id, model, strategy, launcher), *MAY_RESTART,
        options=IN_MODE[mode], **behind_gate(submitter, run_id),
    )  # fmt: skip
    kill_an_executor(yarn_cluster.mark, train, f"{root}/work", run_id)
    alone = undisturbed_steps(root, submitter.folder, model)
    assert train.wait() == 0, train.output
    check_it_went_on(f"{root}/work", run_id, launcher, alone)


def test_in_cluster_mode_an_application_with_nothing_to_do_succeeds(root: str, dataset: Dataset, submitter: Submitter):
    arguments = ("--config", "cluster.toml", "--workdir", f"{root}/work", "--run-id", "again")
    again = submitter.run("etl/job.py", *arguments, options=CLUSTER_MODE)
    assert again.process.returncode == 0, again.output
    assert summary_of(f"{root}/work", "again")["dataset"]["version"] == 1


def test_in_cluster_mode_the_summary_has_the_exit_code(root: str, dataset: Dataset, submitter: Submitter):
    arguments = ("--config", "cluster.toml", "--set", f"source.uri={root}/nowhere", "--set", f"dataset.uri={root}/none")
    failed = submitter.run(
        "etl/job.py", *arguments, "--workdir", f"{root}/work", "--run-id", "failed", options=CLUSTER_MODE
    )
    # YARN's own, which is the same for every reason.
    assert failed.process.returncode == 1
    summary = summary_of(f"{root}/work", "failed")
    assert (summary["status"], summary["exit_code"]) == ("failed", 2)
    assert summary["error"].startswith(f"no images below {root}/nowhere")
