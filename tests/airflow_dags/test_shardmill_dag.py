"""The DAG for real: `airflow dags test` over spark-submit and the command line; who is tried again; parse time."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.command import BIN, ENVIRONMENT, ROOT
from tests.support import write_images

STAGES = ["etl", "verify", "train", "evaluate", "gate", "promote", "report"]


def environment_of(folder: Path) -> dict[str, str]:
    return {
        **ENVIRONMENT,
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "airflow_dags"),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "SHARDMILL_CONFIG_DIR": str(folder / "configs"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def write_config(folder: Path, name: str, source: Path) -> None:
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / f"{name}.toml").write_text(
        f'[source]\nuri = "{source}"\n[dataset]\nuri = "{folder}/dataset"\n[etl]\nimage_size = 16\n'
        "[train]\nepochs = 1\nglobal_batch_size = 16\n"
        '[spark.etl.conf]\n"spark.ui.enabled" = "false"\n'
    )


def python(code: str, folder: Path, timeout: float = 120) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment_of(folder),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(400)
def test_a_dag_run_publishes_a_dataset_and_a_model(tmp_path: Path):
    write_images(tmp_path / "images", num_images=120, num_classes=3)
    write_config(tmp_path, "tiny", tmp_path / "images")
    environment = environment_of(tmp_path)
    for command in (["airflow", "db", "migrate"], ["airflow", "dags", "test", "shardmill_tiny"]):
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], env=environment, capture_output=True, text=True, timeout=300
        )
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
    assert names <= {"version", "content_digest", "weights_sha256", "decision", "current"}
    assert {"version", "weights_sha256", "decision"} <= names


def test_a_failure_is_classified_by_the_summary_of_this_attempt(tmp_path: Path):
    # The operators themselves, on a config that cannot work: it is not tried again, by spark-submit or by command.
    write_config(tmp_path, "bad", tmp_path / "nowhere")
    printed = python(
        f"""
import json
from airflow_dags.shardmill_dag import ShardmillOperator, ShardmillSparkOperator, RunFolder, hand_on, PROJECT
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from shardmill.events import StageRecord, write_stage_record

workdir, config = {str(tmp_path / "work")!r}, {str(tmp_path / "configs" / "bad.toml")!r}
common = ["--workdir", workdir, "--run-id", "r"]
command = ShardmillOperator(task_id="train", stage="train", arguments=["train", config, *common], workdir=workdir,
                            shardmill_run_id="r")
spark = ShardmillSparkOperator(task_id="etl", stage="etl", workdir=workdir, shardmill_run_id="r",
                               conn_id="spark_default",
                               application=str(PROJECT / "etl" / "job.py"),
                               application_args=["--config", config, *common])
killed = ShardmillOperator(task_id="train", stage="train", arguments=["-c", "kill -9 $$"], workdir=workdir,
                           shardmill_run_id="r")
seen = {{}}
def try_it(name, operator):
    try:
        operator.execute({{}})
    except AirflowException as error:
        seen[name] = [type(error).__name__, str(error)]
try_it("command", command)
try_it("spark", spark)
import os
os.environ["SHARDMILL_COMMAND"] = "sh"
# The failures above are on record still: a death without a word must not be taken for one of them.
try_it("killed", killed)
for code in (2, 3, 4, 5, 6, 7, 8, 9):
    write_stage_record(workdir, "codes", "etl", StageRecord(stage="etl", status="failed", exit_code=code, error="e"))
    seen[code] = [type(RunFolder(workdir, "codes").failure("etl", "ended")).__name__, ""]
print(json.dumps(seen))
""",
        tmp_path,
    )
    seen = json.loads(printed.splitlines()[-1])
    assert seen["command"][0] == seen["spark"][0] == "AirflowFailException"
    assert "exit code 3" in seen["command"][1] and "is not a committed dataset" in seen["command"][1]
    assert "exit code 2" in seen["spark"][1] and "nowhere" in seen["spark"][1]
    assert seen["killed"][0] == "AirflowException" and "left no reason" in seen["killed"][1]
    assert [code for code in "23456789" if seen[code][0] == "AirflowFailException"] == ["2", "3", "7", "8", "9"]


def test_a_dag_for_each_config_and_none_without_a_folder(tmp_path: Path):
    for name in ("one", "two"):
        write_config(tmp_path, name, tmp_path)
    code = (
        "import airflow_dags.shardmill_dag as module\n"
        "for name, dag in vars(module).items():\n"
        "    if name.startswith('dag_'):\n"
        "        tasks = ' '.join(task.task_id for task in dag.topological_sort())\n"
        "        print(dag.dag_id, dag.max_active_runs, dag.catchup, tasks)\n"
    )
    expected = [f"shardmill_{name} 1 False {' '.join(STAGES)}" for name in ("one", "two")]
    assert python(code, tmp_path).splitlines() == expected
    assert python(f"import os; del os.environ['SHARDMILL_CONFIG_DIR']\n{code}", tmp_path) == ""


def test_parsing_is_quick_beside_airflow_itself(tmp_path: Path):
    write_config(tmp_path, "one", tmp_path)
    code = (
        "import time\n"
        "from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator\n"
        "start = time.process_time()\n"
        "import airflow_dags.shardmill_dag as module\n"
        "print(time.process_time() - start)\n"
        "import sys\n"
        "print([name for name in ('pyspark', 'tensorflow', 'pyarrow', 'cv2') if name in sys.modules])\n"
    )
    best = 10.0
    for _ in range(3):
        seconds, heavy = python(code, tmp_path).splitlines()
        assert heavy == "[]"
        best = min(best, float(seconds))
    # CPU time: what other tests do to this machine is not the DAG file's.
    assert best < 0.3, best
