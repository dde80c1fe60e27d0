"""Both forms of the DAG train on the version that their `verify` has checked, and that has not drifted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.airflow_dags.dag_programs import python, write_config

pytestmark = pytest.mark.drill

SHOW_VERSIONS = """
import jinja2
import airflow_dags.shardmill_dag as module
class Event:
    def __init__(self, version, params):
        self.extra = {"version": version, "params": params}
class Task:
    def xcom_pull(self, task_ids):
        return {"etl": {"version": 41}, "verify": {"version": 42}}[task_ids]
events = {"asset": [Event(9, []), Event(10, ["accept_drift"])]} if "events" in ARGUMENTS else {}
for name, dag in sorted(vars(module).items()):
    for task in dag.topological_sort() if name.startswith("shardmill_") else ():
        given = getattr(task, "arguments", None) or getattr(task, "application_args", None)
        if "--dataset-version" in given:
            text = given[given.index("--dataset-version") + 1]
            rendered = jinja2.Template(text).render(ti=Task(), triggering_asset_events=events)
            chosen = task.chosen_flags({"params": {}, "triggering_asset_events": events})
            print(f"{dag.dag_id}.{task.task_id}={rendered}", *chosen)
"""


@pytest.mark.parametrize(
    ("on_asset", "events", "dag_id", "verified"),
    [
        ("false", "", "shardmill_one", 41),
        ("true", "events", "shardmill_one_train", 10),
        ("true", "", "shardmill_one_train", 0),
    ],
)
def test_what_is_trained_on_is_the_version_that_was_verified(
    tmp_path: Path, on_asset: str, events: str, dag_id: str, verified: int
):
    write_config(tmp_path, "one", tmp_path, etl="max_drift = 0.1\n")
    code = f"import os; os.environ['SHARDMILL_TRAIN_ON_ASSET'] = '{on_asset}'\nARGUMENTS = '{events}'\n{SHOW_VERSIONS}"
    # By hand, without an event, `verify` is given 0, which is the latest one; it tells `train` which that was.
    # The `etl` of the same DAG has refused what had drifted. Who accepts it there, has accepted it for the training.
    accepted = " --set=etl.max_drift=1" if events else ""
    drift = [f"{dag_id}.drift=42{accepted}"] if on_asset == "true" else []
    printed = [line for line in python(code, tmp_path).splitlines() if line.startswith(dag_id + ".")]
    assert printed == [f"{dag_id}.verify={verified}", *drift, f"{dag_id}.train=42"]
