"""The DAG for real: `airflow dags test` over spark-submit and the command line; who is tried again; parse time."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.dag_programs import STAGES, environment_of, program, python, write_config
from tests.canaries import PLAIN_SETTINGS, SECRET_SETTINGS, toml_table
from tests.lab.commands import BIN, ROOT
from tests.lab.datasets import write_images
from tests.services.airflow import put_database

pytestmark = pytest.mark.drill


@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
def test_a_dag_run_publishes_a_dataset_and_a_model(tmp_path: Path):
    write_images(tmp_path / "images", num_images=120, num_classes=3)
    write_config(tmp_path, "tiny", tmp_path / "images")
    environment = environment_of(tmp_path)
    put_database(environment)
    command = [str(BIN / "airflow"), "dags", "test", "shardmill_tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    with sqlite3.connect(tmp_path / "airflow" / "airflow.db") as database:
        states = dict(database.execute("select task_id, state from task_instance"))
        xcoms = [
            json.loads(value) for (value,) in database.execute("select value from xcom where key = 'return_value'")
        ]
        events = database.execute(
            "select e.source_task_id, a.uri, e.extra from asset_event e join asset a on a.id = e.asset_id order by e.id"
        ).fetchall()
    assert states == dict.fromkeys(STAGES, "success")

    # One run record, written by seven processes.
    [run] = (tmp_path / "configs" / "work" / "tiny" / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["promotion"]["decision"]) == ("ok", 0, "promoted")
    assert set(summary["stages"]) == {*STAGES, "export"}
    assert (run / "report.html").is_file()

    # An event for each thing that was published, with its ids; and nothing but ids and digests in XCom.
    assert [(task, uri) for task, uri, _ in events] == [
        ("etl", (tmp_path / "dataset").as_uri()),
        ("promote", (tmp_path / "configs" / "work" / "tiny" / "models").as_uri()),
    ]
    assert json.loads(events[0][2])["content_digest"] == summary["dataset"]["content_digest"]
    names = {name for xcom in xcoms for name in (json.loads(xcom) if isinstance(xcom, str) else xcom)}
    assert names <= {"version", "content_digest", "drift", "weights_sha256", "decision", "current"}
    assert {"version", "weights_sha256", "decision"} <= names


def test_a_failure_is_classified_by_the_summary_of_this_attempt(tmp_path: Path):
    # The operators themselves, on a config that cannot work: it is not tried again, by spark-submit or by command.
    write_config(tmp_path, "bad", tmp_path / "nowhere")
    printed = program("failing_operators", tmp_path, tmp_path / "work", tmp_path / "configs" / "bad.toml")
    seen = json.loads(printed.splitlines()[-1])
    assert seen["command"][0] == seen["spark"][0] == "AirflowFailException"
    assert "exit code 2" in seen["command"][1] and "there is no dataset at" in seen["command"][1]
    assert "exit code 2" in seen["spark"][1] and "nowhere" in seen["spark"][1]
    assert seen["doctor"][0] == "AirflowFailException" and "exit code 2" in seen["doctor"][1]
    assert "unknown config key train.stratgey" in seen["doctor"][1]
    assert seen["died"][0] == "AirflowException" and "exit code 4" in seen["died"][1]
    assert seen["wrong config"] == ["AirflowFailException", "no section"]
    assert seen["no command"][0] == "AirflowFailException" and "SHARDMILL_COMMAND" in seen["no command"][1]
    assert seen["killed"][0] == "AirflowException" and "left no reason" in seen["killed"][1]
    assert [code for code in "23456789" if seen[code][0] == "AirflowFailException"] == ["2", "3", "7", "8", "9"]


def test_a_dag_for_each_config_and_none_without_a_folder(tmp_path: Path):
    for name in ("one", "two"):
        write_config(tmp_path, name, tmp_path)
    code = (
        "import airflow_dags.shardmill_dag as module\n"
        "for name, dag in vars(module).items():\n"
        "    if name.startswith('shardmill_'):\n"
        "        tasks = ' '.join(task.task_id for task in dag.topological_sort())\n"
        "        print(dag.dag_id, dag.max_active_runs, dag.catchup, tasks)\n"
    )
    expected = [f"shardmill_{name} 1 False {' '.join(STAGES)}" for name in ("one", "two")]
    assert python(code, tmp_path).splitlines() == expected
    assert python(f"import os; del os.environ['SHARDMILL_CONFIG_DIR']\n{code}", tmp_path) == ""


SHOW_DAGS = """
import json
import airflow_dags.shardmill_dag as module
from airflow.serialization.serialized_objects import DagSerialization
for name, dag in sorted(vars(module).items()):
    if name.startswith("shardmill_"):
        dag.validate()
        data = json.dumps(DagSerialization.to_dict(dag))
        print(json.dumps([dag.dag_id, [task.task_id for task in dag.tasks], dag.description, sorted(dag.tags), data]))
"""


def test_a_wrong_config_file_takes_no_other_dag_away_and_secrets_are_in_none(tmp_path: Path):
    write_config(tmp_path, "good", tmp_path)
    write_config(tmp_path, "my photos", tmp_path)
    write_config(tmp_path, "same name", tmp_path)
    write_config(tmp_path, "same_name", tmp_path)
    for name, text in (("text", 'dataset = "s3://bucket"'), ("conf", "[spark]\netl.conf = 3"), ("broken", "[dataset")):
        (tmp_path / "configs" / f"{name}.toml").write_text(text)
    (tmp_path / "configs" / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "configs" / "folder.toml").mkdir()
    # One that is wrong is quoted in its error; one that is right carries every planted secret.
    (tmp_path / "configs" / "url.toml").write_text('dataset = "s3://user:canary@bucket"')
    planted = tmp_path / "configs" / "good.toml"
    table = toml_table({**SECRET_SETTINGS, **PLAIN_SETTINGS})
    planted.write_text(planted.read_text().split("[spark.etl.conf]")[0] + f"[spark.etl]\nconf = {table}\n")
    printed = python(SHOW_DAGS, tmp_path)
    # Airflow logs to stdout, too.
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    shown = {dag_id: rest for dag_id, *rest in rows}

    assert {name for name, (tasks, *_) in shown.items() if tasks == STAGES} == {"shardmill_good", "shardmill_my_photos"}
    expected = {
        "shardmill_text": "dataset = 's3://bucket' is not a section; expected [dataset]",
        "shardmill_conf": "spark.etl.conf = 3 is not a section",
        "shardmill_broken": "Expected ']'",
        "shardmill_bytes": "can't decode byte 0xff",
        "shardmill_folder": "Is a directory",
        "shardmill_url": "dataset = 's3://(hidden)@bucket'",
        "shardmill_same_name": "'same name.toml', 'same_name.toml' would all be shardmill_same_name",
    }
    wrong = {name: description for name, (tasks, description, tags, _) in shown.items() if "config-error" in tags}
    assert wrong.keys() == expected.keys()
    assert all(shown[name][0] == ["config_error"] for name in wrong)
    for name, part in expected.items():
        assert part in wrong[name] and wrong[name].startswith("CONFIG ERROR: "), wrong[name]
    # Airflow's database holds serialized DAGs, and spark-submit's command line the operator's settings.
    assert "canary" not in printed.lower()
    assert all(f'"{name}": "{value}"' in shown["shardmill_good"][-1] for name, value in PLAIN_SETTINGS.items())


def bagged(folder: Path, *cases: dict[str, str]) -> list[dict[str, Any]]:
    """What Airflow itself takes up from the DAG file, for each set of variables."""
    (folder / "cases.json").write_text(json.dumps(cases))
    printed = program("bagged_dags", folder, folder / "cases.json")
    return json.loads(printed.splitlines()[-1])


def test_a_config_that_fails_while_its_dag_is_built_leaves_no_half_of_it(tmp_path: Path):
    write_config(tmp_path, "good", tmp_path)
    configs = tmp_path / "configs"
    configs.joinpath("number.toml").write_text("[dataset]\nuri = 5\n")
    configs.joinpath("model.toml").write_text("[dataset]\nuri = '/d'\n[models]\nuri = ['a', 'b']\n")
    # The dataset's asset is refused by Airflow, when the first task is there already.
    configs.joinpath("long.toml").write_text(f"[dataset]\nuri = '/{'d' * 1600}'\n")
    configs.joinpath(f"{'n' * 250}.toml").write_text("[dataset]\nuri = '/d'\n")
    (tmp_path / "configs").joinpath(os.fsdecode(b"caf\xe9.toml")).write_text("[dataset]\nuri = '/d'\n")
    for shown in bagged(tmp_path, {}, {"TRAIN_ON_ASSET": "true"}):
        assert shown["errors"] == {}
        wrong = {name: dag for name, dag in shown["dags"].items() if not name.startswith("shardmill_good")}
        assert sorted(name[:15] for name in wrong) == [
            "shardmill_caf_", "shardmill_long", "shardmill_model", "shardmill_nnnnn", "shardmill_numbe",
        ]  # fmt: skip
        for dag in wrong.values():
            assert (dag["tasks"], dag["tags"]) == (["config_error"], ["config-error", "shardmill"])
        assert "dataset.uri = 5 is not a text" in wrong["shardmill_number"]["description"]
        assert "models.uri = ['a', 'b'] is not a text" in wrong["shardmill_model"]["description"]
        assert "1500 characters" in wrong["shardmill_long"]["description"]
        assert "caf\\udce9.toml" in wrong["shardmill_caf_"]["description"]
        good = [
            task for name, dag in shown["dags"].items() if name.startswith("shardmill_good") for task in dag["tasks"]
        ]
        assert sorted(good) == sorted(STAGES)


WRONG_VARIABLES = [
    {"SCHEDULE": "@dayly"},
    {"SCHEDULE": "99 * * * *"},
    {"SCHEDULE": "daily"},
    # The thirty-first of February never comes.
    {"SCHEDULE": "0 0 31 2 *"},
    {"MAINTENANCE_SCHEDULE": "@wekly"},
    {"RETRIES": "many"},
    {"RETRIES": "-1"},
    # Airflow's database has no room for it.
    {"RETRIES": "99999999999"},
    {"RETRY_DELAY_SECONDS": "0"},
    {"RETRY_DELAY_SECONDS": "9" * 20},
    {"EXECUTION_TIMEOUT_SECONDS": "1.5"},
    {"COMMAND": 'shardmill "'},
    {"COMMAND": " "},
    {"WORKDIR": "s3:/bucket"},
    {"WORKDIR": "s4://bucket"},
    {"REPORTS_URL": "reports.example.org"},
    {"MLFLOW_URL": "sqlite:///mlflow.db"},
    {"TRAIN_ON_ASSET": "perhaps"},
    {"CONFIG_DIR": "/nowhere"},
    {"CONFIG_DIR": "/etc/hostname"},
]
RIGHT_VARIABLES = [{"SCHEDULE": text} for text in ("@daily", "@once", "@continuous", "*/5 * * * *", "0 0 29 2 *")]


def test_a_wrong_variable_is_a_dag_that_names_it(tmp_path: Path):
    write_config(tmp_path, "one", tmp_path)
    shown = bagged(tmp_path, *WRONG_VARIABLES, *RIGHT_VARIABLES)
    for given, seen in zip(WRONG_VARIABLES, shown[: len(WRONG_VARIABLES)], strict=True):
        [(name, value)] = given.items()
        assert seen["errors"] == {}
        [(dag_id, dag)] = seen["dags"].items()
        assert dag_id == ("shardmill_config_error" if name == "CONFIG_DIR" else "shardmill_one")
        assert (dag["tasks"], dag["tags"]) == (["config_error"], ["config-error", "shardmill"])
        assert dag["description"].startswith(f"CONFIG ERROR: SHARDMILL_{name}={value!r}: expected "), dag
    for seen in shown[len(WRONG_VARIABLES) :]:
        assert seen["dags"]["shardmill_one"]["tasks"] == STAGES


def test_a_copy_of_the_dag_file_finds_the_installed_jobs(tmp_path: Path):
    write_config(tmp_path, "one", tmp_path)
    (tmp_path / "dags").mkdir()
    # A user's own modules of these names in the DAG folder are not taken for ours.
    for name in ("etl", "train", "pipeline"):
        (tmp_path / "dags" / f"{name}.py").write_text("raise SystemExit(1)")
    copy = tmp_path / "dags" / "copied.py"
    copy.write_bytes((ROOT / "airflow_dags" / "shardmill_dag.py").read_bytes())
    printed = python(
        f"import runpy, sys; sys.path.insert(0, {str(copy.parent)!r})\n"
        f"module = runpy.run_path({str(copy)!r})\n"
        "print([task.application for task in module['shardmill_one'].tasks if hasattr(task, 'application')])\n",
        tmp_path,
    )
    assert printed.strip() == str([str(ROOT / "etl" / "job.py"), str(ROOT / "train" / "job.py")])


def test_parsing_loads_nothing_beside_airflow_itself(tmp_path: Path):
    """Airflow parses each DAG file again and again: what that costs is what the file imports."""
    write_config(tmp_path, "one", tmp_path)
    printed = python(
        "import sys\n"
        "from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator\n"
        "import airflow.providers.apache.spark.operators.spark_submit\n"
        "before = set(sys.modules)\n"
        "import airflow_dags.shardmill_dag\n"
        "added = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(added - set(sys.stdlib_module_names)))\n",
        tmp_path,
    )
    # croniter is Airflow's, for the schedule.
    assert printed.splitlines()[-1] == "['airflow', 'airflow_dags', 'croniter', 'shardmill']"
