"""Settings of the DAGs: connection and config, the environment, and the form that starts a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.airflow_dags.dag_programs import STAGES, program, write_config
from tests.lab.commands import in_process
from tests.lab.datasets import make_dataset

RUN_ID = re.compile(r"\{\{.*\}\}")

pytestmark = pytest.mark.drill


def test_the_config_names_the_master_or_else_the_connection_does_or_else_nobody(tmp_path: Path):
    in_cluster = ["--master", "yarn", "--conf", "spark.yarn.submit.waitAppCompletion=false", "--name", "n"]
    in_cluster += ["--queue", "q", "--deploy-mode", "cluster"]
    no_connection = "The conn_id `spark_default` isn't defined"
    assert json.loads(program("spark_masters", tmp_path).splitlines()[-1]) == [
        ["spark-submit", *in_cluster, "job.py"],
        ["spark-submit", *in_cluster, "job.py"],
        # What the connection says besides is about its own cluster.
        ["spark-submit", "--master", "local[2]", "--name", "n", "job.py"],
        ["spark-submit", "--master", "spark://h:7077", "--name", "n", "job.py"],
        f"no spark.master in the config, and no connection spark_default ({no_connection}); set one of them",
        ["spark-submit", "--master", "local[3]", "--name", "n", "job.py"],
        # What the DAG's own file says.
        ["spark-submit", "--master", "yarn", "--conf", "spark.yarn.submit.waitAppCompletion=false",
         "--conf", "spark.yarn.appMasterEnv.A=b", "--py-files", "b.zip", "--num-executors", "7", "--driver-memory",
         "3g", "--name", "n", "--queue", "mine", "--deploy-mode", "cluster", "job.py"],
    ]  # fmt: skip


def test_the_environment_and_the_form_decide_within_their_types(tmp_path: Path):
    dataset = make_dataset(tmp_path, num_images=30)
    for name in ("one", "two", "two_train"):
        write_config(tmp_path, name, tmp_path)
    shown = json.loads(program("dags_by_environment", tmp_path).splitlines()[-1])
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

    assert shown["links"] == [["Report"], ["Report", "MLflow"]]
    assert shown["mlflow"] == ["", "https://mlflow.example.org/#/runs/1a2b"]

    # A DAG file of one's own decides for its config.
    factory = shown["factory"]
    assert factory["schedules"] == ["@daily", "@weekly"]
    assert factory["limits"] == [12 * 3600, [86400, 1, 60], [8 * 3600, 5, 60]]
    assert factory["placed"] == ["default_pool", "gpus", "spark_gpus", ["photos", "shardmill"], "model"]
    assert f"- dataset: `file://{dataset}`" in factory["page"]
    assert "options.tasks names trian; expected of doctor, etl" in factory["wrong"][0]
    assert "dagrun_timout" in factory["wrong"][1]
    assert "options.schedule='61 * * * *': expected a cron expression" in factory["wrong"][2]
    assert "options.maintenance='0 0 30 2 *': expected a cron expression" in factory["wrong"][3]
    assert factory["watched"] == [["me", ["config-error", "shardmill", "team"], "@daily"]]
    params = ["fresh", "replace_source", "require_promotion", "season"]
    assert factory["given"] == ["photos_on_gpus", "3g", "spring", params] and factory["backoff"]
    # What a param adds is an option of its stage.
    assert shown["flags of tasks"].keys() == {"etl", "train", "promote"}
    for stage, options in shown["flags of tasks"].items():
        known = in_process(stage, "--help", cwd=tmp_path).stdout.split()
        assert all(option.split("=")[0] in known for option in options), (stage, options)
    assert shown["levels"] == [40, 30, 40, 20, 20, 40, 30, 20]
    # The command line takes the commands of its maintenance.
    for arguments in factory["maintenance"]:
        done = in_process(*(RUN_ID.sub("r", argument) for argument in arguments), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert [arguments[0] for arguments in factory["maintenance"]] == ["compact", "gc"]

    # Training as a DAG of its own, which a new version of the dataset starts.
    assert shown["own"]["shardmill_one"] == STAGES[:2] and shown["own"]["shardmill_one_train"] == STAGES[2:]
    assert shown["taken"][0] and "it would also be shardmill_two_train" in shown["taken"][1]
    assert shown["own"]["shardmill_one_maintenance"] == ["compact", "gc"]
    assert shown["asset"] == ["shardmill_one_dataset:new", "shardmill_one_dataset", True]
    assert shown["version"] == ["0", "12"]
    assert shown["arguments"][0] == "--dataset-version"
