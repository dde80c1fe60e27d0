"""What decides about the DAGs from outside: connection and config, the environment, the form that starts a run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.airflow_dags.test_shardmill_dag import STAGES, python, write_config

MASTERS = """
import json, os
from airflow_dags.operators import ShardmillSparkOperator
from airflow.sdk.exceptions import AirflowFailException

def command(master, connection):
    os.environ.pop("AIRFLOW_CONN_SPARK_DEFAULT", None)
    if connection:
        os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps(connection)
    task = ShardmillSparkOperator(
        task_id="etl", stage="etl", workdir="w", master=master, application="job.py", name="n"
    )
    try:
        return task._get_hook()._build_spark_submit_command("job.py")
    except AirflowFailException as error:
        return str(error)

yarn = {"conn_type": "spark", "host": "yarn", "extra": json.dumps({"queue": "q", "deploy-mode": "cluster"})}
cluster = {"conn_type": "spark", "host": "spark://h", "port": 7077, "password": "canary-password"}
asked = (("", yarn), ("yarn", yarn), ("local[2]", yarn), ("", cluster), ("", None), ("local[3]", None))
print(json.dumps([command(*each) for each in asked]))
"""


def test_the_config_names_the_master_or_else_the_connection_does_or_else_nobody(tmp_path: Path):
    in_cluster = ["--master", "yarn", "--conf", "spark.yarn.submit.waitAppCompletion=false", "--name", "n"]
    in_cluster += ["--queue", "q", "--deploy-mode", "cluster"]
    no_connection = "The conn_id `spark_default` isn't defined"
    assert json.loads(python(MASTERS, tmp_path).splitlines()[-1]) == [
        ["spark-submit", *in_cluster, "job.py"],
        ["spark-submit", *in_cluster, "job.py"],
        # What the connection says besides is about its own cluster.
        ["spark-submit", "--master", "local[2]", "--name", "n", "job.py"],
        ["spark-submit", "--master", "spark://h:7077", "--name", "n", "job.py"],
        f"no spark.master in the config, and no connection spark_default ({no_connection}); set one of them",
        ["spark-submit", "--master", "local[3]", "--name", "n", "job.py"],
    ]


SETTINGS = """
import json, os
from types import SimpleNamespace
from jinja2 import Environment
from pathlib import Path
from airflow_dags.operators import ReportLink, chosen_flags
from airflow_dags.settings import dag_settings
from airflow_dags.shardmill_dag import ASSET_VERSION, dags_of_folder
from airflow.sdk.exceptions import ParamValidationError

def dags(**variables):
    for name, value in variables.items():
        os.environ["SHARDMILL_" + name] = value
    try:
        found = dags_of_folder(dag_settings())
        return {dag_id: ["config-error" in dag.tags, dag.description] for dag_id, dag in found.items()}, found
    finally:
        for name in variables:
            del os.environ["SHARDMILL_" + name]

def limits(task):
    return [task.execution_timeout.total_seconds(), task.retries, task.retry_delay.total_seconds()]

shown = {}
_, found = dags()
dag = found["shardmill_one"]
shown["tasks"] = [limits(task) for task in dag.tasks]
shown["params"] = dag.params.dump()
try:
    dag.params.validate() and dag.params.update({"fresh": "certainly"})
except (ParamValidationError, ValueError) as error:
    shown["refused"] = str(error)
etl, train = dag.get_task("etl"), dag.get_task("train")
context = {"params": {"fresh": True, "replace_source": False}}
shown["flags"] = [chosen_flags(task.flags, context) for task in (etl, train)]
etl.shardmill_run_id = "r"
shown["link"] = [ReportLink().get_link(etl, ti_key=None)]
os.environ["SHARDMILL_REPORTS_URL"] = "https://reports.example.org/all/"
shown["link"].append(ReportLink().get_link(etl, ti_key=None))
_, found = dags(RETRY_DELAY_SECONDS="7", RETRIES="0", EXECUTION_TIMEOUT_SECONDS="90")
task = found["shardmill_one"].get_task("verify")
shown["given"] = limits(task)
shown["wrong"] = dags(EXECUTION_TIMEOUT_SECONDS="soon")[0]["shardmill_one"]
shown["wrong asset"] = dags(TRAIN_ON_ASSET="perhaps")[0]["shardmill_one"]

names, found = dags(TRAIN_ON_ASSET="true")
shown["own"] = {dag_id: [task.task_id for task in dag.topological_sort()] for dag_id, dag in found.items()}
shown["taken"] = names["shardmill_two"]
training = found["shardmill_one_train"]
[alias] = found["shardmill_one"].get_task("etl").outlets
[asset] = training.schedule
shown["asset"] = [alias.name, asset.name, asset.uri == found["shardmill_one"].get_task("etl").publishes]
shown["version"] = [
    Environment().from_string(ASSET_VERSION).render(triggering_asset_events=events)
    for events in ({}, {asset: [SimpleNamespace(extra={"version": 3}), SimpleNamespace(extra={"version": 12})]})
]
shown["arguments"] = training.get_task("train").application_args[-2:]
print(json.dumps(shown))
"""


def test_the_environment_and_the_form_decide_within_their_types(tmp_path: Path):
    for name in ("one", "two", "two_train"):
        write_config(tmp_path, name, tmp_path)
    shown = json.loads(python(SETTINGS, tmp_path).splitlines()[-1])
    assert shown["tasks"] == [[86400, 2, 60]] * len(STAGES)
    assert shown["given"] == [90, 0, 7]
    assert shown["wrong"][0] and "SHARDMILL_EXECUTION_TIMEOUT_SECONDS='soon'" in shown["wrong"][1]
    assert shown["wrong asset"][0] and "SHARDMILL_TRAIN_ON_ASSET='perhaps'" in shown["wrong asset"][1]

    # The form that starts a run.
    assert shown["params"] == {"replace_source": False, "fresh": False, "require_promotion": False}
    assert "'certainly' is not of type 'boolean'" in shown["refused"]
    assert shown["flags"] == [[], ["--fresh"]]

    # The report, by its own path or below a web server's.
    folder = f"{tmp_path}/configs/work"
    assert shown["link"] == [
        f"{folder}/one/runs/r/report.html",
        "https://reports.example.org/all/one/runs/r/report.html",
    ]

    # Training as a DAG of its own, which a new version of the dataset starts.
    assert shown["own"]["shardmill_one"] == STAGES[:2] and shown["own"]["shardmill_one_train"] == STAGES[2:]
    assert shown["taken"][0] and "its training would be shardmill_two_train" in shown["taken"][1]
    assert shown["asset"] == ["shardmill_one_dataset:new", "shardmill_one_dataset", True]
    assert shown["version"] == ["0", "12"]
    assert shown["arguments"][0] == "--dataset-version"
