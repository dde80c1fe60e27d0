"""Spark stages in YARN's cluster mode, by DAGs: an application outlives a killed worker, and ends with its task."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from etl.config import EtlConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.versions import latest_version
from shardmill.stores import open_store
from tests.canaries import toml_table
from tests.lab.commands import ROOT
from tests.lab.datasets import build_here, upload, write_images
from tests.processes import is_running, parent_of
from tests.services.airflow import Airflow, running_airflow
from tests.services.hadoop import pyspark_jars
from tests.services.marked import QUICK_JVM, free_ports, marked
from tests.services.spark_submit import make_bundle, summary_of
from tests.services.yarn import YarnCluster

DAG_ID, TRAINED_ID = "shardmill_far", "shardmill_trained"
TRAINING_ID = f"{TRAINED_ID}_train"
DEFERRED_ID = "shardmill_deferred"
# Names of the applications.
BUILD, TRAIN, DEFERRED = f"{DAG_ID}_etl", f"{TRAINED_ID}_train", f"{DEFERRED_ID}_etl"
# Of a task that is deferred; an ETL here takes half of it.
LIMIT_SECONDS = 60
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
[train]
epochs = 1
global_batch_size = 16
num_workers = 2
strategy = "torch_ddp"
launcher = "spark_barrier"
# A driver that a test stops for a while hears nothing of its ranks.
watch.silent_seconds = 600
[spark]
etl.conf = {conf}
train.conf = {conf}
"""
ETL = EtlConfig(image_size=16, encoding="png")

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]


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
    """A scheduler whose connection is YARN in cluster mode; ETL and training are DAGs of their own."""
    folder = tmp_path_factory.mktemp("far")
    for name in ("airflow/dags", "configs", "own_configs"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "airflow_dags" / "shardmill_dag.py", folder / "airflow" / "dags")
    conf = {
        "spark.submit.pyFiles": str(make_bundle(folder)),
        "spark.pyspark.python": sys.executable,
        "spark.yarn.jars": f"local:{pyspark_jars()}/*",
        "spark.executor.instances": "1",
        "spark.executor.cores": "2",
        "spark.executor.memory": "512m",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": " ".join(QUICK_JVM),
        "spark.executor.extraJavaOptions": " ".join(QUICK_JVM),
    }
    for file, dataset in ("configs/far", "dataset"), ("configs/trained", "trained"), ("own_configs/deferred", "waited"):
        config = CONFIG.format(root=root, dataset=dataset, conf=toml_table(conf))
        (folder / f"{file}.toml").write_text(config)
    (folder / "airflow" / "dags" / "deferred.py").write_text(
        "from datetime import timedelta\nfrom airflow_dags.factory import DagOptions, dags_of\n"
        f"task = {{'deferrable': True, 'execution_timeout': timedelta(seconds={LIMIT_SECONDS})}}\n"
        "options = DagOptions(train_on_asset=True, tasks={'etl': task}, dag={'default_args': {'retries': 0}})\n"
        f"globals().update(dags_of('{folder}/own_configs/deferred.toml', options))\n"
    )
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
        "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "3",
    }
    with running_airflow(folder / "airflow", DAG_ID, settings, has_triggerer=True) as running:
        running.set_paused(DAG_ID, False)
        yield running


def test_an_application_outlives_its_worker_and_ends_with_its_task(
    airflow: Airflow, root: str, yarn_cluster: YarnCluster, tmp_path: Path
):
    # The worker is killed, and the task with it. Airflow misses them; its next try follows what goes on.
    first = airflow.trigger(DAG_ID)
    application, driver = held(airflow, yarn_cluster, BUILD, number=1)
    task = following(airflow, (DAG_ID, first, "etl"), application, try_number=1)
    os.kill(parent_of(task), signal.SIGKILL)
    airflow.wait_for("the end of the task's process", lambda: not is_running(task))
    following(airflow, (DAG_ID, first, "etl"), application, try_number=2)
    os.kill(driver, signal.SIGCONT)
    airflow.wait_for_end(DAG_ID, first)
    assert states(yarn_cluster, BUILD) == ["SUCCEEDED"]
    here = build_here(f"{root}/images", str(tmp_path / "here"), ETL)
    assert open_dataset(f"{root}/dataset").manifest.content_digest == open_dataset(here).manifest.content_digest
    assert latest_version(open_store(f"{root}/dataset")) == 1

    # With new images the task's own process is killed: the next try follows again. It is cleared, and its application
    # ends with it; another one does the work.
    write_images(tmp_path / "arriving", num_images=30, num_classes=1, seed=1)
    upload(tmp_path / "arriving" / "class_0", f"{root}/images/class_0/more")
    second = airflow.trigger(DAG_ID)
    application, _ = held(airflow, yarn_cluster, BUILD, number=2)
    os.kill(following(airflow, (DAG_ID, second, "etl"), application, try_number=1), signal.SIGKILL)
    following(airflow, (DAG_ID, second, "etl"), application, try_number=2)
    airflow.clear(DAG_ID, second, "etl")
    airflow.wait_for("the end of what was cleared", lambda: states(yarn_cluster, BUILD)[1] == "KILLED")
    other, driver = held(airflow, yarn_cluster, BUILD, number=3)

    # The worker is killed, and the application ends before the next try, which finds it and what it has left.
    task = following(airflow, (DAG_ID, second, "etl"), other, try_number=3)
    os.kill(parent_of(task), signal.SIGKILL)
    os.kill(driver, signal.SIGCONT)
    airflow.wait_for("the end of the application", lambda: states(yarn_cluster, BUILD)[2] == "SUCCEEDED")
    airflow.wait_for_end(DAG_ID, second)
    assert airflow.tasks(DAG_ID, second)["etl"]["try_number"] == 4
    assert states(yarn_cluster, BUILD) == ["SUCCEEDED", "KILLED", "SUCCEEDED"]
    assert latest_version(open_store(f"{root}/dataset")) == 2
    assert summary_of(f"{root}/work/far", folder_name(second))["dataset"]["version"] == 2


def test_a_training_outlives_its_worker_and_is_published_once(airflow: Airflow, root: str, yarn_cluster: YarnCluster):
    build_here(f"{root}/images", f"{root}/trained", ETL)
    airflow.wait_for(TRAINING_ID, lambda: airflow.api("GET", f"dags/{TRAINING_ID}"))
    airflow.set_paused(TRAINING_ID, False)

    # The worker is killed while the ranks start. Airflow misses it, and its next try follows what goes on.
    run_id = airflow.trigger(TRAINING_ID)
    application, driver = held(airflow, yarn_cluster, TRAIN, number=1)
    task = following(airflow, (TRAINING_ID, run_id, "train"), application, try_number=1)
    os.kill(parent_of(task), signal.SIGKILL)
    airflow.wait_for("the end of the task's process", lambda: not is_running(task))
    following(airflow, (TRAINING_ID, run_id, "train"), application, try_number=2)
    os.kill(driver, signal.SIGCONT)
    airflow.wait_for_end(TRAINING_ID, run_id)
    assert airflow.tasks(TRAINING_ID, run_id)["train"]["try_number"] == 2
    assert states(yarn_cluster, TRAIN) == ["SUCCEEDED"]

    # One training of two ranks in one attempt, one export, one model that is made known.
    found = summary_of(f"{root}/work/trained", folder_name(run_id))
    assert (found["train"]["launcher"], found["train"]["world_size"]) == ("spark_barrier", 2)
    models = open_store(f"{root}/models")
    names = [file.path for file in models.list("")]
    for pattern in "trainings/*/result.json", "trainings/*/attempts/*.json", "exports/*.json":
        assert len([name for name in names if fnmatch(name, pattern)]) == 1, names
    events = airflow.api("GET", "assets/events?limit=100")["asset_events"]
    assert [event["source_task_id"] for event in events if event["source_dag_id"] == TRAINING_ID] == ["promote"]


def test_a_deferred_task_holds_no_process_and_its_application_ends_with_it(
    airflow: Airflow, root: str, yarn_cluster: YarnCluster, tmp_path: Path
):
    airflow.wait_for(DEFERRED_ID, lambda: airflow.api("GET", f"dags/{DEFERRED_ID}"))
    airflow.set_paused(DEFERRED_ID, False)

    def state(run_id: str) -> str:
        return airflow.tasks(DEFERRED_ID, run_id)["etl"]["state"]

    def deferred(number: int) -> tuple[str, int]:
        run_id = airflow.trigger(DEFERRED_ID)
        _, driver = held(airflow, yarn_cluster, DEFERRED, number)
        airflow.wait_for("a deferred task", lambda: state(run_id) == "deferred")
        airflow.wait_for("no process of it", lambda: not airflow.processes_of(DEFERRED_ID, "etl", 1))
        return run_id, driver

    # A person marks it as failed.
    run_id, _ = deferred(number=1)
    airflow.mark_failed(DEFERRED_ID, run_id, "etl")
    airflow.wait_for("the end of the application", lambda: states(yarn_cluster, DEFERRED) == ["KILLED"])
    # It takes longer than it may.
    run_id, _ = deferred(number=2)
    airflow.wait_for("the end of the task", lambda: state(run_id) == "failed")
    airflow.wait_for("the end of the application", lambda: states(yarn_cluster, DEFERRED) == ["KILLED"] * 2)
    # Its application ends well, and the asset's event follows.
    run_id, driver = deferred(number=3)
    os.kill(driver, signal.SIGCONT)
    airflow.wait_for_end(DEFERRED_ID, run_id)
    assert states(yarn_cluster, DEFERRED)[2] == "SUCCEEDED"
    assert latest_version(open_store(f"{root}/waited")) == 1
    # Nothing has changed; it ends well too, and no event follows.
    run_id = airflow.trigger(DEFERRED_ID)
    airflow.wait_for_end(DEFERRED_ID, run_id)
    events = airflow.api("GET", "assets/events?limit=100")["asset_events"]
    assert [each["extra"]["version"] for each in events if each["source_dag_id"] == DEFERRED_ID] == [1]
    # YARN ends its application, which leaves no record.
    write_images(tmp_path / "arriving", num_images=30, num_classes=1, seed=2)
    upload(tmp_path / "arriving" / "class_0", f"{root}/images/class_0/later")
    run_id, _ = deferred(number=5)
    application = yarn_cluster.applications(DEFERRED)[4]["id"]
    kill = urllib.request.Request(
        f"{yarn_cluster.url}/ws/v1/cluster/apps/{application}/state",
        b'{"state": "KILLED"}',
        {"Content-Type": "application/json"},
        method="PUT",
    )
    urllib.request.urlopen(kill, timeout=60).close()
    airflow.wait_for("the end of the task", lambda: state(run_id) == "failed")
    said = f"etl ended (YARN calls {application} FAILED) and left no reason in summary.json"
    assert said in log_of(airflow, (DEFERRED_ID, run_id, "etl"), try_number=1).read_text()


def folder_name(run_id: str) -> str:
    """Of a run of Airflow, in the work directory."""
    return run_id.replace(":", "").replace("+", "_")


def states(yarn: YarnCluster, name: str) -> list[str]:
    """How each application with this name has ended, in the order in which they were submitted."""
    return [each["finalStatus"] for each in yarn.applications(name)]


def held(airflow: Airflow, yarn: YarnCluster, name: str, number: int) -> tuple[str, int]:
    """The application that was submitted as the `number`th, as soon as it runs, and its driver, which is stopped."""

    def running() -> str:
        found = yarn.applications(name)
        return found[-1]["id"] if len(found) == number and found[-1]["state"] == "RUNNING" else ""

    application = airflow.wait_for(f"application {number} of {name}", running)
    [driver] = [pid for pid, arguments in marked(yarn.mark).items() if is_driver(arguments)]
    os.kill(driver, signal.SIGSTOP)
    return application, driver


def is_driver(arguments: list[str]) -> bool:
    """Of the process in Python, not of the JVM that has started it."""
    return Path(arguments[0]).name.startswith("python") and Path(arguments[1]).name == "job.py"


def following(airflow: Airflow, task: tuple[str, str, str], application: str, try_number: int) -> int:
    """The process of a try of a task (DAG, run, task), once it waits for the application."""
    log, said = log_of(airflow, task, try_number), f"Tracking YARN application {application}"
    airflow.wait_for(f"try {try_number}", lambda: log.exists() and said in log.read_text())
    dag_id, run_id, task_id = task
    return airflow.tasks(dag_id, run_id)[task_id]["pid"]


def log_of(airflow: Airflow, task: tuple[str, str, str], try_number: int) -> Path:
    dag_id, run_id, task_id = task
    logs = airflow.home / "logs" / f"dag_id={dag_id}" / f"run_id={run_id}" / f"task_id={task_id}"
    return logs / f"attempt={try_number}.log"


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
