"""Prints, as JSON, how the operators fail for the config argv[2] with the work directory argv[1]."""

import json
import os
import sys

from airflow.sdk.exceptions import AirflowException

from airflow_dags.factory import job_file
from airflow_dags.operators import ConfigErrorOperator, RunFolder, ShardmillOperator, ShardmillSparkOperator
from shardmill.jobs.run_files import RunState, write_summary

workdir, config = sys.argv[1:]
common = ["--workdir", workdir, "--run-id", "r"]
command = ShardmillOperator(
    task_id="train", stage="train", arguments=["train", config, *common], workdir=workdir, shardmill_run_id="r"
)
typo = f"{os.path.dirname(config)}/typo.toml"
with open(typo, "w") as file:
    file.write('[train]\nstratgey = "torch_ddp"\n')
doctor = ShardmillOperator(
    task_id="doctor", stage="doctor", arguments=["doctor", typo, *common], workdir=workdir, shardmill_run_id="r"
)
spark = ShardmillSparkOperator(
    task_id="etl",
    stage="etl",
    workdir=workdir,
    shardmill_run_id="r",
    conn_id="spark_default",
    application=job_file("etl"),
    application_args=["--config", config, *common],
)
killed = ShardmillOperator(
    task_id="train", stage="train", arguments=["-c", "kill -9 $$"], workdir=workdir, shardmill_run_id="r"
)
died = ShardmillOperator(
    task_id="doctor", stage="doctor", arguments=["-c", "exit $CODE"], env={"CODE": "4"}, workdir=workdir,
    shardmill_run_id="r",
)  # fmt: skip
seen = {}


def try_it(name, operator):
    try:
        operator.execute({})
    except AirflowException as error:
        seen[name] = [type(error).__name__, str(error)]


try_it("command", command)
try_it("doctor", doctor)
try_it("spark", spark)
try_it("wrong config", ConfigErrorOperator(task_id="t", problem="no section"))
os.environ["SHARDMILL_COMMAND"] = "sh"
# The failures above are on record still: a death without a word must not be taken for one of them.
try_it("killed", killed)
try_it("died", died)
os.environ["SHARDMILL_COMMAND"] = "/nowhere/shardmill"
try_it("no command", died)
for code in (2, 3, 4, 5, 6, 7, 8, 9):
    write_summary(workdir, "codes", RunState("failed", code, "e"))
    seen[code] = [type(RunFolder(workdir, "codes").failure("etl", "ended")).__name__, ""]
print(json.dumps(seen))
