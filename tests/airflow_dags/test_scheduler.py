"""The DAG on Airflow's own scheduler: images arrive between two runs; tasks are killed, cleared, run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_dags.run_folder import RunFolder
from shardmill.dataset.versions import latest_version
from shardmill.stores import open_store
from tests.canaries import SECRET_SETTINGS, files_with_canaries, toml_table
from tests.lab.commands import ROOT
from tests.lab.datasets import write_images
from tests.processes import parent_of
from tests.quick_start import FOLDER
from tests.services.airflow import Airflow, running_airflow
from tests.services.marked import marked

DAG_ID = "shardmill_tiny"
ASSET_ID, TRAINING_ID, PREDICT_ID = "shardmill_own", "shardmill_own_train", "predict_tiny"
STAGES = ["doctor", "etl", "verify", "train", "evaluate", "gate", "promote", "report"]
# Ten times what Airflow and `watch.stop_timeout_seconds` give them, 5 s each: ranks at the gate never end unasked.
LEFT_SECONDS = 100.0
NUM_BACKFILLS = 3
CONNECTION = {"conn_type": "spark", "host": "yarn", "password": "canary-connection", "extra": '{"queue": "images"}'}

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, configs, and what comes of them."""
    return tmp_path_factory.mktemp("airflow")


@pytest.fixture(scope="module")
def airflow(folder: Path) -> Iterator[Airflow]:
    """A scheduler with the DAGs deployed as docs/airflow.md says: one file, copied; and one that trains on its own."""
    for name in (f"gate/{DAG_ID}", f"gate/{TRAINING_ID}", "python", "airflow/dags"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "airflow_dags" / "shardmill_dag.py", folder / "airflow" / "dags")
    shutil.copy(Path(__file__).parent / "gated_model.py", folder / "python")
    write_images(folder / "images", num_images=90, num_classes=3)
    write_config(folder, "configs/tiny.toml")
    write_config(folder, "asset_configs/own.toml")
    (folder / "airflow" / "dags" / "own_training.py").write_text(
        "from airflow_dags.factory import DagOptions, dags_of\n"
        "options = DagOptions(train_on_asset=True, dag={'default_args': {'retries': 0}})\n"
        f"globals().update(dags_of('{folder}/asset_configs/own.toml', options))\n"
    )
    places = {"config_file": "configs/tiny.toml", "models": "work/tiny/models", "dataset": "tiny@1", "out": "answers"}
    arguments = {name: f"{folder}/{path}" for name, path in {**places, "workdir": "work/tiny"}.items()}
    (folder / "airflow" / "dags" / "predictions.py").write_text(
        "from airflow.sdk import DAG\nfrom airflow_dags.predictions import ShardmillPredictOperator\n"
        f"with DAG('{PREDICT_ID}', schedule=None):\n"
        f"    ShardmillPredictOperator(task_id='predict', **{arguments})\n"
    )
    settings = {
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(CONNECTION),
        "SHARDMILL_CONFIG_DIR": f"{folder}/configs",
        "SHARDMILL_WORKDIR": f"{folder}/work",
        "SHARDMILL_SCHEDULE": "* * * * *",
        "SHARDMILL_RETRY_DELAY_SECONDS": "1",
        "PYTHONPATH": f"{ROOT}:{folder}/python:{FOLDER}",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TEST_GATE": f"{folder}/gate",
    }
    with running_airflow(folder / "airflow", DAG_ID, settings) as running:
        yield running


def write_config(folder: Path, file: str) -> None:
    secret = toml_table({**SECRET_SETTINGS, "spark.ui.enabled": "false"})
    (folder / file).parent.mkdir()
    (folder / file).write_text(
        f'[source]\nuri = "{folder}/images"\n[dataset]\nuri = "{folder}/{Path(file).stem}"\n[etl]\nimage_size = 16\n'
        'max_drift = 0.9\n[train]\nmodel = "gated_model:build"\nepochs = 1\nglobal_batch_size = 16\nnum_workers = 2\n'
        # Ranks that a test stops for a while are not silent.
        "watch.stop_timeout_seconds = 5\nwatch.silent_seconds = 600\n"
        # The connection's `yarn` is nowhere: no task could run with it.
        f'[spark]\nmaster = "local[2]"\netl.conf = {secret}\ntrain.conf = {secret}\n'
    )


@pytest.fixture(scope="module")
def first_id(airflow: Airflow, folder: Path) -> str:
    """The first run of the schedule, which has published version 1. More images have arrived when its ETL has ended."""
    airflow.set_paused(DAG_ID, False)
    [first] = airflow.wait_for("a scheduled run", lambda: airflow.runs(DAG_ID))
    assert first["run_type"] == "scheduled"
    first_id = first["dag_run_id"]
    airflow.wait_for("the ETL", lambda: airflow.tasks(DAG_ID, first_id)["etl"]["state"] == "success")
    # A folder appears at once, or not at all.
    write_images(folder / "arriving", num_images=60, num_classes=1, seed=1)
    os.rename(folder / "arriving" / "class_0", folder / "images" / "class_0" / "more")

    # Its training: the process of the task is killed, then the task is cleared as it runs; the third try may go on.
    wait_for_ranks(airflow, folder, DAG_ID, try_number=1)
    assert not [arguments for arguments in marked(airflow.mark).values() if "canary" in str(arguments).lower()]
    os.kill(task_process(airflow, DAG_ID, try_number=1), signal.SIGKILL)
    wait_until_nothing_is_left(airflow, DAG_ID, try_number=1)
    wait_for_ranks(airflow, folder, DAG_ID, try_number=2)
    airflow.clear(DAG_ID, first_id, "train")
    wait_until_nothing_is_left(airflow, DAG_ID, try_number=2)
    wait_for_ranks(airflow, folder, DAG_ID, try_number=3)
    (folder / "gate" / DAG_ID / "open").touch()
    airflow.wait_for_end(DAG_ID, first_id)
    # No other run takes the processors of what follows.
    airflow.set_paused(DAG_ID, True)
    return first_id


def test_a_scheduled_run_whose_training_is_killed_and_cleared_publishes_once(
    airflow: Airflow, folder: Path, first_id: str
):
    assert stage(folder, DAG_ID, first_id, "etl")["published"]
    assert stage(folder, DAG_ID, first_id, "train", "dataset")["version"] == 1
    check_published(airflow, folder, [first_id])

    # The report is linked, and nothing that Airflow keeps holds a secret.
    link = airflow.api("GET", f"dags/{DAG_ID}/dagRuns/{first_id.replace('+', '%2B')}/taskInstances/report/links")
    assert Path(link["extra_links"]["Report"]).is_file(), link
    assert not files_with_canaries(airflow.home)


def test_a_dag_of_ones_own_predicts_on_the_master_of_the_config(airflow: Airflow, folder: Path, first_id: str):
    airflow.wait_for(PREDICT_ID, lambda: airflow.api("GET", f"dags/{PREDICT_ID}"))
    airflow.set_paused(PREDICT_ID, False)
    run_id = airflow.trigger(PREDICT_ID)
    airflow.wait_for_end(PREDICT_ID, run_id)  # Not on the connection's `yarn`, which is nowhere.
    assert record(folder, PREDICT_ID, run_id, "predict")["status"] == "done"
    assert latest_version(open_store(str(folder / "answers"))) == 1
    assert [event["extra"]["version"] for event in events(airflow, PREDICT_ID)] == [1]


@pytest.mark.exhaustive
def test_scheduled_runs_publish_each_version_and_each_model_once(airflow: Airflow, folder: Path, first_id: str):
    airflow.set_paused(DAG_ID, False)
    # One of those that follow publishes what has arrived, and another one finds nothing new: nothing is trained.
    arrived = airflow.wait_for(
        "a run with the new images", lambda: next_run_with(airflow, folder, first_id, status="done")
    )
    airflow.wait_for_end(DAG_ID, arrived)
    assert stage(folder, DAG_ID, arrived, "etl")["published"]
    assert stage(folder, DAG_ID, arrived, "train", "dataset")["version"] == 2
    idle = airflow.wait_for("a run with nothing new", lambda: next_run_with(airflow, folder, arrived, status="skipped"))
    airflow.wait_for_end(DAG_ID, idle)
    assert not stage(folder, DAG_ID, idle, "etl")["published"]
    assert {record(folder, DAG_ID, idle, name)["status"] for name in ("train", "evaluate")} == {"skipped"}

    # A run that is cleared and done again; dates that are filled in later.
    airflow.clear(DAG_ID, arrived)
    backfill(airflow, folder, NUM_BACKFILLS)
    airflow.wait_for_end(DAG_ID, arrived)
    assert all(task["try_number"] >= 2 for task in airflow.tasks(DAG_ID, arrived).values())
    check_published(airflow, folder, [first_id, arrived])
    airflow.set_paused(DAG_ID, True)


def check_published(airflow: Airflow, folder: Path, run_ids: list[str]) -> None:
    """A version, a training and an export of each of these runs, each made known once by the run that made it."""
    assert latest_version(open_store(str(folder / "tiny"))) == len(run_ids)
    models = folder / "work" / "tiny" / "models"
    assert len(list(models.glob("trainings/*/*/**/result.json"))) == len(run_ids)
    assert len(list(models.glob("exports/*.json"))) == len(run_ids)
    told = {
        (event["source_task_id"], event["source_run_id"], event["extra"].get("version"))
        for event in events(airflow, DAG_ID)
    }
    of_etl = {("etl", run_id, number) for number, run_id in enumerate(run_ids, 1)}
    assert {each for each in told if each[0] == "etl"} == of_etl
    assert {run_id for _, run_id, _ in told} == set(run_ids)


@pytest.mark.exhaustive
def test_each_new_version_starts_one_training_whose_lost_attempts_publish_nothing(airflow: Airflow, folder: Path):
    for dag_id in (ASSET_ID, TRAINING_ID):
        airflow.wait_for(dag_id, lambda dag_id=dag_id: airflow.api("GET", f"dags/{dag_id}"))
        airflow.set_paused(dag_id, False)

    # A dataset version, which starts its training: of a DAG that nobody has started, on the version of the event.
    published = airflow.trigger(ASSET_ID)
    airflow.wait_for_end(ASSET_ID, published)
    [training] = airflow.wait_for("the training of the version", lambda: airflow.runs(TRAINING_ID))
    assert training["run_type"] == "asset_triggered"
    run_id = training["dag_run_id"]

    # Its task is marked as failed while it runs: its driver and its ranks end, too.
    wait_for_ranks(airflow, folder, TRAINING_ID, try_number=1)
    airflow.mark_failed(TRAINING_ID, run_id, "train")
    wait_until_nothing_is_left(airflow, TRAINING_ID, try_number=1)
    airflow.clear(TRAINING_ID, run_id, "train")

    # The worker that supervises it is killed: no driver and no rank is left, before Airflow knows of it.
    wait_for_ranks(airflow, folder, TRAINING_ID, try_number=2)
    os.kill(parent_of(task_process(airflow, TRAINING_ID, try_number=2)), signal.SIGKILL)
    wait_until_nothing_is_left(airflow, TRAINING_ID, try_number=2)
    airflow.mark_failed(TRAINING_ID, run_id, "train")
    airflow.clear(TRAINING_ID, run_id, "train")

    # Airflow loses sight of the next attempt, which is frozen, with all that runs it. The run is still at work here, so
    # another one is refused.
    wait_for_ranks(airflow, folder, TRAINING_ID, try_number=3)
    task = task_process(airflow, TRAINING_ID, try_number=3)
    watchers = [parent_of(task), task]
    lost = list(airflow.processes_of(TRAINING_ID, "train", try_number=3))
    send(signal.SIGSTOP, *watchers, *lost)
    airflow.mark_failed(TRAINING_ID, run_id, "train")
    airflow.clear(TRAINING_ID, run_id, "train")
    logs = airflow.home / "logs" / f"dag_id={TRAINING_ID}"
    airflow.wait_for(
        "the refusal of the next attempt",
        lambda: any("is at work in another process" in log.read_text() for log in logs.glob("**/attempt=4.log")),
    )
    airflow.wait_for("its end", lambda: airflow.tasks(TRAINING_ID, run_id)["train"]["state"] == "failed")

    # Once the frozen one is killed, the next one ends the run.
    send(signal.SIGKILL, *watchers, *lost)
    wait_until_nothing_is_left(airflow, TRAINING_ID, try_number=3)
    airflow.clear(TRAINING_ID, run_id, "train")
    wait_for_ranks(airflow, folder, TRAINING_ID, try_number=5)
    (folder / "gate" / TRAINING_ID / "open").touch()
    airflow.wait_for_end(TRAINING_ID, run_id)
    # Of the whole pipeline it is a part: the ETL was another run's.
    assert run_of(folder, TRAINING_ID, run_id).summary()["status"] == "partial"

    assert {airflow.tasks(TRAINING_ID, run_id)[name]["state"] for name in ("drift", "train")} == {"success"}

    # A run with nothing new starts no training; one that is done again makes no other version and no other training.
    airflow.wait_for_end(ASSET_ID, airflow.trigger(ASSET_ID))
    assert latest_version(open_store(str(folder / "own"))) == 1
    assert len(airflow.runs(TRAINING_ID)) == 1
    told = [(event["source_task_id"], event["source_run_id"]) for event in events(airflow, ASSET_ID, TRAINING_ID)]
    assert sorted(told) == [("etl", published), ("promote", run_id)]


def send(signal_number: int, *pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal_number)


def wait_for_ranks(airflow: Airflow, folder: Path, dag_id: str, *, try_number: int) -> None:
    """Both ranks of a try of the training wait in the user's model."""
    ready = [folder / "gate" / dag_id / f"try-{try_number}-rank-{rank}" for rank in range(2)]
    airflow.wait_for(f"the ranks of try {try_number}", lambda: all(file.exists() for file in ready))


def task_process(airflow: Airflow, dag_id: str, *, try_number: int) -> int:
    """Id of the process of Airflow that runs the task: spark-submit's parent."""
    processes = airflow.processes_of(dag_id, "train", try_number).items()
    [spark_submit] = [pid for pid, arguments in processes if "org.apache.spark.deploy.SparkSubmit" in arguments]
    return parent_of(spark_submit)


def wait_until_nothing_is_left(airflow: Airflow, dag_id: str, *, try_number: int) -> None:
    """No driver and no rank."""
    what, began = f"the end of all processes of try {try_number}", time.monotonic()
    airflow.wait_for(what, lambda: not airflow.processes_of(dag_id, "train", try_number), LEFT_SECONDS)
    print(f"{what}: {time.monotonic() - began:.1f} s")


def backfill(airflow: Airflow, folder: Path, num_dates: int) -> None:
    """Runs for dates that had none: all find what is there already."""
    first = datetime(2026, 1, 2, tzinfo=UTC)
    last = first + timedelta(minutes=num_dates - 1)
    dates = {"from_date": first.isoformat(), "to_date": last.isoformat()}
    airflow.api("POST", "backfills", {"dag_id": DAG_ID, "max_active_runs": 1, **dates})

    def ended() -> list[str]:
        runs = [run for run in airflow.runs(DAG_ID) if run["run_type"] == "backfill"]
        assert all(run["state"] != "failed" for run in runs), airflow.state_and_logs()
        ids = [run["dag_run_id"] for run in runs if run["state"] == "success"]
        return ids if len(ids) == num_dates else []

    for run_id in airflow.wait_for(f"{num_dates} runs of other dates", ended, seconds=300.0 * num_dates):
        assert (
            record(folder, DAG_ID, run_id, "etl")["status"]
            == record(folder, DAG_ID, run_id, "train")["status"]
            == "skipped"
        )


def next_run_with(airflow: Airflow, folder: Path, after: str, *, status: str) -> str | None:
    """The first scheduled run behind `after` whose ETL ended like this."""
    ids = [run["dag_run_id"] for run in airflow.runs(DAG_ID) if run["run_type"] == "scheduled"]
    later = ids[ids.index(after) + 1 :]
    return next((each for each in later if record(folder, DAG_ID, each, "etl").get("status") == status), None)


def record(folder: Path, dag_id: str, run_id: str, name: str) -> dict[str, Any]:
    """What a stage of a run has left; empty if there is nothing yet."""
    return run_of(folder, dag_id, run_id).record_of(name)


def run_of(folder: Path, dag_id: str, run_id: str) -> RunFolder:
    config = dag_id.split("_")[1]
    return RunFolder(str(folder / "work" / config), run_id.replace(":", "").replace("+", "_"))


def stage(folder: Path, dag_id: str, run_id: str, name: str, section: str = "") -> dict[str, Any]:
    return record(folder, dag_id, run_id, name)["sections"][section or name]


def events(airflow: Airflow, *dag_ids: str) -> list[dict[str, Any]]:
    found = airflow.api("GET", "assets/events?limit=100")["asset_events"]
    return [event for event in found if event["source_dag_id"] in dag_ids]
