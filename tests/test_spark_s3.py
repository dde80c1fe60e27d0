"""S3 from the executors of a Spark cluster: keys by a profile of the nodes' own, and planted secrets found nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import EtlConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.stores import open_store
from tests.canaries import DRIVERS_OWN, SECRET_SETTINGS, files_with_canaries, toml_table
from tests.lab.commands import in_process
from tests.lab.datasets import build_here, upload, write_images
from tests.services.marked import MARK, free_ports
from tests.services.spark_standalone import SparkCluster
from tests.services.spark_submit import Submitter, make_bundle, summary_of
from tests.services.versitygw import KEY, SECRET, Gateway
from tests.services.watch import ON_EXECUTORS, watching

pytestmark = pytest.mark.exhaustive

CONFIG = """
[source]
uri = "{bucket}/images"
[dataset]
uri = "{bucket}/dataset"
[models]
uri = "{bucket}/models"
[etl]
image_size = 16
encoding = "png"
unit_min_images = 20
chunk_bytes = 8000
[train]
epochs = 1
global_batch_size = 24
num_workers = 2
strategy = "horovod"
launcher = "horovod_spark"
checkpoint_every_steps = 2
nics = ["lo"]
[spark.etl]
conf = {conf}
[spark.train]
conf = {conf}
"""


def test_executors_read_and_commit_with_their_own_profile_and_no_secret_is_shown(
    gateway_bucket: str, gateway: Gateway, spark_cluster: SparkCluster, tmp_path: Path
):
    write_images(tmp_path / "images", num_images=120)
    upload(tmp_path / "images", f"{gateway_bucket}/images")
    # What a node has of its own: files in the home of the user that executors run as.
    node, job = tmp_path / "node", tmp_path / "job"
    node.mkdir()
    (job / "events").mkdir(parents=True)
    (node / "config").write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {gateway.endpoint}\n")
    (node / "credentials").write_text(
        f"[lab]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
        "[other]\naws_session_token = canary-of-a-session\n"
    )
    [ui_port] = free_ports(1)
    names = {
        "AWS_PROFILE": "lab",
        "AWS_CONFIG_FILE": str(node / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(node / "credentials"),
    }
    conf = {
        **SECRET_SETTINGS, **{f"spark.executorEnv.{name}": value for name, value in names.items()},
        "spark.ui.enabled": "true", "spark.ui.port": str(ui_port), "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (job / "events").as_uri(), "spark.eventLog.compress": "false", "spark.logConf": "true",
        "spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1",
    }  # fmt: skip
    (node / "c.toml").write_text(CONFIG.format(bucket=gateway_bucket, conf=toml_table(conf)))
    bundle, workdir = make_bundle(tmp_path), f"{gateway_bucket}/work"
    cluster = {"SPARK_CONF_DIR": str(spark_cluster.conf), "SPARK_LOCAL_IP": "127.0.0.1", MARK: spark_cluster.mark}
    submitter = Submitter(spark_cluster.master, {**cluster, **DRIVERS_OWN}, {}, (bundle,), job)
    with watching(spark_cluster.mark, ui_port, SECRET) as watch:
        for script, *more in (("etl/job.py",), ("train/job.py", "--until", "train")):
            done = submitter.run(
                script, "--config", str(node / "c.toml"), "--workdir", workdir, "--run-id", "run", "--debug", *more,
                options=("--verbose",), spark__driver__host="127.0.0.1",
            )  # fmt: skip
            assert done.process.returncode == 0, done.output
            # What the next one says would take its place.
            for name in ("stdout", "stderr"):
                (job / name).rename(job / f"{name} of {Path(script).parent}")
    assert in_process("report", "--workdir", workdir, "--run-id", "run", cwd=tmp_path).returncode == 0

    # It worked: what the executors made is what is made here, and two ranks trained on it.
    here = build_here(f"{gateway_bucket}/images", str(tmp_path / "here"),
                      EtlConfig(image_size=16, encoding="png", unit_min_images=20, chunk_bytes=8_000))  # fmt: skip
    made = open_dataset(f"{gateway_bucket}/dataset").manifest
    assert (made.version, made.content_digest) == (1, open_dataset(here).manifest.content_digest)
    found = summary_of(workdir, "run")["train"]
    assert (found["launcher"], found["world_size"]) == ("horovod_spark", 2)

    # Nothing of it came from the driver's keys: executors have only what their nodes say.
    assert watch.has_drivers_key == set()
    seen = "\n".join(sorted(watch.arguments))
    assert all(part in seen for part in ON_EXECUTORS), seen
    assert "canary" not in seen.lower()
    assert watch.hides_a_key and len(watch.pages) == 4 and watch.pages_with_canaries == set()
    # Event logs of two applications; what drivers, executors, master and workers said; the run's record, its report
    # and checkpoints, the dataset and the models.
    assert len(list((job / "events").rglob("events_*"))) == 2 and spark_cluster.work_folders()
    left = [gateway.folder, job, *(path for path in spark_cluster.folder.iterdir() if path != spark_cluster.conf)]
    assert files_with_canaries(*left) == []
    record = {file.path for file in open_store(f"{workdir}/runs/run").list("")}
    assert {"events.jsonl", "report.html", "summary.json"} <= record
