"""The DAG's ETL in YARN's cluster mode: its application outlives a worker that is killed, and ends with a task."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etl.config import EtlConfig
from shardmill.dataset.open import open_dataset
from shardmill.dataset.versions import latest_version
from shardmill.stores import open_store
from tests.canaries import toml_table
from tests.pipeline.command import ROOT
from tests.processes import is_running, parent_of
from tests.services.airflow import Airflow, running_airflow
from tests.services.hadoop import pyspark_jars
from tests.services.marked import QUICK_JVM, free_ports, marked
from tests.services.spark_submit import make_bundle, summary_of
from tests.services.yarn import YarnCluster
from tests.support import build_here, upload, write_images

DAG_ID = "shardmill_far"
CONFIG = """
[source]
uri = "{root}/images"
[dataset]
uri = "{root}/dataset"
[models]
uri = "{root}/models"
[etl]
image_size = 16
encoding = "png"
[spark.etl]
conf = {conf}
"""

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def root(yarn_cluster: YarnCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of HDFS with images in it."""
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, num_images=60)
    root = f"{yarn_cluster.hdfs.uri}/far"
    upload(folder, f"{root}/images")
    return root


@pytest.fixture(scope="module")
def airflow(root: str, yarn_cluster: YarnCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """A scheduler whose connection is YARN in cluster mode; the ETL is a DAG without the training."""
    folder = tmp_path_factory.mktemp("far")
    for name in ("airflow/dags", "configs"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "airflow_dags" / "shardmill_dag.py", folder / "airflow" / "dags")
    conf = {
        "spark.submit.pyFiles": str(make_bundle(folder)),
        "spark.pyspark.python": sys.executable,
        "spark.yarn.jars": f"local:{pyspark_jars()}/*",
        "spark.executor.instances": "1",
        "spark.executor.memory": "512m",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": " ".join(QUICK_JVM),
        "spark.executor.extraJavaOptions": " ".join(QUICK_JVM),
    }
    (folder / "configs" / "far.toml").write_text(CONFIG.format(root=root, conf=toml_table(conf)))
    extra = {"deploy-mode": "cluster", "yarn_resourcemanager_webapp_address": yarn_cluster.url}
    settings = {
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "yarn", "extra": json.dumps(extra)}),
        # How soon Airflow misses a task whose worker is gone; its own 300 s would be the same, later.
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
        "SHARDMILL_CONFIG_DIR": f"{folder}/configs",
        "SHARDMILL_WORKDIR": f"{root}/work",
        "SHARDMILL_TRAIN_ON_ASSET": "true",
        "SHARDMILL_RETRY_DELAY_SECONDS": "1",
        "HADOOP_CONF_DIR": str(yarn_cluster.conf),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with running_airflow(folder / "airflow", DAG_ID, settings) as running:
        running.set_paused(DAG_ID, False)
        yield running


def test_an_application_outlives_its_worker_and_ends_with_its_task(
    airflow: Airflow, root: str, yarn_cluster: YarnCluster, tmp_path: Path
):
    # The worker is killed, and the task with it. Airflow misses them; its next try follows what goes on.
    first = airflow.trigger(DAG_ID)
    application, driver = held(airflow, yarn_cluster, number=1)
    task = following(airflow, first, application, try_number=1)
    os.kill(parent_of(task), signal.SIGKILL)
    airflow.wait_for("the end of the task's process", lambda: not is_running(task))
    following(airflow, first, application, try_number=2)
    os.kill(driver, signal.SIGCONT)
    airflow.wait_for_end(DAG_ID, first)
    assert states(yarn_cluster) == ["SUCCEEDED"]
    here = build_here(f"{root}/images", str(tmp_path / "here"), EtlConfig(image_size=16, encoding="png"))
    assert open_dataset(f"{root}/dataset").manifest.content_digest == open_dataset(here).manifest.content_digest
    assert latest_version(open_store(f"{root}/dataset")) == 1

    # With new images the task's own process is killed: the next try follows again. It is cleared, and its application
    # ends with it; another one does the work.
    write_images(tmp_path / "arriving", num_images=30, num_classes=1, seed=1)
    upload(tmp_path / "arriving" / "class_0", f"{root}/images/class_0/more")
    second = airflow.trigger(DAG_ID)
    application, _ = held(airflow, yarn_cluster, number=2)
    os.kill(following(airflow, second, application, try_number=1), signal.SIGKILL)
    following(airflow, second, application, try_number=2)
    airflow.clear(DAG_ID, second, "etl")
    airflow.wait_for("the end of what was cleared", lambda: states(yarn_cluster)[1] == "KILLED")
    other, driver = held(airflow, yarn_cluster, number=3)

    # The worker is killed, and the application ends before the next try, which finds it and what it has left.
    task = following(airflow, second, other, try_number=3)
    os.kill(parent_of(task), signal.SIGKILL)
    os.kill(driver, signal.SIGCONT)
    airflow.wait_for("the end of the application", lambda: states(yarn_cluster)[2] == "SUCCEEDED")
    airflow.wait_for_end(DAG_ID, second)
    assert airflow.tasks(DAG_ID, second)["etl"]["try_number"] == 4
    assert states(yarn_cluster) == ["SUCCEEDED", "KILLED", "SUCCEEDED"]
    assert latest_version(open_store(f"{root}/dataset")) == 2
    assert summary_of(f"{root}/work/far", second.replace(":", "").replace("+", "_"))["dataset"]["version"] == 2


def applications(yarn: YarnCluster) -> list[dict[str, Any]]:
    return yarn.applications(f"{DAG_ID}_etl")


def states(yarn: YarnCluster) -> list[str]:
    """How each of them has ended, in the order in which they were submitted."""
    return [each["finalStatus"] for each in applications(yarn)]


def held(airflow: Airflow, yarn: YarnCluster, number: int) -> tuple[str, int]:
    """The application that was submitted as the `number`th, as soon as it runs, and its driver, which is stopped."""

    def running() -> str:
        found = applications(yarn)
        return found[-1]["id"] if len(found) == number and found[-1]["state"] == "RUNNING" else ""

    application = airflow.wait_for(f"application {number}", running)
    [driver] = [pid for pid, arguments in marked(yarn.mark).items() if is_driver(arguments)]
    os.kill(driver, signal.SIGSTOP)
    return application, driver


def is_driver(arguments: list[str]) -> bool:
    """Of the process in Python, not of the JVM that has started it."""
    return Path(arguments[0]).name.startswith("python") and Path(arguments[1]).name == "job.py"


def following(airflow: Airflow, run_id: str, application: str, try_number: int) -> int:
    """The process of a try of the task, once it waits for the application."""
    said = f"Tracking YARN application {application}"
    log = airflow.home / "logs" / f"dag_id={DAG_ID}" / f"run_id={run_id}" / "task_id=etl" / f"attempt={try_number}.log"
    airflow.wait_for(f"try {try_number}", lambda: log.exists() and said in log.read_text())
    return airflow.tasks(DAG_ID, run_id)["etl"]["pid"]


def test_an_application_that_yarn_has_forgotten_is_submitted_anew(yarn_cluster: YarnCluster, tmp_path: Path):
    # As after a ResourceManager that was restarted without a state store. One that does not answer has forgotten
    # nothing: the task fails, and its next try asks again.
    asked = """
import os
from airflow_dags.operators import ShardmillSparkOperator
operator = ShardmillSparkOperator(task_id="etl", stage="etl", workdir="w", shardmill_run_id="r", application="job.py",
                                  conn_id=os.environ["ASKED"])
operator._hook = operator._get_hook()
status = operator.get_job_status("application_1700000000000_0001", {})
print(status, operator.is_job_active(status), operator.is_job_succeeded(status))
"""

    def ask(address: str) -> subprocess.CompletedProcess[str]:
        extra = {"deploy-mode": "cluster", "yarn_resourcemanager_webapp_address": address}
        connection = json.dumps({"conn_type": "spark", "host": "yarn", "extra": json.dumps(extra)})
        env = {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW_CONN_FAR": connection, "ASKED": "far"}
        return subprocess.run(
            [sys.executable, "-c", asked], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
        )

    answered = ask(yarn_cluster.url)
    assert answered.stdout.splitlines()[-1] == "FORGOTTEN False False", answered.stderr[-2000:]
    silent = ask(f"http://127.0.0.1:{free_ports(1)[0]}")
    assert silent.returncode == 1 and "failed" in silent.stderr.splitlines()[-1], silent.stderr[-2000:]
