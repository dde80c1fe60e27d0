"""Prints, as JSON, the DAGs that Airflow takes up from the DAG file for each set of SHARDMILL_* variables."""

import json
import os
import sys
from pathlib import Path

from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.serialized_objects import DagSerialization

import airflow_dags

DAG_FILE = Path(airflow_dags.__file__).parent / "shardmill_dag.py"


def shown(dag):
    json.dumps(DagSerialization.to_dict(dag)).encode()
    return {"tasks": dag.task_ids, "tags": sorted(dag.tags), "description": dag.description}


def bag(variables):
    before = dict(os.environ)
    os.environ.update({f"SHARDMILL_{name}": value for name, value in variables.items()})
    try:
        found = DagBag(str(DAG_FILE))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {"errors": found.import_errors, "dags": {dag_id: shown(dag) for dag_id, dag in found.dags.items()}}


print(json.dumps([bag(variables) for variables in json.loads(Path(sys.argv[1]).read_text())]))
