"""Prints, as JSON, the spark-submit command of the DAG's operator for masters of a config and a connection."""

import json
import os

from airflow.sdk.exceptions import AirflowFailException

from airflow_dags.operators import ShardmillSparkOperator


def command(master, connection, **arguments):
    os.environ.pop("AIRFLOW_CONN_SPARK_DEFAULT", None)
    if connection:
        os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps(connection)
    task = ShardmillSparkOperator(
        task_id="etl", stage="etl", workdir="w", master=master, application="job.py", name="n", **arguments
    )
    try:
        return task._get_hook()._build_spark_submit_command("job.py")
    except AirflowFailException as error:
        return str(error)


yarn = {"conn_type": "spark", "host": "yarn", "extra": json.dumps({"queue": "q", "deploy-mode": "cluster"})}
cluster = {"conn_type": "spark", "host": "spark://h", "port": 7077, "password": "canary-password"}
asked = (("", yarn), ("yarn", yarn), ("local[2]", yarn), ("", cluster), ("", None), ("local[3]", None))
given = {"driver_memory": "3g", "num_executors": 7, "py_files": "b.zip", "deploy_mode": "cluster", "yarn_queue": "mine"}
given["env_vars"] = {"A": "b"}
print(json.dumps([*(command(*each) for each in asked), command("yarn", cluster, **given)]))
