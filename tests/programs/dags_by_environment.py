"""Prints, as JSON, what the environment's settings make of the DAGs of SHARDMILL_CONFIG_DIR, and of their form."""

import json
import os
from datetime import timedelta
from types import SimpleNamespace

from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization
from jinja2 import Environment

from airflow_dags.factory import ASSET_VERSION, DagOptions, dags_of, dags_of_folder
from airflow_dags.operators import MlflowLink, ReportLink, level_of
from airflow_dags.settings import dag_settings
from shardmill.jobs.run_files import StageRecord, write_stage_record


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
shown["flags"] = [task.chosen_flags(context) for task in (etl, train)]
etl.shardmill_run_id = "r"
shown["link"] = [ReportLink().get_link(etl, ti_key=None)]
os.environ["SHARDMILL_REPORTS_URL"] = "https://reports.example.org/all/"
shown["link"].append(ReportLink().get_link(etl, ti_key=None))
train.shardmill_run_id = "r"
os.environ["SHARDMILL_MLFLOW_URL"] = "https://mlflow.example.org/"
shown["mlflow"] = [MlflowLink().get_link(train, ti_key=None)]
write_stage_record(train.workdir, "r", StageRecord(stage="train", sections={"train": {"mlflow_run_id": "1a2b"}}))
shown["mlflow"].append(MlflowLink().get_link(train, ti_key=None))
shown["links"] = [[link.name for link in task.operator_extra_links] for task in (etl, train)]
_, found = dags(RETRY_DELAY_SECONDS="7", RETRIES="0", EXECUTION_TIMEOUT_SECONDS="90")
task = found["shardmill_one"].get_task("verify")
shown["given"] = limits(task)
shown["wrong"] = dags(EXECUTION_TIMEOUT_SECONDS="soon")[0]["shardmill_one"]
shown["wrong asset"] = dags(TRAIN_ON_ASSET="perhaps")[0]["shardmill_one"]

# A DAG file of one's own.
config = f"{os.environ['SHARDMILL_CONFIG_DIR']}/one.toml"
options = DagOptions(
    schedule="@daily",
    maintenance="@weekly",
    connection="spark_gpus",
    tasks={
        "train": {"execution_timeout": timedelta(hours=8), "retries": 5, "pool": "gpus", "name": "photos_on_gpus"},
        "etl": {"conf": {"spark.executor.memory": "3g"}},
    },
    dag={
        "dagrun_timeout": timedelta(hours=12),
        "default_args": {"retries": 1},
        "tags": ["photos"],
        "params": {"season": "spring"},
    },
)
dag, maintenance = dags_of(config, options).values()
for each in (dag, maintenance):
    DagSerialization.to_dict(each)
verify, train = dag.get_task("verify"), dag.get_task("train")
shown["factory"] = {
    "schedules": [each.schedule for each in (dag, maintenance)],
    "limits": [dag.dagrun_timeout.total_seconds(), limits(verify), limits(train)],
    "given": [train.name, dag.get_task("etl").conf["spark.executor.memory"], dag.params["season"], sorted(dag.params)],
    "backoff": verify.retry_exponential_backoff,
    "placed": [verify.pool, train.pool, train._conn_id, sorted(dag.tags), train.task_group.group_id],
    "page": dag.doc_md,
    "maintenance": [task.arguments for task in maintenance.topological_sort()],
    "wrong": [
        dag.description
        for wrong in (
            DagOptions(tasks={"trian": {}}),
            DagOptions(dag={"dagrun_timout": 1}),
            DagOptions(schedule="61 * * * *"),
            DagOptions(maintenance="0 0 30 2 *"),
        )
        for dag in dags_of(config, wrong).values()
    ],
    # The config-error DAG keeps the owner, tags and schedule.
    "watched": [
        [dag.default_args["owner"], sorted(dag.tags), dag.schedule]
        for options in [DagOptions(dag={"tags": ["team"], "default_args": {"owner": "me"}}, schedule="@daily")]
        for dag in dags_of("/nowhere/one.toml", options).values()
    ],
}
shown["levels"] = [
    level_of(line)
    for line in (
        "ERROR 4: gone", "WARNING: late", "  fail disk", "step 7", "",
        '{"time": "2026-11-29T12:00:00", "level": "error", "message": "gone"}',
        '{"time": "2026-11-29T12:00:00", "level": "warning", "message": "late"}',
        '{"time": "2026-11-29T12:00:00", "level": "info", "message": "step 7"}',
    )
]  # fmt: skip
shown["flags of tasks"] = {task.task_id: list(task.flags.values()) for task in dag.tasks if task.flags}
names, found = dags(TRAIN_ON_ASSET="true", MAINTENANCE_SCHEDULE="@weekly")
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
