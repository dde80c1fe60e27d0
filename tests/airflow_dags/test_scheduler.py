"""The DAG on Airflow's own scheduler: images arrive between two runs; tasks are killed, cleared, run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_dags.run_folder import RunFolder
from shardmill.dataset.versions import latest_version
from shardmill.stores import open_store
from tests.canaries import SECRET_SETTINGS, files_with_canaries, toml_table
from tests.pipeline.command import ROOT
from tests.services.airflow import Airflow, running_airflow
from tests.services.marked import marked
from tests.support import write_images

DAG_ID = "shardmill_tiny"
STAGES = ["doctor", "etl", "verify", "train", "evaluate", "gate", "promote", "report"]
NUM_BACKFILLS = int(os.environ.get("SHARDMILL_BACKFILLS", "0"))
CONNECTION = {"conn_type": "spark", "host": "yarn", "password": "canary-connection", "extra": '{"queue": "images"}'}

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800)]


@pytest.fixture
def airflow(tmp_path: Path) -> Iterator[Airflow]:
    """A scheduler, with the DAG deployed as the README says: one file, copied."""
    for folder in ("configs", "gate", "python", "airflow/dags"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "airflow_dags" / "shardmill_dag.py", tmp_path / "airflow" / "dags")
    shutil.copy(Path(__file__).parent / "gated_model.py", tmp_path / "python")
    write_images(tmp_path / "images", num_images=90, num_classes=3)
    secret = toml_table({**SECRET_SETTINGS, "spark.ui.enabled": "false"})
    (tmp_path / "configs" / "tiny.toml").write_text(
        f'[source]\nuri = "{tmp_path}/images"\n[dataset]\nuri = "{tmp_path}/dataset"\n[etl]\nimage_size = 16\n'
        '[train]\nmodel = "gated_model:build"\nepochs = 1\nglobal_batch_size = 16\nnum_workers = 2\n'
        "stop_timeout_seconds = 5\n"
        # The connection's `yarn` is nowhere: no task could run with it.
        f'[spark]\nmaster = "local[2]"\netl.conf = {secret}\ntrain.conf = {secret}\n'
    )
    settings = {
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(CONNECTION),
        "SHARDMILL_CONFIG_DIR": f"{tmp_path}/configs",
        "SHARDMILL_WORKDIR": f"{tmp_path}/work",
        "SHARDMILL_SCHEDULE": "* * * * *",
        "SHARDMILL_RETRY_DELAY_SECONDS": "1",
        "PYTHONPATH": f"{ROOT}:{tmp_path}/python",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TEST_GATE": f"{tmp_path}/gate",
    }
    with running_airflow(tmp_path / "airflow", DAG_ID, settings) as running:
        yield running


def test_scheduled_runs_publish_each_version_and_each_model_once(airflow: Airflow, tmp_path: Path):
    airflow.set_paused(DAG_ID, False)

    # The first run. Images arrive when its ETL has ended: a folder appears at once, or not at all.
    [first] = airflow.wait_for("a scheduled run", lambda: airflow.runs(DAG_ID))
    assert first["run_type"] == "scheduled"
    first_id = first["dag_run_id"]
    airflow.wait_for("the ETL", lambda: airflow.tasks(DAG_ID, first_id)["etl"]["state"] == "success")
    write_images(tmp_path / "arriving", num_images=60, num_classes=1, seed=1)
    os.rename(tmp_path / "arriving" / "class_0", tmp_path / "images" / "class_0" / "more")

    # Its training: the process of the task is killed, then the task is cleared as it runs; the third try may go on.
    wait_for_ranks(airflow, tmp_path, try_number=1)
    assert not [arguments for arguments in marked(airflow.mark).values() if "canary" in str(arguments).lower()]
    os.kill(task_process(airflow, try_number=1), signal.SIGKILL)
    wait_until_nothing_is_left(airflow, try_number=1)
    wait_for_ranks(airflow, tmp_path, try_number=2)
    clear(airflow, first_id, "train")
    wait_until_nothing_is_left(airflow, try_number=2)
    wait_for_ranks(airflow, tmp_path, try_number=3)
    (tmp_path / "gate" / "open").touch()
    wait_for_end(airflow, first_id)
    assert (
        stage(tmp_path, first_id, "etl")["published"] and stage(tmp_path, first_id, "train", "dataset")["version"] == 1
    )

    # One of those that follow publishes what has arrived, and another one finds nothing new: nothing is trained.
    arrived = airflow.wait_for(
        "a run with the new images", lambda: next_run_with(airflow, tmp_path, first_id, status="done")
    )
    wait_for_end(airflow, arrived)
    assert stage(tmp_path, arrived, "etl")["published"] and stage(tmp_path, arrived, "train", "dataset")["version"] == 2
    idle = airflow.wait_for(
        "a run with nothing new", lambda: next_run_with(airflow, tmp_path, arrived, status="skipped")
    )
    wait_for_end(airflow, idle)
    assert not stage(tmp_path, idle, "etl")["published"]
    assert record(tmp_path, idle, "train")["status"] == record(tmp_path, idle, "evaluate")["status"] == "skipped"

    # A run that is cleared and done again; dates that are filled in later, if asked for.
    clear(airflow, arrived)
    if NUM_BACKFILLS:
        backfill(airflow, tmp_path, NUM_BACKFILLS)
    wait_for_end(airflow, arrived)
    assert all(task["try_number"] >= 2 for task in airflow.tasks(DAG_ID, arrived).values())

    # Two versions, two trainings, two exports, each made known once by the run that made it.
    assert latest_version(open_store(str(tmp_path / "dataset"))) == 2
    models = tmp_path / "work" / "tiny" / "models"
    assert len(list(models.glob("trainings/*/*/**/result.json"))) == 2
    assert len(list(models.glob("exports/*.json"))) == 2
    told = {
        (event["source_task_id"], event["source_run_id"], event["extra"].get("version")) for event in events(airflow)
    }
    assert {each for each in told if each[0] == "etl"} == {("etl", first_id, 1), ("etl", arrived, 2)}
    assert {run_id for _, run_id, _ in told} == {first_id, arrived}

    # The report is linked, and nothing that Airflow keeps holds a secret.
    link = airflow.api("GET", f"dags/{DAG_ID}/dagRuns/{arrived.replace('+', '%2B')}/taskInstances/report/links")
    assert Path(link["extra_links"]["Report"]).is_file(), link
    assert not files_with_canaries(airflow.home)


def wait_for_ranks(airflow: Airflow, folder: Path, *, try_number: int) -> None:
    """Both ranks of a try of the training wait in the user's model."""
    ready = [folder / "gate" / f"try-{try_number}-rank-{rank}" for rank in range(2)]
    airflow.wait_for(f"the ranks of try {try_number}", lambda: all(file.exists() for file in ready))


def task_process(airflow: Airflow, *, try_number: int) -> int:
    """Id of the process of Airflow that runs the task: spark-submit's parent."""
    processes = airflow.processes_of("train", try_number).items()
    [spark_submit] = [pid for pid, arguments in processes if "org.apache.spark.deploy.SparkSubmit" in arguments]
    return int(Path(f"/proc/{spark_submit}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until_nothing_is_left(airflow: Airflow, *, try_number: int) -> None:
    """No driver and no rank. The documented limit is 30 s; a test on a busy machine asks only whether they end."""
    what = f"the end of all processes of try {try_number}"
    airflow.wait_for(what, lambda: not airflow.processes_of("train", try_number))


def clear(airflow: Airflow, run_id: str, *task_ids: str) -> None:
    """What the button does: these tasks, or all of a run's, are done again."""
    which = {"task_ids": task_ids} if task_ids else {}
    options = {"dry_run": False, "dag_run_id": run_id, "only_failed": False, **which}
    airflow.api("POST", f"dags/{DAG_ID}/clearTaskInstances", options)


def backfill(airflow: Airflow, folder: Path, num_dates: int) -> None:
    """Runs for dates that had none: all find what is there already."""
    first = datetime(2026, 1, 2, tzinfo=UTC)
    last = first + timedelta(minutes=num_dates - 1)
    dates = {"from_date": first.isoformat(), "to_date": last.isoformat()}
    airflow.api("POST", "backfills", {"dag_id": DAG_ID, "max_active_runs": 1, **dates})

    def ended() -> list[str]:
        runs = [run for run in airflow.runs(DAG_ID) if run["run_type"] == "backfill"]
        assert all(run["state"] != "failed" for run in runs), airflow.told()
        ids = [run["dag_run_id"] for run in runs if run["state"] == "success"]
        return ids if len(ids) == num_dates else []

    for run_id in airflow.wait_for(f"{num_dates} runs of other dates", ended, seconds=300.0 * num_dates):
        assert record(folder, run_id, "etl")["status"] == record(folder, run_id, "train")["status"] == "skipped"


def wait_for_end(airflow: Airflow, run_id: str) -> None:
    def ended() -> bool:
        state = next(run["state"] for run in airflow.runs(DAG_ID) if run["dag_run_id"] == run_id)
        assert state != "failed", airflow.told()
        return state == "success"

    airflow.wait_for(f"the end of {run_id}", ended)


def next_run_with(airflow: Airflow, folder: Path, after: str, *, status: str) -> str | None:
    """The first scheduled run behind `after` whose ETL ended like this."""
    ids = [run["dag_run_id"] for run in airflow.runs(DAG_ID) if run["run_type"] == "scheduled"]
    later = ids[ids.index(after) + 1 :]
    return next((each for each in later if record(folder, each, "etl").get("status") == status), None)


def record(folder: Path, run_id: str, name: str) -> dict[str, Any]:
    """What a stage of a run has left; empty if there is nothing yet."""
    return RunFolder(str(folder / "work" / "tiny"), run_id.replace(":", "").replace("+", "_")).record_of(name)


def stage(folder: Path, run_id: str, name: str, section: str = "") -> dict[str, Any]:
    return record(folder, run_id, name)["sections"][section or name]


def events(airflow: Airflow) -> list[dict[str, Any]]:
    return airflow.api("GET", "assets/events?limit=100")["asset_events"]
